"""Python values that forward may read, and ways to change them: one row each.

A row adds lines to a model's file, to another file that it imports, to the class that reads the
value, and to its constructor. A change is a statement over `m`, the module that reads the value,
its file `own` and the other file `other`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class State:
    """One thing that forward reads, as an expression over self and x.

    `{i}` makes names unique, `{a}`, `{b}` and `{c}` are numbers, `{cls}` is the reading class.
    `ours` if our own guards can compare it.
    """

    read: str
    changes: tuple[str, ...]
    init: str = ""
    body: str = ""
    top: str = ""
    other: str = ""
    ours: bool = False


FUNCTIONS = """
def times{i}(v=1.0):
    return {a} * v

def plus{i}(v=1.0):
    return {b} + v

first{i} = lambda: {a}
second{i} = lambda: {b}
"""
CLASSES = """
class Kind{i}(enum.Enum):
    ONE = 1
    TWO = 2

@dataclasses.dataclass
class Config{i}:
    scale: float = {a}
    inner: object = None

class Times{i}:
    factor = {a}
    def __init__(self, factor):
        self.factor = factor
    def __call__(self):
        return self.factor
    def method(self):
        return self.factor * 2
"""
CLOSURE = """
def make{i}():
    value = {a}
    def get():
        return value
    def put(new):
        nonlocal value
        value = new
    return get, put
