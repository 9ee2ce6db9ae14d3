"""Checkpoints: what is saved by some ranks is loaded by others, sharded otherwise or not at all."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_cases import BUCKETS, CASES, cuts_of, mesh_of, shard, storage_shape, values
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Shard

import fxshard
from fxshard import checkpoint
from fxshard.layout_planner import plan_compact
from fxshard.layout_tensor import LayoutTensor

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# ---- tensors, through torch.distributed.checkpoint ------------------------------------------------------------------


def _state(seed: int, sizes: tuple[int, ...], compact: bool = False) -> dict[str, Tensor]:
    mesh = mesh_of(*sizes)
    buckets, layout = BUCKETS, None
    if compact:
        buckets = (CASES,)
        layout = plan_compact([storage_shape(*case) for case in CASES], mesh.size(mesh.ndim - 1))
    return {f"p{i}": t for i, t in enumerate(shard(values(seed), cuts_of(mesh, buckets, layout)))}


def _save_tensors(path: str, sizes: tuple[int, ...]) -> int:
    dcp.save(_state(0, sizes), checkpoint_id=path, no_dist=not dist.is_initialized())
    return sum(file.stat().st_size for file in Path(path).glob("*.distcp"))


def _load_tensors(path: str, sizes: tuple[int, ...], compact: bool) -> None:
    state = _state(5, sizes, compact)
    where = {name: t.to_local().data_ptr() for name, t in state.items()}
    dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    for (name, tensor), full in zip(state.items(), values(0), strict=True):
        assert torch.equal(tensor.full_tensor(), full) and tensor.to_local().data_ptr() == where[name]


def _load_plain(path: Path) -> None:
    state = dict(enumerate(values(5)))
    dcp.load(named := {f"p{i}": t for i, t in state.items()}, checkpoint_id=path, no_dist=True)
    for tensor, full in zip(named.values(), values(0), strict=True):
        assert torch.equal(tensor, full)


def test_tensors_saved_by_two_ranks_load_on_four_and_one_and_into_plain_tensors(ranks2, ranks4, tmp_path):
    ranks2.run(_save_tensors, str(tmp_path), (2,))
    for sizes, compact in (((4,), False), ((4,), True), ((2, 2), False)):
        ranks4.run(_load_tensors, str(tmp_path), sizes, compact)
    ranks2.run(_load_tensors, str(tmp_path), (2,), True)
    _load_tensors(str(tmp_path), (), False)
    _load_plain(tmp_path)


def test_replicas_are_written_once(ranks2, ranks4, tmp_path):
    once = ranks2.run(_save_tensors, str(tmp_path / "1d"), (2,))[0]
    replicated = ranks4.run(_save_tensors, str(tmp_path / "2d"), (2, 2))[0]
    assert replicated < 1.9 * once
    ranks2.run(_load_tensors, str(tmp_path / "2d"), (2,), False)
    _load_plain(tmp_path / "2d")


def test_tensors_saved_by_one_process_load_on_four_ranks(ranks4, tmp_path):
    _save_tensors(str(tmp_path), ())
    ranks4.run(_load_tensors, str(tmp_path), (4,), True)


def test_a_tensor_without_elements_is_saved_and_loaded(tmp_path):
    tensor = shard([torch.empty(0, 4)], cuts_of(mesh_of(), [[((0, 4), 0)]]))[0]
    dcp.save({"empty": tensor}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({"empty": tensor}, checkpoint_id=tmp_path, no_dist=True)


def test_a_part_that_this_rank_does_not_own_is_not_handed_out():
    from torch.distributed.checkpoint.metadata import MetadataIndex

    tensor = shard(values(), cuts_of(mesh_of()))[0]
    assert tensor.__get_tensor_shard__(MetadataIndex("p", torch.Size((0, 0)))).shape == (7, 3)
    with pytest.raises(ValueError, match=r"at \(1, 0\), but it owns \[\(0, 0\)\]"):
        tensor.__get_tensor_shard__(MetadataIndex("p", torch.Size((1, 0))))


# ---- models and optimizers ------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Three units, a tied weight, a buffer, and rows that do not divide by the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += tokens.numel()
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _net(seed: int, units: str | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A new model sharded in one of several ways (None: not at all) with its optimizer."""
    torch.manual_seed(seed)
    model = Net()
    mesh = mesh_of(2, 2) if units == "2d" else mesh_of()
    if units == "root":
        fxshard.fully_shard(model, mesh=mesh)
    elif units == "columns":
        fxshard.fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    elif units is not None:
        fxshard.shard(model, mesh)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    return model, torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=1e-2)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(11, (8,), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(tokens), tokens.flip(0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, LayoutTensor) else value.clone()
        for name, value in model.state_dict().items()
    }


