"""Deliberate bugs, as data: `make mutations` finds out whether the tests notice each of them."""

from tests.mutations.checking import CHECKING
from tests.mutations.generating import GENERATING
from tests.mutations.kernels import KERNELS
from tests.mutations.mutation import Mutation
from tests.mutations.planning import PLANNING
from tests.mutations.running import RUNNING
from tests.mutations.tensor_cores import TENSOR_CORES

MUTATIONS: tuple[Mutation, ...] = (
    *KERNELS, *TENSOR_CORES, *PLANNING, *GENERATING, *RUNNING, *CHECKING,
)  # fmt: skip
