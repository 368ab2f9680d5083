"""What all tests share: a cache of their own, quiet defaults, GPU tests only where there is one."""

from __future__ import annotations

import gc
import os
import random
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
import torch

from fusewright import build
from fusewright.runtime import tensor_cores
from tests.precompiled import included

ROOT = Path(__file__).resolve().parents[1]
GXX_IS_USED = "CXX" not in os.environ and shutil.which("g++") is not None


def pytest_configure(config: pytest.Config) -> None:
    # Kept between runs, so that the second `make test` finds its kernels built.
    os.environ.setdefault("FUSEWRIGHT_CACHE", str(ROOT / ".pytest_cache" / "kernels"))
    # What was tuned on this machine is nothing that a test knows of; those of tuning switch it on.
    os.environ["FUSEWRIGHT_TUNED"] = "0"


def pytest_collection_finish() -> None:
    # What is imported stays: collections, of which tracing causes many, need not look at it again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


# Long tests of many like cases: of each `make test` runs one of so many cases, `make test-all` all.
SAMPLED = {
    "tests/test_altered.py::test_a_program_is_made_anew": 2,
    "tests/test_class_losses.py::test_cross_entropy": 3,
    "tests/test_codegen.py::test_softmax": 2,
    "tests/test_columns.py::test_as_exact_as_eager": 3,
    "tests/test_convolution_kernel.py::test_weights_and_taps": 5,
    "tests/test_cuda_sources.py::test_large_kernels_are_accepted": 2,
    "tests/test_cuda_sources.py::test_logsumexps_compile": 0,
    "tests/test_cuda_sources.py::test_rows_of_halves_compile": 0,
    "tests/test_extremes.py::test_places": 3,
    "tests/test_guarded.py::test_reductions": 3,
    "tests/test_guarded.py::test_shifted": 3,
    "tests/test_hunt.py::test_half_models_build_and_are_right": 2,
    "tests/test_hunt.py::test_numbers_beside_half_precision_keep_their_digits": 2,
    "tests/test_layouts.py::test_the_kernels_of_a_chain_compile": 0,
    "tests/test_layouts.py::test_outputs_and_gradients_as_eager_gives_them": 3,
    "tests/test_line_gradient_kernel.py::test_every_kind_of_window": 2,
    "tests/test_line_pairs.py::test_modules_are_as_exact_as_eager": 3,
    "tests/test_line_pairs.py::test_the_source_is_accepted": 2,
    "tests/test_logsumexp.py::test_emulated_products_keep_the_corners": 2,
    "tests/test_optable.py::test_integers": 2,
    "tests/test_padding.py::test_padding_is_part_of_loops": 3,
    "tests/test_page.py::test_partial_records_are_shown_as_far_as_they_go": 2,
    "tests/test_pooling.py::test_what_is_ours": 3,
    "tests/test_pooling_places.py::test_bits": 3,
    "tests/test_pooling_places.py::test_other_types_and_layouts": 2,
    "tests/test_pooling_places.py::test_random_windows": 2,
    "tests/test_pooling_windows.py::test_random_windows": 2,
    "tests/test_pooling_windows.py::test_what_is_costly_is_computed_once": 2,
    "tests/test_product_kernel.py::test_blocks_share_tiles": 3,
    "tests/test_product_text.py::test_products_of_halves_compile_for_both": 3,
    "tests/test_product_text.py::test_the_source_compiles_for_both": 2,
    "tests/test_products.py::test_emulated_modules_train_as_eager_does": 3,
    "tests/test_prologues.py::test_a_source_of_them_alone_is_accepted": 2,
    "tests/test_recurrent.py::test_a_long_layer_is_pytorchs_with_all_gradients": 2,
    "tests/test_reduced_emulated.py::test_channels_cross_warps": 3,
    "tests/test_reduced_emulated.py::test_emulated_modules_train_as_eager_does": 0,
    "tests/test_reduced_emulated.py::test_emulated_results_are_as_exact_as_eagers": 4,
    "tests/test_reduced_emulated.py::test_rows_by_eight_read_what_is_around": 2,
    "tests/test_reduced_kernel.py::test_emulated_modules_train_as_eager_does": 3,
    "tests/test_reduced_window.py::test_columns_that_go_together": 3,
    "tests/test_reduced_window.py::test_the_workspace_has_room_for_all_lines": 2,
    "tests/test_repeating_pads.py::test_values_and_gradients": 3,
    "tests/test_scans.py::test_models_and_their_gradients": 3,
    "tests/test_tune.py::test_every_cuda_candidate_computes_the_same": 2,
    "tests/test_turned_copies.py::test_convolutions_of_either_kind_side_by_side": 3,
    "tests/test_turned_copies.py::test_what_is_saved_of_an_epilogue_lies_row_by_row": 3,
    "tests/test_views_in_memory.py::test_images_in_channels_last_train_as_in_eager_mode": 3,
    "tests/test_views_in_memory.py::test_views_lie_as_their_specs_say": 3,
    "tests/test_volume_kernel.py::test_gradients_of_volumes_by_their_weights": 3,
    "tests/test_volumes.py::test_a_single_plane_may_have_something_beside_it": 2,
    "tests/test_volumes.py::test_modules_train_on_emulated_kernels": 3,
    "tests/test_windows.py::test_the_source_compiles_for_both": 2,
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.split("[")[0]
        one_of = SAMPLED.get(name)
        if one_of is not None and (one_of == 0 or seen[name] % one_of):
            item.add_marker(pytest.mark.slow)
        seen[name] += 1
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="PyTorch sees no CUDA device here"))


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FUSEWRIGHT_DEBUG", raising=False)
    monkeypatch.delenv("FUSEWRIGHT_DUMP", raising=False)
    yield


@pytest.fixture(autouse=True)
def _quickly_built(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the tests' time would be g++'s: at -Og it takes a third of -O3's.

    What other processes build, and tests that are marked so, has the flags that users have.
    """
    if request.node.get_closest_marker("as_users_build") is None:
        flags = tuple("-Og" if flag == "-O3" else flag for flag in build._HOST_FLAGS)
        more = included(("g++", *flags)) if GXX_IS_USED else ()
        monkeypatch.setattr(build, "_HOST_FLAGS", (*flags, *more))


@pytest.fixture(autouse=True)
def _repeatable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers in every run, whatever ran before: a failure can be seen again.

    `verify` and `bench` draw seeds that nobody can foresee; other numbers are the fuzzer's work.
    """
    seed = crc32(request.node.nodeid.encode())
    torch.manual_seed(seed)
    random.seed(seed)
    monkeypatch.setattr(secrets, "randbits", random.Random(seed).getrandbits)


@pytest.fixture
def examples() -> tuple[Path, ...]:
    """The four reference problems."""
    return tuple(sorted(p for p in (ROOT / "examples").glob("*.py") if "_new" not in p.stem))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Passes of convolutions whose precision PyTorch's library was asked for: always TF32's."""
    found: list[str] = []

    def rounds(of: tensor_cores._FwPass) -> bool:
        found.append(of.which)
        return True

    monkeypatch.setattr(tensor_cores, "_FW_ROUNDS", {})
    monkeypatch.setattr(tensor_cores, "_fw_rounds", rounds)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found