def _train_and_save(path: str, units: str | None) -> dict[str, Tensor]:
    """Train two steps, save, train two more; the final values."""
    model, optimizer = _net(0, units)
    _train(model, optimizer, range(2))
    checkpoint.save(model, optimizer, path, extra={"step": 2, "losses": [1.5, 0.5], "mean": torch.ones(2)})
    _train(model, optimizer, range(2, 4))
    return _values(model)


def _load_and_train(path: str, units: str | None) -> dict[str, Tensor]:
    model, optimizer = _net(1, units)
    optimizer.param_groups[0]["lr"] = 99.0
    where = [p.to_local().data_ptr() for p in model.parameters()] if units else []
    extra = checkpoint.load(model, optimizer, path)
    assert extra["step"] == 2 and extra["losses"] == [1.5, 0.5] and torch.equal(extra["mean"], torch.ones(2))
    assert [p.to_local().data_ptr() for p in model.parameters()] == where if units else True
    assert [g["lr"] for g in optimizer.param_groups] == [1e-2] * 2
    _train(model, optimizer, range(2, 4))
    return _values(model)


def _same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], msg=lambda m, name=name: f"{name}: {m}")


def test_training_goes_on_from_a_checkpoint_on_any_ranks_with_any_units(ranks2, ranks4, tmp_path):
    path = str(tmp_path / "checkpoint")
    expected = ranks2.run(_train_and_save, path, "auto")[0]
    _same(_load_and_train(path, None), expected)
    _same(_load_and_train(path, "auto"), expected)
    for pool, units in ((ranks2, "columns"), (ranks4, "root"), (ranks4, "2d")):
        for got in pool.run(_load_and_train, path, units):
            _same(got, expected)


@pytest.mark.parametrize("units", [None, "columns"])
def test_a_checkpoint_of_one_process_is_loaded_by_sharding_ranks(ranks2, tmp_path, units):
    path = str(tmp_path / "checkpoint")
    expected = _train_and_save(path, units)
    for got in ranks2.run(_load_and_train, path, "auto"):
        _same(got, expected)


def test_files_hold_the_names_and_shapes_of_the_unsharded_model(tmp_path):
    _train_and_save(str(tmp_path / "checkpoint"), "auto")
    saved = dcp.FileSystemReader(tmp_path / "checkpoint").read_metadata().state_dict_metadata
    model, optimizer = _net(0, None)
    _train(model, optimizer, range(1))
    state = optimizer.state[model.blocks[0][0].weight]
    names = {f"model.{name}" for name in model.state_dict()} | {"extra"}
    names |= {f"optimizer.state.{name}.{key}" for name, _ in model.named_parameters() for key in state}
    names |= {f"optimizer.param_groups.{i}.{key}" for i in range(2) for key in optimizer.param_groups[i]}
    assert set(saved) == names
    assert saved["model.blocks.1.0.weight"].size == saved["optimizer.state.blocks.1.0.weight.exp_avg"].size == (7, 6)


def test_tensor_options_stay_tensors_and_an_optimizer_that_never_stepped_stays_fresh(tmp_path):
    model, _ = _net(0, "auto")
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))
    checkpoint.save(model, optimizer, tmp_path / "fresh")
    twin = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    checkpoint.load(model, twin, tmp_path / "fresh")
    assert torch.equal(twin.param_groups[0]["lr"], torch.tensor(0.5)) and not twin.state and not optimizer.state


# ---- whole state dicts ----------------------------------------------------------------------------------------------


