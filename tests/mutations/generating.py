"""Bugs in code generation and in emitted text."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_CODEGEN = "fusewright/codegen"
_EMIT = "fusewright/emit"

GENERATING = (
    Mutation(
        "guard-of-one-more",
        f"{_CODEGEN}/access.py",
        "I({guard.size}))",
        "I({guard.size} + 1))",
        "a guarded load reads one element behind the tensor",
        ("tests/codegen/test_guarded_loads.py",),
    ),
    Mutation(
        "lost-offset",
        f"{_CODEGEN}/form.py",
        "return linear_text(form, access.strides, access.offset, at)",
        "return linear_text(form, access.strides, (), at)",
        "slices begin at the first element",
        ("tests/codegen/test_host_loops.py -k offset",),
    ),
    Mutation(
        "misaligned-offset",
        f"{_CODEGEN}/entry.py",
        "moved[_aligned(form, access)] = None",
        "pass",
        "no test asks whether a slice begins at a whole vector",
        ("tests/codegen/test_cuda_sources.py", "tests/codegen/test_cuda_loops.py", "tests/codegen"),
    ),
    Mutation(
        "narrow-without-test",
        f"{_CODEGEN}/entry.py",
        "return any(\n        len(more) == 1",
        "return any(\n        len(more) >= 1",
        "a test of a size stands for another one that it does not imply",
        ("tests/codegen/test_cuda_sources.py", "tests/codegen"),
    ),
    Mutation(
        "straight-to-the-output",
        f"{_CODEGEN}/runs.py",
        "straight = len(after) == 1 and reads[last]",
        "straight = reads[last]",
        "an output's memory is the buffer of a function although another output may overlap it",
        ("tests/codegen/test_runs.py", "tests/codegen"),
    ),
    Mutation(
        "row-value-of-lane-0",
        f"{_CODEGEN}/body.py",
        'form, items, stores, swept, "0" if form.is_row else "v")',
        'form, items, stores, swept, "0")',
        "all columns of a run use the first one's row value",
        ("tests/codegen/test_host_loops.py",),
    ),
    Mutation(
        "store-unrounded",
        f"{_CODEGEN}/access.py",
        "if made.dtype == item.dtype and form.dtypes[source]",
        "if form.dtypes[source]",
        "a value that was rounded to another 16-bit type is stored as if it were not",
        (
            "tests/codegen/test_host_loops.py",
            "tests/schedule/test_loops.py",
            "tests/test_random_models.py",
        ),
    ),
    Mutation(
        "epilogue-order",
        f"{_CODEGEN}/epilogue.py",
        "tuple(strides[at] for at in (*across, *down)))",
        "tuple(strides[at] for at in (*down, *across)))",
        "an epilogue's rows and columns are exchanged",
        ("tests/plan/test_matmuls.py -k 'emulated or epilogue'",),
    ),
    Mutation(
        "split-stores",
        f"{_CODEGEN}/split_epilogue.py",
        "if y.size != ONE and any(each[-2] != each[-1] * x.size for each in strides):",
        "if y.size != ONE and all(each[-2] != each[-1] * x.size for each in strides):",
        "y and x are merged although one of the tensors has gaps between its rows",
        ("tests/kernels/test_reduced_convolution.py", "tests/plan/test_reduced_convolutions.py"),
    ),
    Mutation(
        "missing-fallback",
        f"{_EMIT}/file.py",
        "        return super().forward(*args, **kwargs)\n",
        "",
        "an emitted file returns None where the kernels do not fit",
        ("tests/emit/test_file.py -k 'falls_back or text'",),
    ),
    Mutation(
        "mutated-view",
        f"{_EMIT}/wiring.py",
        "return frozenset(k for k, origin in origins if origin and origin.index in mutated)",
        "return frozenset()",
        "a view of a buffer is returned with the buffer's new value",
        (
            "tests/runtime/test_runtime.py",
            "tests/test_changing_modules.py -k writes",
            "tests/emit/test_outputs.py",
            "tests/compile/test_state.py",
        ),
    ),
    Mutation(
        "shared-allocation",
        f"{_EMIT}/wrappers.py",
        "all(isinstance(each, Fused) and made <= set(each.inputs) for each in readers)",
        "all(isinstance(each, Fused) for each in readers)",
        "nobody keeps an allocation alive whose later parts are still read",
        ("tests/runtime/test_shared_allocations.py",),
    ),
    Mutation(
        "deleted-too-early",
        f"{_EMIT}/steps.py",
        "        for name in inputs_of(step):\n"
        "            of[name] = of.get(name, frozenset()) | wanted\n",
        "        for name in inputs_of(step):\n            of.setdefault(name, wanted)\n",
        "a value is not computed that a second gradient needs",
        ("tests/emit/test_outputs.py", "tests/test_bad_inputs.py", "tests/compile/test_module.py"),
    ),
    Mutation(
        "wrong-demand",
        f"{_EMIT}/drivers.py",
        'texts.append(f"{scope[output]} if need[{position}] else None")',
        "texts.append(scope[output])",
        "a gradient that nobody asked for is returned, and may not be defined",
        ("tests/test_bad_inputs.py", "tests/compile/test_module.py"),
    ),
)
