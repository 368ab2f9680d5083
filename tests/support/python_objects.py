"""More Python state that forward may read: odd values, objects, classes, names, the process."""

from __future__ import annotations

from tests.support.python_values import FUNCTIONS, State

OBJECTS = """
class Slots{i}:
    __slots__ = ("value",)
    def __init__(self, value):
        self.value = value

class Product{i}(Slots{i}):
    def __mul__(self, other):
        return self.value * other

@dataclasses.dataclass(frozen=True)
class Frozen{i}:
    scale: float
"""
OBJECTS_READ = {
    "sign of zero": State(
        "(1.5 + math.copysign(1.0, self.v{i}))",
        ("m.v{i} = -0.0", "m.v{i} = 0.0"),
        "self.v{i} = 0.0",
        ours=True,
    ),
    "sign of zero in a tuple": State(
        "(1.5 + math.copysign(1.0, self.v{i}[0]))",
        ("m.v{i} = (-0.0,)", "m.v{i} = (0.0,)"),
        "self.v{i} = (0.0,)",
        ours=True,
    ),
    "type of a number": State(
        "({a} if self.v{i} is True else {b})",
        ("m.v{i} = 1", "m.v{i} = True", "m.v{i} = 1.0"),
        "self.v{i} = True",
        ours=True,
    ),
    "not a number": State(
        "({a} if self.v{i} != self.v{i} else {b})",
        ("m.v{i} = 1.0", "m.v{i} = math.nan"),
        "self.v{i} = math.nan",
        ours=True,
    ),
    "order of a dict": State(
        "next(iter(self.v{i}.values()))",
        ("m.v{i} = dict(reversed(m.v{i}.items()))", "m.v{i}['p'] = m.v{i}.pop('p')"),
        "self.v{i} = dict(p={a}, q={b})",
        ours=True,
    ),
    "ordered dict": State(
        "next(iter(self.v{i}.values()))",
        ("m.v{i}.move_to_end('p')", "m.v{i}['q'] = {c}", "m.v{i}.popitem(last=False)"),
        "self.v{i} = collections.OrderedDict(p={a}, q={b}, r={c})",
    ),
    "default dict": State(
        "self.v{i}['k']",
        ("m.v{i}['k'] = {b}", "m.v{i}.pop('k', 0)"),
        "self.v{i} = collections.defaultdict(lambda: {a}, k={c})",
    ),
    "deque": State(
        "self.v{i}[0]",
        ("m.v{i}.appendleft({b})", "m.v{i}.rotate(1)", "m.v{i}[0] = {c}"),
        "self.v{i} = collections.deque([{a}, {c}])",
    ),
    "user dict": State(
        "self.v{i}['k']",
        ("m.v{i}['k'] = {b}", "m.v{i}.data = dict(k={c})"),
        "self.v{i} = collections.UserDict(k={a})",
    ),
    "range": State("sum(self.v{i})", ("m.v{i} = range(4)",), "self.v{i} = range(3)"),
    "slice": State("x[:, self.v{i}].sum()", ("m.v{i} = slice(1, 4)",), "self.v{i} = slice(0, 2)"),
    "bytes": State("self.v{i}[0] / 99", ("m.v{i} = b'zy'",), "self.v{i} = b'ab'"),
    "fraction": State(
        "float(self.v{i})",
        ("m.v{i} = fractions.Fraction({b})",),
        "self.v{i} = fractions.Fraction({a})",
    ),
    "dtype": State(
        "({a} if self.v{i} is torch.float32 else {b})",
        ("m.v{i} = torch.float64", "m.v{i} = torch.float32"),
        "self.v{i} = torch.float32",
        ours=True,
    ),
    "named tuple": State(
        "self.v{i}.scale",
        ("m.v{i} = m.v{i}._replace(scale={b})", "m.v{i} = own.Named{i}({c})"),
        "self.v{i} = Named{i}({a})",
        top="Named{i} = collections.namedtuple('Named{i}', 'scale')\n",
        ours=True,
    ),
    "slots": State(
        "self.v{i}.value",
        ("m.v{i}.value = {b}", "m.v{i} = own.Slots{i}({c})"),
        "self.v{i} = Slots{i}({a})",
        top=OBJECTS,
    ),
    "frozen dataclass": State(
        "self.v{i}.scale",
        ("m.v{i} = dataclasses.replace(m.v{i}, scale={b})",),
        "self.v{i} = Frozen{i}({a})",
        top=OBJECTS,
    ),
    "operators of an object": State(
        "(self.v{i} * 2.0)",
        ("m.v{i}.value = {b}",),
        "self.v{i} = Product{i}({a})",
        top=OBJECTS,
    ),
    "descriptor": State(
        "self.d{i}",
        ("own.{cls}.d{i}.value = {b}", "own.Descriptor{i}.value = {c}"),
        body="    d{i} = Descriptor{i}()\n",
        top=OBJECTS.replace(
            "class Slots",
            "class Descriptor{i}:\n    value = {a}\n"
            "    def __get__(self, owner, kind):\n"
            "        return self if owner is None else self.value\n\nclass Slots",
        ),
    ),
    "class method": State(
        "Registry{i}.get()",
        ("own.Registry{i}.value = {b}", "own.Registry{i}.value = {c}"),
        top="class Registry{i}:\n    value = {a}\n    @classmethod\n    def get(cls):\n"
        "        return cls.value\n",
    ),
    "method of an object's class": State(
        "self.v{i}.get()",
        ("own.Kept{i}.get = lambda self: {b}", "m.v{i}.value = {c}", "m.v{i}.get = lambda: {b}"),
        "self.v{i} = Kept{i}()",
        top="class Kept{i}:\n    value = {a}\n    def get(self):\n        return self.value\n",
    ),
    "getattr of the class": State(
        "self.virtual{i}",
        ("m.table{i}['virtual{i}'] = {b}", "m.virtual{i} = {c}"),
        "self.table{i} = dict(virtual{i}={a})",
        "    def __getattr__(self, name):\n        if name == 'virtual{i}':\n"
        "            return self.table{i}[name]\n        return super().__getattr__(name)\n",
    ),
    "cached property": State(
        "self.kept{i}",
        ("m.v{i} = {b}", "m.__dict__.pop('kept{i}', 0)", "m.kept{i} = {c}"),
        "self.v{i} = {a}",
        "    @functools.cached_property\n    def kept{i}(self):\n        return self.v{i}\n",
    ),
    "method of the class": State(
        "self.get{i}()",
        ("own.{cls}.get{i} = lambda self: {b}", "m.get{i} = own.second{i}"),
        body="    def get{i}(self):\n        return {a}\n",
        top=FUNCTIONS,
        ours=True,
    ),
    "wrapped function": State(
        "self.v{i}()",
        ("m.v{i} = own.wrapped{i}({b})", "m.v{i}.__closure__[0].cell_contents = {c}"),
        "self.v{i} = wrapped{i}({a})",
        top="def wrapped{i}(value):\n    @functools.wraps(math.sqrt)\n    def get():\n"
        "        return value\n    return get\n",
    ),
    "partial of a list": State(
        "self.v{i}()",
        ("m.v{i}.args[0][0] = {b}", "m.v{i} = functools.partial(sum, [{c}])"),
        "self.v{i} = functools.partial(sum, [{a}])",
    ),
    "alias": State(
        "({a} if self.v{i} is self.u{i} else {b})",
        ("m.u{i} = [1]", "m.u{i} = m.v{i}"),
        "self.v{i} = self.u{i} = [1]",
    ),
    "cycle": State(
        "self.v{i}['me']['k']",
        ("m.v{i}['k'] = {b}", "m.v{i}['me'] = dict(k={c})"),
        "self.v{i} = dict(k={a}); self.v{i}['me'] = self.v{i}",
    ),
    "environment": State(
        "float(os.environ.get('FUZZ_STATE_{i}', {a}))",
        ("os.environ['FUZZ_STATE_{i}'] = '{b}'", "os.environ.pop('FUZZ_STATE_{i}', '')"),
    ),
    "context variable": State(
        "var{i}.get()",
        ("own.var{i}.set({b})", "own.var{i}.set({c})"),
        top="var{i} = contextvars.ContextVar('var{i}', default={a})\n",
    ),
    "thread's own": State(
        "local{i}.v",
        ("own.local{i}.v = {b}",),
        top="local{i} = threading.local()\nlocal{i}.v = {a}\n",
    ),
    "global array": State("float(v{i}[0])", ("own.v{i}[0] = {b}",), top="v{i} = np.full(2, {a})\n"),
    "global dict of another file": State(
        "there{i}.v{i}['k']",
        ("other.v{i}['k'] = {b}", "other.v{i} = dict(k={c})"),
        top="import {other} as there{i}\n",
        other="v{i} = dict(k={a})\n",
    ),
    "object of another file": State(
        "getattr(there{i}.v{i}, 'more', 1.0) * there{i}.v{i}.a",
        ("other.v{i}.a = {b}", "other.v{i}.more = {c}", "other.v{i} = types.SimpleNamespace(a=1)"),
        top="import {other} as there{i}\n",
        other="v{i} = types.SimpleNamespace(a={a})\n",
    ),
    "name that hides a builtin": State(
        "float(abs(-{a}))", ("own.abs = lambda v: {b}", "own.__dict__.pop('abs', 0)"), ours=True
    ),
    "precision": State(
        "({a} if torch.get_float32_matmul_precision() == 'highest' else {b})", ("precision",)
    ),
    "inference mode": State("({a} if torch.is_inference_mode_enabled() else {b})", ("inference",)),
}