def _full_state_dicts() -> Any:
    model, optimizer = _net(0, "auto")
    _train(model, optimizer, range(2))
    whole = checkpoint.full_state_dict(model, optimizer)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    theirs = copy.deepcopy(
        {
            "model": get_model_state_dict(model, options=options),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        }
    )
    twin, twin_optimizer = _net(1, "root")
    put = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(twin, copy.deepcopy(whole.get("model", {})), options=put)
    set_optimizer_state_dict(twin, twin_optimizer, copy.deepcopy(whole.get("optimizer", {})), options=put)
    sharded, sharded_optimizer = _net(1, "auto")
    set_model_state_dict(sharded, get_model_state_dict(model))
    set_optimizer_state_dict(sharded, sharded_optimizer, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
    for m, o in ((model, optimizer), (twin, twin_optimizer), (sharded, sharded_optimizer)):
        _train(m, o, range(2, 4))
    _same(_values(twin), _values(model))
    _same(_values(sharded), _values(model))
    return whole, theirs


def test_full_state_dicts_are_those_of_torch_and_can_be_put_back(ranks2):
    (whole, theirs), (elsewhere, _) = ranks2.run(_full_state_dicts)
    assert elsewhere == {}
    assert whole["model"].keys() == theirs["model"].keys()
    for name, value in whole["model"].items():
        assert type(value) is Tensor and torch.equal(value, theirs["model"][name])
    for name, values_ in whole["optimizer"]["state"].items():
        for key, value in values_.items():
            assert torch.equal(value, theirs["optimizer"]["state"][name][key])
    assert whole["optimizer"]["state"].keys() == theirs["optimizer"]["state"].keys()
    Net().load_state_dict(whole["model"])


def test_full_state_dicts_are_copies_in_one_process_too():
    model, optimizer = _net(0, "auto")
    _train(model, optimizer, range(1))
    whole = checkpoint.full_state_dict(model, optimizer)
    before = copy.deepcopy(whole)
    _train(model, optimizer, range(1, 3))
    _same(whole["model"], before["model"])
    for name, state in whole["optimizer"]["state"].items():
        _same(state, before["optimizer"]["state"][name])


# ---- interrupted saves ----------------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


def _fail_at(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, call: int) -> None:
    """Make the ``call``-th call of ``module.name`` (1 is the first) raise instead."""
    real, calls = getattr(module, name), []

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == call:
            raise Interrupted
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, fail)


@pytest.mark.parametrize(
    "module, name, call, survivor",
    [
        (dcp, "save", 1, 1),
        (os, "fsync", 1, 1),
        (os, "rename", 1, 1),
        (os, "rename", 2, 1),
        (checkpoint, "_flush", 1, 2),
        (checkpoint, "_flush", 2, 2),
    ],
)
def test_an_interrupted_save_leaves_a_complete_checkpoint(monkeypatch, tmp_path, module, name, call, survivor):
    model = _net(0, "auto")[0]
    path = tmp_path / "checkpoint"
    checkpoint.save(model, None, path, extra={"number": 1})
    if (module, name) == (os, "rename"):  # DCP renames its metadata file first
        call += 1
    with monkeypatch.context() as patch, pytest.raises(BaseException) as raised:
        _fail_at(patch, module, name, call)
        checkpoint.save(model, None, path, extra={"number": 2})
    assert "Interrupted" in repr(raised.value)
    assert checkpoint.load(model, None, path) == {"number": survivor}
    checkpoint.save(model, None, path, extra={"number": 3})
    assert checkpoint.load(model, None, path) == {"number": 3}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint"]


def _save_over_a_folder(path: str) -> str:
    try:
        checkpoint.save(_net(0, "auto")[0], None, path)
    except (FileExistsError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_a_folder_that_is_no_checkpoint_is_not_replaced(ranks2, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    first, second = ranks2.run(_save_over_a_folder, str(tmp_path))
    assert first.startswith("FileExistsError") and "is no checkpoint" in first
    assert second.startswith("RuntimeError") and "is no checkpoint" in second
    assert (tmp_path / "notes.txt").read_text() == "mine"


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_checkpoints_of_another_model_or_optimizer_are_refused_by_name(tmp_path):
    model, optimizer = _net(0, "auto")
    _train(model, optimizer, range(1))
    checkpoint.save(model, None, tmp_path / "model")
    checkpoint.save(model, optimizer, tmp_path / "both")
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        checkpoint.load(model, None, tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"holds no optimizer.*optimizer=None"):
        checkpoint.load(model, optimizer, tmp_path / "model")
    other = Net()
    other.extra = nn.Linear(2, 2)
    del other.seen
    with pytest.raises(ValueError, match=r"lacks 2 .*model.extra.bias.*1 that the model lacks \['model.seen'\]"):
        checkpoint.load(other, None, tmp_path / "model")
    checkpoint.load(other, torch.optim.AdamW(other.parameters()), tmp_path / "both", strict=False)
    assert torch.equal(other.embed.weight, model.embed.weight.full_tensor())
    wide = Net()
    wide.blocks[0][0] = nn.Linear(6, 8)
    with pytest.raises(ValueError, match=r"model.blocks.0.0.weight has shape \(7, 6\).*\(8, 6\) here"):
        checkpoint.load(wide, None, tmp_path / "model")
    with pytest.raises(
        ValueError, match=r"parameter 0 of the optimizer's group 0, of shape \(11, 6\), is no parameter"
    ):
        checkpoint.save(model, torch.optim.SGD(Net().parameters()), tmp_path / "other")


def test_values_that_cannot_be_read_again_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(Exception, match="weights_only"):
        checkpoint.save(_net(0, "auto")[0], None, tmp_path / "checkpoint", extra={"object": Net()})
    assert list(tmp_path.iterdir()) == []