get{i}, put{i} = make{i}()
"""
VALUES = {
    "float": State("self.v{i}", ("m.v{i} = {b}", "m.v{i} = {c}"), "self.v{i} = {a}", ours=True),
    "int": State("self.v{i}", ("m.v{i} = 2", "m.v{i} = 3"), "self.v{i} = 1", ours=True),
    "bool": State(
        "({a} if self.v{i} else {b})", ("m.v{i} = False",), "self.v{i} = True", ours=True
    ),
    "str": State(
        "({a} if self.v{i} == 'x' else {b})", ("m.v{i} = 'y'",), "self.v{i} = 'x'", ours=True
    ),
    "None": State(
        "({a} if self.v{i} is None else self.v{i})",
        ("m.v{i} = {b}", "m.v{i} = None"),
        "self.v{i} = None",
        ours=True,
    ),
    "missing": State("getattr(self, 'v{i}', {a})", ("m.v{i} = {b}", "m.v{i} = {c}"), ours=True),
    "missing, asked for": State(
        "({a} if hasattr(self, 'v{i}') else {b})", ("m.v{i} = None", "m.v{i} = 1"), ours=True
    ),
    "deleted": State(
        "getattr(self, 'v{i}', {a})", ("m.__dict__.pop('v{i}', 0)",), "self.v{i} = {b}", ours=True
    ),
    "list": State(
        "sum(self.v{i})",
        ("m.v{i}[0] = {b}", "m.v{i}.append({c})", "m.v{i} = [{b}]", "m.v{i}.reverse()"),
        "self.v{i} = [{a}, {b}]",
        ours=True,
    ),
    "nested list": State(
        "self.v{i}[1][0]",
        ("m.v{i}[1][0] = {b}", "m.v{i}[1] = [{c}]"),
        "self.v{i} = [1.0, [{a}]]",
        ours=True,
    ),
    "long list": State(
        "self.v{i}[80]", ("m.v{i}[80] = {b}", "m.v{i} = [{c}] * 90"), "self.v{i} = [{a}] * 90"
    ),
    "dict": State(
        "self.v{i}.get('k', {b}) + len(self.v{i})",
        ("m.v{i}['k'] = {c}", "m.v{i}.pop('k', 0)", "m.v{i}['other'] = 1.0"),
        "self.v{i} = dict(k={a})",
        ours=True,
    ),
    "key": State("(1.0 if 'k' in self.v{i} else {a})", ("m.v{i}['k'] = 1",), "self.v{i} = {{}}"),
    "set": State(
        "(1.0 if 'k' in self.v{i} else {a})",
        ("m.v{i}.add('k')", "m.v{i}.clear()"),
        "self.v{i} = set()",
        ours=True,
    ),
    "tuple": State(
        "self.v{i}[0] * self.v{i}[1][0]",
        ("m.v{i} = ({b}, [2.0])", "m.v{i}[1][0] = {c}"),
        "self.v{i} = ({a}, [1.0])",
        ours=True,
    ),
    "namespace": State(
        "self.v{i}.a * getattr(self.v{i}, 'more', 1.0)",
        ("m.v{i}.a = {b}", "m.v{i}.more = {c}", "m.v{i} = types.SimpleNamespace(a={c})"),
        "self.v{i} = types.SimpleNamespace(a={a})",
    ),
    "dataclass": State(
        "self.v{i}.scale",
        ("m.v{i}.scale = {b}", "m.v{i} = own.Config{i}({c})"),
        "self.v{i} = Config{i}()",
        top=CLASSES,
    ),
    "nested config": State(
        "self.v{i}.inner.scale",
        ("m.v{i}.inner.scale = {b}", "m.v{i}.inner = own.Config{i}({c})"),
        "self.v{i} = Config{i}(1.0, Config{i}())",
        top=CLASSES,
    ),
    "partial": State(
        "self.v{i}()",
        ("m.v{i} = functools.partial(own.times{i}, {b})",),
        "self.v{i} = functools.partial(times{i}, 2.0)",
        top=FUNCTIONS,
    ),
    "function": State(
        "self.v{i}()", ("m.v{i} = own.plus{i}",), "self.v{i} = times{i}", top=FUNCTIONS, ours=True
    ),
    "lambda": State(
        "self.v{i}()", ("m.v{i} = own.second{i}",), "self.v{i} = first{i}", top=FUNCTIONS, ours=True
    ),
    "bound method": State(
        "self.v{i}()",
        ("m.v{i}.__self__.factor = {b}", "m.v{i} = own.Times{i}({c}).method"),
        "self.v{i} = Times{i}({a}).method",
        top=CLASSES,
    ),
    "own method": State(
        "self.get{i}()",
        ("m.v{i} = {b}", "m.get{i} = own.plus{i}"),
        "self.v{i} = {a}",
        "    def get{i}(self):\n        return self.v{i}\n",
        FUNCTIONS,
        ours=True,
    ),
    "callable": State(
        "self.v{i}()",
        ("m.v{i}.factor = {b}", "m.v{i} = own.Times{i}({c})"),
        "self.v{i} = Times{i}({a})",
        top=CLASSES,
    ),
    "enum": State(
        "({a} if self.v{i} is Kind{i}.ONE else {b})",
        ("m.v{i} = own.Kind{i}.TWO", "m.v{i} = own.Kind{i}.ONE"),
        "self.v{i} = Kind{i}.ONE",
        top=CLASSES,
    ),
    "global enum": State(
        "({a} if kind{i} is Kind{i}.ONE else {b})",
        ("own.kind{i} = own.Kind{i}.TWO",),
        top=CLASSES + "kind{i} = Kind{i}.ONE\n",
        ours=True,
    ),
    "class attribute": State(
        "self.v{i}", ("own.{cls}.v{i} = {b}", "m.v{i} = {c}"), body="    v{i} = {a}\n"
    ),
    "class function": State(
        "self.v{i}()",
        ("own.{cls}.v{i} = staticmethod(own.plus{i})", "m.v{i} = own.first{i}"),
        body="    v{i} = staticmethod(times{i})\n",
        top=FUNCTIONS,
        ours=True,
    ),
    "property": State(
        "self.p{i}",
        ("m.v{i} = {b}", "own.{cls}.p{i} = property(lambda self: {c})"),
        "self.v{i} = {a}",
        "    @property\n    def p{i}(self):\n        return self.v{i} * 2\n",
        ours=True,
    ),
    "closure": State("get{i}()", ("own.put{i}({b})", "own.put{i}({c})"), top=CLOSURE),
    "global": State("v{i}", ("own.v{i} = {b}", "own.v{i} = {c}"), top="v{i} = {a}\n"),
    "global list": State("v{i}[0]", ("own.v{i}[0] = {b}", "own.v{i} = [{c}]"), top="v{i} = [{a}]"),
    "global function": State(
        "times{i}()", ("own.times{i} = own.plus{i}",), top=FUNCTIONS, ours=True
    ),
    "global of another file": State(
        "get{i}()",
        ("other.v{i} = {b}", "other.v{i} = {c}"),
        top="from {other} import get{i}\n",
        other="v{i} = {a}\ndef get{i}():\n    return v{i}\n",
    ),
    "attribute of another file": State(
        "there{i}.v{i}",
        ("other.v{i} = {b}",),
        top="import {other} as there{i}\n",
        other="v{i} = {a}\n",
    ),
    "function of another file": State(
        "there{i}.times{i}()",
        ("other.times{i} = other.plus{i}",),
        top="import {other} as there{i}\n",
        other=FUNCTIONS,
        ours=True,
    ),
    "default argument": State(
        "get{i}()",
        ("own.get{i}.__defaults__[0][0] = {b}",),
        top="def get{i}(v=[{a}]):\n    return v[0]\n",
    ),
    "constant default argument": State(
        "get{i}()",
        ("own.get{i} = lambda: {b}",),
        top="def get{i}(v={a}):\n    return v\n",
        ours=True,
    ),
    "functions in a list": State(
        "sum(f() for f in self.v{i})",
        ("m.v{i}[0] = own.second{i}", "m.v{i}.append(own.first{i})", "m.v{i} = [own.second{i}]"),
        "self.v{i} = [first{i}]",
        top=FUNCTIONS,
        ours=True,
    ),
    "functions in a dict": State(
        "self.v{i}['k']()",
        ("m.v{i}['k'] = own.second{i}", "m.v{i} = dict(k=own.second{i})"),
        "self.v{i} = dict(k=first{i})",
        top=FUNCTIONS,
        ours=True,
    ),
    "numpy scalar": State(
        "float(self.v{i})", ("m.v{i} = np.float64({b})",), "self.v{i} = np.float64({a})"
    ),
    "numpy array": State(
        "torch.from_numpy(self.v{i})",
        ("m.v{i}[0] = {b}", "m.v{i} = np.full(4, {c}, np.float32)"),
        "self.v{i} = np.full(4, {a}, np.float32)",
    ),
    "tensor": State(
        "self.v{i}",
        ("m.v{i} = torch.full((4,), {b})", "m.v{i}.fill_({c})"),
        "self.v{i} = torch.full((4,), {a})",
        ours=True,
    ),
    "tensors in a list": State(
        "sum(self.v{i})",
        ("m.v{i}[0] = torch.full((4,), {b})", "m.v{i}.append(torch.ones(4))", "m.v{i}[0].fill_(2)"),
        "self.v{i} = [torch.full((4,), {a})]",
    ),
    "counter": State(
        "self.count{i}()",
        ("m.v{i} = 5",),
        "self.v{i} = 0",
        "    def count{i}(self):\n        self.v{i} += 1\n        return {a}\n",
    ),
    "gradients": State("({a} if torch.is_grad_enabled() else {b})", ("no_grad",)),
    "gradients, another name": State("({a} if gradients_are_wanted() else {b})", ("no_grad",)),
    "autocast": State("({a} if torch.is_autocast_enabled('cpu') else {b})", ("autocast",)),
    "default dtype": State(
        "({a} if torch.get_default_dtype() is torch.float32 else {b})", ("float64",), ours=True
    ),
    "deterministic": State(
        "({a} if torch.are_deterministic_algorithms_enabled() else {b})", ("deterministic",)
    ),
    "needs gradient": State(
        "({a} if self.weight.requires_grad else {b})", ("m.weight.requires_grad_(False)",)
    ),
    "input needs gradient": State("({a} if x.requires_grad else {b})", ("detached",)),
    "mode": State("({a} if self.training else {b})", ("m.eval()", "m.train()"), ours=True),
}
