"""Modules, tensors and hooks that forward uses, and what forward itself leaves behind.

Rows are as in `python_values`. A change of a module may be one that eager refuses: then ours must
refuse it, too.
"""

from __future__ import annotations

from tests.support.python_values import State

LAYERS = """
class Scale{i}(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
    def forward(self, x):
        return x * self.factor + 0.5

class ByMode{i}(nn.Module):
    def forward(self, x):
        return x * ({a} if self.training else {b})
"""
ACTIVATION = "self.v{i} = nn.Tanh()"
HOOKS = {
    "forward hook": "m.v{i}.register_forward_hook(lambda m, x, y: y * 2)",
    "forward pre-hook": "m.v{i}.register_forward_pre_hook(lambda m, x: (x[0] * 2,))",
    "backward hook": "m.v{i}.register_full_backward_hook(lambda m, g, h: (g[0] * 2,))",
}
TENSORS = {
    "buffer": State(
        "self.v{i}",
        (
            "m.v{i} = torch.full((4,), {b})",
            "m.v{i}.fill_({c})",
            "m.register_buffer('v{i}', torch.full((4,), {c}))",
            "m.v{i} = torch.full((1,), {b})",
            "m.v{i} = m.v{i}.double()",
        ),
        "self.register_buffer('v{i}', torch.full((4,), {a}))",
        ours=True,
    ),
    "buffer that may be None": State(
        "({a} if self.v{i} is None else self.v{i})",
        ("m.v{i} = torch.full((4,), {b})", "m.v{i} = None"),
        "self.register_buffer('v{i}', None)",
        ours=True,
    ),
    "buffer that forward writes into": State(
        "self.step{i}()",
        ("m.v{i}.zero_()", "m.v{i} = torch.full((4,), {b})"),
        "self.register_buffer('v{i}', torch.full((4,), {a}))",
        "    def step{i}(self):\n        self.v{i}.add_(1.0)\n        return self.v{i}.clone()\n",
    ),
    "buffer that forward replaces": State(
        "self.step{i}()",
        ("m.v{i}.zero_()", "m.v{i} = torch.full((4,), {b})"),
        "self.register_buffer('v{i}', torch.full((4,), {a}))",
        "    def step{i}(self):\n        self.v{i} = self.v{i} * 0.5\n        return self.v{i}\n",
    ),
    "parameter": State(
        "(self.v{i} if self.v{i} is not None else {c})",
        (
            "m.v{i} = nn.Parameter(torch.full((4,), {b}))",
            "m.v{i} = None",
            "m.v{i}.data = torch.full((4,), {c})",
            "m.v{i}.requires_grad_(False)",
            "m.v{i} = m.weight",
            "m.v{i}.register_hook(lambda g: g * 2)",
        ),
        "self.v{i} = nn.Parameter(torch.full((4,), {a}))",
        ours=True,
    ),
    "tied parameters": State(
        "(self.v{i} * self.u{i})",
        (
            "m.u{i} = nn.Parameter(torch.full((4,), {b}))",
            "m.v{i} = m.u{i}",
            "m.u{i}.requires_grad_(False)",
        ),
        "self.v{i} = nn.Parameter(torch.full((4,), {a})); self.u{i} = self.v{i}",
        ours=True,
    ),
    "list of parameters": State(
        "sum(self.v{i})",
        (
            "m.v{i}[0] = nn.Parameter(torch.full((4,), {b}))",
            "m.v{i}.append(nn.Parameter(torch.full((4,), {c})))",
            "m.v{i}[0].requires_grad_(False)",
        ),
        "self.v{i} = nn.ParameterList([nn.Parameter(torch.full((4,), {a}))])",
        ours=True,
    ),
    "tensor that learns": State(
        "self.v{i}",
        ("m.v{i} = torch.full((4,), {b})", "m.v{i}.requires_grad_(False)"),
        "self.v{i} = torch.full((4,), {a}).requires_grad_()",
    ),
    "global tensor": State(
        "v{i}",
        ("own.v{i} = torch.full((4,), {b})", "own.v{i}.fill_({c})"),
        top="v{i} = torch.full((4,), {a})\n",
    ),
    "global layer": State(
        "layer{i}(x)",
        ("own.layer{i} = nn.ReLU()", "own.layer{i}.p = 1.0"),
        top="layer{i} = nn.Dropout(0.0)\n",
    ),
    "tensor of another file": State(
        "there{i}.v{i}",
        ("other.v{i} = torch.full((4,), {b})", "other.v{i}.fill_({c})"),
        top="import {other} as there{i}\n",
        other="v{i} = torch.full((4,), {a})\n",
    ),
}
MODULES = {
    "activation": State(
        "self.v{i}(x)",
        (
            "m.v{i} = nn.ReLU()",
            "m.v{i} = nn.Sequential(nn.ReLU(), nn.Tanh())",
            "m.v{i}.forward = own.doubled{i}",
            "m.v{i}.__class__ = nn.Sigmoid",
            *HOOKS.values(),
        ),
        ACTIVATION,
        top="def doubled{i}(x):\n    return x * 2\n",
        ours=True,
    ),
    "hook that is removed": State(
        "self.v{i}(x)",
        ("m.h{i}.remove()",),
        ACTIVATION + "; self.h{i} = " + HOOKS["forward hook"].replace("m.v", "self.v"),
    ),
    "layer of the file": State(
        "self.v{i}(x)",
        (
            "m.v{i}.factor = {b}",
            "m.v{i} = own.Scale{i}({c})",
            "own.Scale{i}.forward = lambda self, x: x * 7",
        ),
        "self.v{i} = Scale{i}({a})",
        top=LAYERS,
        ours=True,
    ),
    "mode of a layer": State(
        "self.v{i}(x)",
        ("m.v{i}.eval()", "m.v{i}.train()"),
        "self.v{i} = ByMode{i}()",
        top=LAYERS,
        ours=True,
    ),
    "list of layers": State(
        "functools.reduce(lambda v, layer: layer(v), self.v{i}, x)",
        (
            "m.v{i}[0], m.v{i}[1] = m.v{i}[1], m.v{i}[0]",
            "m.v{i}.append(own.Scale{i}({c}))",
            "del m.v{i}[0]",
            "m.v{i} = nn.ModuleList([*m.v{i}][::-1])",
            "m.v{i}[1].factor = {c}",
        ),
        "self.v{i} = nn.ModuleList([Scale{i}({a}), Scale{i}({b})])",
        top=LAYERS,
        ours=True,
    ),
    "plain list of layers": State(
        "self.v{i}[0](x)",
        ("m.v{i}.reverse()", "m.v{i}[0].factor = {c}", "m.v{i} = [nn.ReLU()]"),
        "self.v{i} = [Scale{i}({a}), Scale{i}({b})]",
        top=LAYERS,
    ),
    "route by a name": State(
        "self.v{i}[self.k{i}](x)",
        ("m.k{i} = 'q'", "m.v{i}['p'] = nn.ReLU()", "m.v{i}['q'].factor = {c}"),
        "self.v{i} = nn.ModuleDict(dict(p=Scale{i}({a}), q=Scale{i}({b}))); self.k{i} = 'p'",
        top=LAYERS,
        ours=True,
    ),
    "method of a layer": State(
        "self.f{i}(x)",
        ("m.f{i} = m.u{i}.forward", "m.v{i}.factor = {c}", "m.f{i} = m.u{i}"),
        "self.v{i}, self.u{i} = Scale{i}({a}), Scale{i}({b}); self.f{i} = self.v{i}.forward",
        top=LAYERS,
    ),
    "layer by two names": State(
        "self.u{i}(self.v{i}(x))",
        ("m.u{i} = own.Scale{i}({b})", "m.v{i}.factor = {c}", "m.v{i} = m.u{i}"),
        "self.v{i} = Scale{i}({a}); self.u{i} = self.v{i}",
        top=LAYERS,
        ours=True,
    ),
    "optional layer": State(
        "(x if self.v{i} is None else self.v{i}(x))",
        ("m.v{i} = nn.ReLU()", "m.v{i} = None"),
        "self.v{i} = None",
    ),
    "linear": State(
        "self.v{i}(x)",
        (
            "m.v{i} = nn.Linear(4, 4, bias=False); nn.init.constant_(m.v{i}.weight, {b})",
            "m.v{i}.bias = None",
            "m.v{i}.weight = nn.Parameter(torch.full((4, 4), {c}))",
            "m.v{i}.weight.requires_grad_(False)",
            "nn.utils.parametrizations.weight_norm(m.v{i})",
            "nn.utils.prune.l1_unstructured(m.v{i}, 'weight', 0.5)",
            "m.v{i}.load_state_dict(dict(weight=torch.eye(4), bias=torch.ones(4)))",
        ),
        "self.v{i} = nn.Linear(4, 4); nn.init.constant_(self.v{i}.weight, {a}); "
        "nn.init.zeros_(self.v{i}.bias)",
        ours=True,
    ),
    "batch norm": State(
        "self.v{i}(x)",
        (
            "m.v{i}.eval()",
            "m.v{i}.momentum = 0.5",
            "m.v{i}.momentum = None",
            "m.v{i}.eps = 0.25",
            "m.v{i}.reset_running_stats()",
            "m.v{i}.running_mean = torch.full((4,), {b})",
            "m.v{i}.track_running_stats = False",
            "m.v{i} = nn.BatchNorm1d(4, affine=False)",
            "m.v{i}.requires_grad_(False)",
        ),
        "self.v{i} = nn.BatchNorm1d(4)",
        ours=True,
    ),
    "layer norm": State(
        "self.v{i}(x)",
        ("m.v{i}.eps = 0.25", "m.v{i}.bias = None", "m.v{i} = nn.LayerNorm((4,), bias=False)"),
        "self.v{i} = nn.LayerNorm(4)",
        ours=True,
    ),
    "dropout": State(
        "self.v{i}(x)",
        ("m.v{i}.p = 0.75", "m.v{i}.eval()", "m.v{i} = nn.Identity()"),
        "self.v{i} = nn.Dropout(0.5)",
        ours=True,
    ),
    "random numbers": State("torch.rand(4)", ("m.eval()",)),
    "random numbers of Python": State("random.random()", ("m.eval()",)),
    "random numbers of NumPy": State("float(np.random.rand())", ("m.eval()",)),
}
EFFECTS = {
    "list that grows": State(
        "self.log{i}(x)",
        ("m.v{i}.clear()", "m.v{i} = []", "m.v{i}.append(1.0)"),
        "self.v{i} = []",
        "    def log{i}(self, x):\n        self.v{i}.append(len(self.v{i}))\n"
        "        return {a} * len(self.v{i})\n",
    ),
    "list of results": State(
        "self.log{i}(x)",
        ("m.v{i}.clear()", "m.v{i} = []"),
        "self.v{i} = []",
        "    def log{i}(self, x):\n        self.v{i}.append((x * {a}).mean().detach())\n"
        "        return {a}\n",
    ),
    "last result": State(
        "self.log{i}(x)",
        ("m.v{i} = None", "m.v{i} = torch.full((4,), {b})"),
        "self.v{i} = None",
        "    def log{i}(self, x):\n        old, self.v{i} = self.v{i}, (x * {a}).detach().mean(0)\n"
        "        return {a} if old is None else old\n",
    ),
    "dict that is filled": State(
        "self.log{i}(x)",
        ("m.v{i}.clear()", "m.v{i}['k'] = {b}"),
        "self.v{i} = {{}}",
        "    def log{i}(self, x):\n        self.v{i}['y'] = x.detach() * {a}\n"
        "        return self.v{i}.get('k', {c})\n",
    ),
    "counter of the class": State(
        "self.log{i}()",
        (),
        body="    v{i} = 0\n    def log{i}(self):\n        type(self).v{i} += 1\n"
        "        return {a} * type(self).v{i}\n",
    ),
    "counter in the file": State(
        "log{i}()",
        ("own.v{i} = 5",),
        top="v{i} = 0\ndef log{i}():\n    global v{i}\n    v{i} += 1\n    return {a} * v{i}\n",
    ),
    "counter in a closure": State(
        "log{i}()",
        (),
        top="def make{i}():\n    count = 0\n    def log():\n        nonlocal count\n"
        "        count += 1\n        return {a} * count\n    return log\nlog{i} = make{i}()\n",
    ),
    "counter in an object": State(
        "self.log{i}()",
        ("m.v{i}.n = 0", "m.v{i} = types.SimpleNamespace(n=5)"),
        "self.v{i} = types.SimpleNamespace(n=1)",
        "    def log{i}(self):\n        self.v{i}.n += 1\n        return {a} * self.v{i}.n\n",
    ),
    "iterator": State(
        "next(self.v{i})",
        ("m.v{i} = itertools.count(3)", "next(m.v{i})"),
        "self.v{i} = itertools.count(1)",
    ),
    "list in the file that grows": State(
        "log{i}()",
        ("own.v{i}.clear()",),
        top="v{i} = []\ndef log{i}():\n    v{i}.append(1)\n    return {a} * len(v{i})\n",
    ),
    "result in the file": State(
        "log{i}(x)",
        ("own.v{i} = 1.0",),
        top="v{i} = None\ndef log{i}(x):\n    global v{i}\n    v{i} = x.detach() * {b}\n"
        "    return {a}\n",
    ),
    "result in a list of the file": State(
        "log{i}(x)",
        ("own.v{i}.clear()",),
        top="v{i} = []\ndef log{i}(x):\n    v{i}.append(x.detach() * {b})\n    return {a}\n",
    ),
    "result in another file": State(
        "log{i}(x)",
        (),
        top="import {other} as there{i}\ndef log{i}(x):\n    there{i}.v{i} = x.detach()\n"
        "    return {a}\n",
        other="v{i} = None\n",
    ),
}
