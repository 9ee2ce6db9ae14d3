"""What counts as the same training.

A tensor differs by its largest absolute difference over its *scale*: its largest entry, or the largest gradient (of the
same step, for a gradient) where that is more. Gradients that are truly zero (a bias in front of a norm) come out as
rounding noise of the values they cancel from, which is of the order of eps times the largest gradient; without this
floor any two runs would differ there.

A factor of two in a gradient is a difference of at least half of its largest entry. That fails unless the entry is
below twice the tolerance of the largest gradient of the step: 2e-5 in fp32, 2e-10 in the fifth of all models that are
fp64. Gradients of fp64 models are above that or truly zero, which ``test_fuzz`` holds.

Tolerances: 1e-5 in fp32, 1e-10 in fp64, 1e-1 where a layer computes in bf16 (2^-8 a rounding, over a few steps; such
models are held to 1e-5 where it does not).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fuzz_spec import Spec
from torch import Tensor

TOLERANCES = {"bfloat16": 1e-1, "float32": 1e-5, "float64": 1e-10}


def tolerance_of(spec: Spec) -> float:
    """That of the coarsest dtype in the model."""
    return max(TOLERANCES[dtype] for dtype in {spec.dtype, *(layer.dtype or spec.dtype for layer in spec.layers)})


def difference(want: Mapping[str, Tensor | None], got: Mapping[str, Tensor | None], tolerance: float) -> str:
    """A sentence on the first tensor that differs, in order of computation; "" if none does."""
    if list(want) != list(got):
        return f"other names: {sorted(want.keys() ^ got.keys())[:4]}"
    gradients = largest_gradients(want)
    for name, a in want.items():
        b = got[name]
        if (a is None) != (b is None):
            return f"{name}: {'None' if a is None else 'a value'} became {'None' if b is None else 'a value'}"
        if a is None or b is None:
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name}: {tuple(a.shape)} {a.dtype} became {tuple(b.shape)} {b.dtype}"
        off = largest(a.double() - b.double())
        floor = gradients.get(_step_of(name), max(gradients.values(), default=0.0))
        if not off <= tolerance * max(largest(a), floor):
            return f"{name} is off by {off:.2e}, with entries to {largest(a):.2e} and a tolerance of {tolerance:.0e}"
    return ""


def largest_gradients(result: Mapping[str, Tensor | None]) -> dict[str, float]:
    """The largest entry of the gradients of each step."""
    found: dict[str, float] = {}
    for name, tensor in result.items():
        if (step := _step_of(name)) and tensor is not None:
            found[step] = max(found.get(step, 0.0), largest(tensor))
    return found


def _step_of(name: str) -> str:
    """"gradient of step 2" for a gradient of that step, "" for what is none."""
    match = re.match(r"gradient of step \d+", name)
    return match.group() if match else ""


def largest(tensor: Tensor) -> float:
    """The largest entry, 0 where there is none."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0
