"""What users may ask of the backend: ``torch.compile(model, backend="fxshard", options={...})``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch._inductor import list_mode_options


@dataclass(frozen=True)
class Options:
    """The backend's options, checked.

    Attributes:
        codegen: "inductor" compiles the rewritten graph; "eager" runs it as it is (fast to compile, for debugging).
        prefetch: how many units ahead all-gathers are launched; 0 launches each at its first use.
        in_flight: how many units' reductions (of each kind) may be under way; 0 waits for each at its launch.
        pack: "in place": gradients are written into the reduce-scatter input by the kernels that compute them; "copy":
            they are copied there.
        fuse: False keeps one collective per parameter, as captured: the oracle of every pass; "all-reduces" one per
            parameter over the shards, and one a unit's bucket over the replicas.
        check_order: what to do if generated code launches or waits in another order than the graph: "warn", "error"
            or "off".
        agree: whether ranks compare the plan of each graph before they run it, see ``fxshard.plan_agreement``; False
            where they differ by right.
        agree_seconds: how long a rank waits for the others to come to that comparison.
        inductor: settings of torch._inductor.config for this compile, by name.
    """

    codegen: str = "inductor"
    prefetch: int = 1
    in_flight: int = 1
    pack: str = "in place"
    fuse: bool | str = True
    check_order: str = "warn"
    agree: bool = True
    agree_seconds: int = 30
    inductor: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, (kind, said) in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
                raise ValueError(f"option {name!r} takes {said}, got {value!r} of type {type(value).__name__}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                choices = ", ".join(map(str, allowed))
                raise ValueError(f"option {name!r} is one of {choices}; got {getattr(self, name)!r}")
        for name in ("prefetch", "in_flight"):
            if getattr(self, name) < 0:
                raise ValueError(f"option {name!r} counts units and is at least 0, got {getattr(self, name)}")
        if self.agree_seconds < 1:
            raise ValueError(f"option 'agree_seconds' is at least 1, got {self.agree_seconds}; agree=False is off")


_CHOICES: dict[str, tuple[object, ...]] = {
    "codegen": ("inductor", "eager"),
    "pack": ("in place", "copy"),
    "fuse": (True, False, "all-reduces"),
    "check_order": ("warn", "error", "off"),
}
_KINDS: dict[str, tuple[Any, str]] = {
    "codegen": (str, "a string"),
    "prefetch": (int, "an int"),
    "in_flight": (int, "an int"),
    "pack": (str, "a string"),
    "fuse": ((bool, str), 'a bool or "all-reduces"'),
    "check_order": (str, "a string"),
    "agree": (bool, "a bool"),
    "agree_seconds": (int, "an int"),
    "inductor": (Mapping, "a mapping"),
}


def parse_options(options: Mapping[str, Any] | None, mode: str | None = None) -> Options:
    """``Options`` from what users pass. ``ValueError`` for an unknown key, naming the nearest one, or a bad value.

    ``mode`` is torch.compile's; its settings of Inductor stand behind those of ``options["inductor"]``.
    """
    known = [f.name for f in fields(Options)]
    for key in options or {}:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"unknown option {key!r} of backend fxshard; {hint}Known options: {', '.join(known)}")
    parsed = Options(**(options or {}))
    if mode in (None, "default"):
        return parsed
    return replace(parsed, inductor={**list_mode_options(mode), **parsed.inductor})
