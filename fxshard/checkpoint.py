"""Checkpoints of a model and its optimizer, keyed by fully qualified parameter names.

``save`` and ``load`` go through ``torch.distributed.checkpoint``: every rank writes and reads its own rows, and the
files say nothing of units, buckets, layouts or world size. So a checkpoint can be loaded on another number of ranks,
with other units, or into an unsharded model, and the other way round. ``full_state_dict`` puts everything on rank 0.

Names in the files: ``model.<parameter>``, ``optimizer.state.<parameter>.<state>``, ``optimizer.param_groups.<number>.
<option>``, ``extra``. But for the last they are those of the state dicts of torch's ``get_state_dict``, saved by DCP.

[Note: what an interrupted save leaves]
``save`` writes to ``<path>.partial``, flushes the files to the disk, renames an older checkpoint ``path`` to
``<path>.previous``, renames ``<path>.partial`` to ``path`` and then deletes the previous one. Whenever it stops, at
least one of ``path`` and ``<path>.previous`` is the last complete checkpoint, and ``load`` takes ``path`` if it is
there, else ``<path>.previous``. The renames are atomic on a POSIX file system that all ranks share.
"""

from __future__ import annotations

import io
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

from fxshard.distributed import broadcast_from, is_distributed_run, is_master
from fxshard.layout_tensor import LayoutTensor

_STATE, _GROUPS, _EXTRA = "optimizer.state.", "optimizer.param_groups.", "extra"
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile and activation checkpointing


# ---- saving --------------------------------------------------------------------------------------------------------


def save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint directory ``path``, in place of an older checkpoint there. Collective over all ranks.

    Each rank writes the rows it owns; of replicated values one copy is written. ``extra`` holds further values that are
    equal on all ranks (step counters, schedules), of the types that ``torch.load(weights_only=True)`` reads. An
    interrupted save loses nothing already saved: see [Note: what an interrupted save leaves].

    Raises ``FileExistsError`` if ``path`` exists and is no checkpoint (on ranks other than 0, ``RuntimeError`` with its
    text), ``ValueError`` for optimizer parameters that the model does not have, and DCP's ``CheckpointException`` (not
    an ``Exception`` but a ``BaseException``) for errors of writing.
    """
    target = Path(path)
    state = {f"model.{name}": value for name, value in _model_state(model).items()}
    if optimizer is not None:
        for name, values in _optimizer_state(model, optimizer).items():
            state.update((f"{_STATE}{name}.{key}", value) for key, value in values.items())
        for number, group in enumerate(_param_groups(model, optimizer)):
            state.update((f"{_GROUPS}{number}.{key}", value) for key, value in group.items())
    if extra is not None:
        state[_EXTRA] = _packed(extra)
    broadcast_from(f"fxshard checkpoint {target.name} begin", lambda: _begin(target))
    with _one_process_is_fine():
        dcp.save(state, checkpoint_id=_partial(target), no_dist=not is_distributed_run())
    broadcast_from(f"fxshard checkpoint {target.name} commit", lambda: _commit(target))


def _partial(target: Path) -> Path:
    return target.with_name(f"{target.name}.partial")


def _previous(target: Path) -> Path:
    return target.with_name(f"{target.name}.previous")


def _is_checkpoint(path: Path) -> bool:
    return (path / ".metadata").is_file()


def _begin(target: Path) -> None:
    if target.exists() and not _is_checkpoint(target) and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(
            f"{target} exists and is no checkpoint, so it is not replaced; choose another path, or remove it"
        )
    shutil.rmtree(_partial(target), ignore_errors=True)


def _commit(target: Path) -> None:
    """Put the complete partial checkpoint in place; rank 0 only."""
    if target.exists():
        shutil.rmtree(_previous(target), ignore_errors=True)
        os.rename(target, _previous(target))
    os.rename(_partial(target), target)
    _flush(target)
    _flush(target.parent)
    shutil.rmtree(_previous(target), ignore_errors=True)


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    """Without DCP's warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


# ---- loading -------------------------------------------------------------------------------------------------------


