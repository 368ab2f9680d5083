"""What a rule may read: the graph being built, and the readers of each value in the old one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fusewright.ir.graph import Arg, Dim, Graph, Node, Ref
from fusewright.rewrite.builder import Builder
from fusewright.rewrite.views import CANONICAL_VIEWS, OPAQUE_VIEWS, SPLITS

# Operators whose result shares memory with their operand.
LOOKING = CANONICAL_VIEWS | OPAQUE_VIEWS | SPLITS | {"getitem"}


@dataclass(frozen=True)
class Context:
    """`produced` are the nodes of the new graph; `given` are its values whose memory an output has.

    All other names are of the old graph. A node that a rule gets has the name of its old one, and
    reads values of the new graph. `again` applies all rules to a node that a rule has made.
    `is_backward`: outputs are gradients, and their layout is ours to choose.
    """

    builder: Builder
    old: Mapping[str, Node]
    users: Mapping[str, list[Node]]
    outputs: frozenset[str]
    again: Callable[[Context, Node], Ref]
    is_backward: bool = False
    produced: dict[str, Node] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)

    @staticmethod
    def of(graph: Graph, again: Callable[[Context, Node], Ref], is_backward: bool) -> Context:
        outputs = frozenset(name for name in graph.outputs if isinstance(name, str))
        old = {node.name: node for node in graph.nodes}
        builder = Builder(graph.inputs)
        return Context(builder, old, graph.users(), outputs, again, is_backward)

    def producer(self, arg: Arg) -> Node | None:
        for node in self.builder.nodes[len(self.produced) :]:
            self.produced[node.name] = node
        return self.produced.get(arg.name) if isinstance(arg, Ref) else None

    def number(self, arg: Arg) -> Arg:
        """The number that every element of an operand is, or None."""
        if isinstance(arg, Ref):
            return self.builder.known.numbers.get(arg.name)
        return arg

    def substitute(self, old: Node, new: Ref) -> None:
        """`new` stands for `old` from here on."""
        self.builder.substitute(old.name, new)
        if is_given_out(old.name, self.users, self.outputs):
            self.given.add(self.memory_of(new))

    def memory_of(self, value: Ref) -> str:
        """The value whose memory this one looks at; the name of an input if it is one's."""
        while (producer := self.producer(value)) is not None and producer.op in LOOKING:
            assert isinstance(producer.args[0], Ref)
            value = producer.args[0]
        return value.name

    def viewed(
        self, like: Node, value: Ref, shape: tuple[Dim, ...], strides: tuple[Dim, ...]
    ) -> Ref:
        """The value under another shape, as one view."""
        while (producer := self.producer(value)) is not None and producer.op == "aten.view.default":
            assert isinstance(producer.args[0], Ref)
            value = producer.args[0]
            if self.builder.spec(value.name).shape == shape:
                break
        return self.builder.view(like, value, shape, strides)

    def is_only_reader(self, node: Node) -> bool:
        """Whether only this node reads its operand, and the value of which that is a view."""
        name = node.name
        while name in self.old and (name == node.name or self.old[name].op in CANONICAL_VIEWS):
            name = self.old[name].refs()[0]
            if name in self.outputs or len(self.users[name]) != 1:
                return False
        return True

    def readers(self, name: str) -> list[Node]:
        """The nodes that read a value of the old graph, or a view of it."""
        found: list[Node] = []
        frontier = [name]
        while frontier:
            for user in self.users.get(frontier.pop(), []):
                if user.op in CANONICAL_VIEWS:
                    frontier.append(user.name)
                else:
                    found.append(user)
        return found


Rewrite = Callable[[Context, Node], Node | Ref | None]


def needs_memory(context: Context, node: Node, source: Ref) -> bool:
    """Whether a copy of `source` must stay a copy.

    It must if the source is expanded, so that it is not in memory as a whole. If the model returns
    the copy or a view of it, or saves it, the source must be a value of its own that no other
    output has: a caller may overwrite an argument before backward reads it.
    """
    if _is_expanded(context, source):
        return True
    if not is_given_out(node.name, context.users, context.outputs):
        return False
    memory = context.memory_of(source)
    return context.producer(Ref(memory)) is None or memory != source.name or memory in context.given


def _is_expanded(context: Context, source: Ref) -> bool:
    while (producer := context.producer(source)) is not None and producer.op in LOOKING:
        if producer.op == "aten.expand.default":
            return True
        assert isinstance(producer.args[0], Ref)
        source = producer.args[0]
    return False


def is_given_out(name: str, users: Mapping[str, list[Node]], outputs: frozenset[str]) -> bool:
    """Whether a value, or a view of it, is an output."""
    frontier = [name]
    while frontier:
        name = frontier.pop()
        if name in outputs:
            return True
        frontier += [user.name for user in users.get(name, []) if user.op in LOOKING]
    return False


def has_loop(context: Context, node: Node) -> bool:
    """Whether one of our operators reads the value and computes with it."""
    return any(not user.is_aten and user.op != "getitem" for user in context.readers(node.name))


def feeds_loop(context: Context, node: Node) -> bool:
    """Whether our loops read the value, and it need not be in memory."""
    return has_loop(context, node) and not is_given_out(node.name, context.users, context.outputs)