def load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
) -> dict[str, Any]:
    """Read a checkpoint into ``model`` and ``optimizer``, in place, and return its ``extra`` values. Collective.

    Each rank reads the rows it owns, whatever the number of ranks that wrote them. The model must be materialised; the
    optimizer need not have stepped. With ``optimizer=None`` optimizer state in the checkpoint is left alone. If reading
    fails half way, the model may hold a mixture of old and new values.

    Raises, before anything is changed: ``FileNotFoundError`` without a checkpoint at ``path``; ``ValueError`` for
    tensors of another shape and, unless ``strict`` is False, for names that only the model or only the checkpoint has.
    """
    source = _source(Path(path))
    saved = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
    original = model.state_dict()
    model_state = {f"model.{_clean(name)}": value for name, value in original.items()}
    _check_names(model_state, saved, source, strict)
    wanted = {name: value for name, value in model_state.items() if name in saved}
    optimizer_state = _optimizer_targets(model, optimizer, saved, source, strict) if optimizer is not None else {}
    for name, values in optimizer_state.items():
        wanted.update((f"{_STATE}{name}.{key}", value) for key, value in values.items())
    wanted.update((name, b"") for name in saved if name == _EXTRA or (optimizer and name.startswith(_GROUPS)))
    _check_shapes(wanted, saved, source)
    with _one_process_is_fine():
        dcp.load(wanted, checkpoint_id=source, no_dist=not is_distributed_run())
    loaded = {name: wanted[f"model.{_clean(name)}"] for name in original if f"model.{_clean(name)}" in wanted}
    model.load_state_dict(loaded, strict=strict)
    if optimizer is not None:
        for name, values in optimizer_state.items():
            values.update((key, wanted[f"{_STATE}{name}.{key}"]) for key in values)
        _restore_optimizer(model, optimizer, optimizer_state, _saved_groups(wanted))
    return _unpacked(wanted[_EXTRA]) if _EXTRA in wanted else {}


def _source(path: Path) -> Path:
    """The newest complete checkpoint of ``path``."""
    found = next((p for p in (path, _previous(path)) if _is_checkpoint(p)), None)
    if found is None:
        raise FileNotFoundError(f"no checkpoint at {path}: neither it nor {_previous(path)} holds a .metadata file")
    return found


def _check_names(wanted: Mapping[str, Any], saved: Mapping[str, STORAGE_TYPES], source: Path, strict: bool) -> None:
    have = {name for name in saved if name.startswith("model.")}
    missing, unexpected = sorted(wanted.keys() - have), sorted(have - wanted.keys())
    if strict and (missing or unexpected):
        raise ValueError(
            f"the checkpoint {source} is of another model: it lacks {len(missing)} of the model's names {missing[:5]} "
            f"and has {len(unexpected)} that the model lacks {unexpected[:5]}; load into the model that was saved, or "
            "pass strict=False to load what both have"
        )


def _check_shapes(wanted: Mapping[str, Any], saved: Mapping[str, STORAGE_TYPES], source: Path) -> None:
    for name, value in wanted.items():
        entry = saved[name]
        if isinstance(value, Tensor) and isinstance(entry, TensorStorageMetadata) and entry.size != value.shape:
            raise ValueError(
                f"{name} has shape {tuple(entry.size)} in the checkpoint {source}, but {tuple(value.shape)} here"
            )


def _optimizer_targets(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, STORAGE_TYPES],
    source: Path,
    strict: bool,
) -> dict[str, dict[str, Any]]:
    """Memory for the optimizer state of a checkpoint: per parameter name and state name, sharded like the parameter."""
    params = {name: p for p, name in _named(model, optimizer)}
    targets: dict[str, dict[str, Any]] = {name: {} for name in params}
    unexpected = []
    for full_name, entry in saved.items():
        if not full_name.startswith(_STATE):
            continue
        name, _, key = full_name.removeprefix(_STATE).rpartition(".")
        if name in params:
            targets[name][key] = _target(params[name], optimizer.state.get(params[name], {}).get(key), entry)
        else:
            unexpected.append(full_name)
    lacking = not any(name.startswith(_GROUPS) for name in saved)
    if strict and (unexpected or lacking):
        raise ValueError(
            f"the checkpoint {source} is of another optimizer: "
            + ("it holds no optimizer. " if lacking else f"it has state for {unexpected[:5]} that no parameter has. ")
            + "Pass optimizer=None to load the model alone, or strict=False to load what both have"
        )
    return targets


def _target(param: Tensor, present: Any, entry: STORAGE_TYPES) -> Any:
    """What one state is read into: the present tensor if it fits, else a new one; not a tensor: a placeholder."""
    if not isinstance(entry, TensorStorageMetadata):
        return b""
    dtype = entry.properties.dtype
    if isinstance(present, Tensor) and present.shape == entry.size and present.dtype == dtype:
        return present
    if entry.size == param.shape:
        return torch.empty_like(param, dtype=dtype, requires_grad=False)
    return torch.empty(entry.size, dtype=dtype)


def _saved_groups(wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {}
    for name, value in wanted.items():
        if name.startswith(_GROUPS):
            number, _, key = name.removeprefix(_GROUPS).partition(".")
            groups.setdefault(number, {})[key] = value
    return list(groups.values())


def _restore_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, dict[str, Any]],
    saved_groups: list[dict[str, Any]],
) -> None:
    """Give ``optimizer`` the state and options by parameter name; its own groups decide which options go together."""
    names = {p: name for p, name in _named(model, optimizer)}
    options = {name: group for group in saved_groups for name in group["params"]}
    own = optimizer.state_dict()
    for group, packed in zip(optimizer.param_groups, own["param_groups"], strict=True):
        saved = next((options[names[p]] for p in group["params"] if names[p] in options), {})
        for key, value in saved.items():
            if key == "params":
                continue
            now = group.get(key)
            packed[key] = torch.full_like(now, value) if isinstance(now, Tensor) else value
    order = [name for group in optimizer.param_groups for name in (names[p] for p in group["params"])]
    own["state"] = {i: state[name] for i, name in enumerate(order) if state.get(name)}
    optimizer.load_state_dict(own)


# ---- whole state dicts ---------------------------------------------------------------------------------------------


@torch.no_grad()
def full_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """``{"model": {name: tensor}, "optimizer": {"state": ..., "param_groups": ...}}`` on rank 0, ``{}`` elsewhere.

    Full tensors are copies in CPU memory, keyed by parameter name as in torch's ``get_state_dict``. Collective over all
    ranks. One tensor is gathered at a time, so other ranks never hold more than one full tensor beside their shards.
    ``set_model_state_dict`` and ``set_optimizer_state_dict`` of ``torch.distributed.checkpoint.state_dict`` with
    ``StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)`` put it back.
    """
    keep = is_master()
    result: dict[str, Any] = {"model": _gathered(_model_state(model), keep)}
    if optimizer is not None:
        state = {name: _gathered(values, keep) for name, values in _optimizer_state(model, optimizer).items()}
        result["optimizer"] = {"state": state, "param_groups": _param_groups(model, optimizer)}
    return result if keep else {}


def _gathered(values: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    whole = {}
    for name, value in values.items():
        if isinstance(value, LayoutTensor):
            value = value.full_tensor()
        if keep:
            whole[name] = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
    return whole


# ---- names and values ----------------------------------------------------------------------------------------------


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _model_state(model: nn.Module) -> dict[str, Any]:
    return {_clean(name): value for name, value in model.state_dict().items()}


def _named(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, str]]:
    """Every parameter of the optimizer with its name in the model (a tied one: its first), in the optimizer's order."""
    names: dict[Tensor, str] = {}
    for name, p in model.named_parameters():
        names.setdefault(p, _clean(name))
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if p not in names:
                raise ValueError(
                    f"parameter {i} of the optimizer's group {g}, of shape {tuple(p.shape)}, is no parameter of the "
                    "model; make the optimizer from the parameters of the sharded model"
                )
            yield p, names[p]


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """State by parameter name and state name; a parameter that was never stepped has none."""
    result = {}
    for p, name in _named(model, optimizer):
        values = optimizer.state.get(p, {})
        nested = [key for key, value in values.items() if isinstance(value, Mapping) or "." in key]
        if nested:
            raise ValueError(
                f"optimizer state {nested} of {name} is nested, or has a dot in its name, and could not be told apart "
                f"by name in a checkpoint; save the state of {type(optimizer).__name__} on your own"
            )
        if values:
            result[name] = dict(values)
    return result


def _param_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The optimizer's groups with parameters by name and options as plain values, not tensors."""
    names = {p: name for p, name in _named(model, optimizer)}
    return [
        {
            key: [names[p] for p in value] if key == "params" else value.item() if isinstance(value, Tensor) else value
            for key, value in group.items()
        }
        for group in optimizer.param_groups
    ]


def _packed(extra: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(extra), buffer)
    _unpacked(buffer.getvalue())  # what cannot be read again is refused now
    return buffer.getvalue()


def _unpacked(data: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
