"""DistributionPlan: its values, where it is recorded, and when reading or recording it is refused."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from outcomes import outcome
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fxshard.distributed import DistributionPlan, distribution_plan, set_distribution_plan
from fxshard.distributed.codec import decode, encode


def tree():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))


def recorded(model):
    return [getattr(module, "_fxshard_distribution_plan", None) for module in model.modules()]


def test_a_plan_has_defaults_and_derived_sizes():
    assert DistributionPlan() == DistributionPlan(1, 1, "replicate")
    plan = DistributionPlan(world_size=8, ep_size=2, dense="fsdp")
    assert (plan.edp, plan.is_expert_parallel, plan.is_fsdp_dense) == (4, True, True)
    assert (DistributionPlan().edp, DistributionPlan().is_expert_parallel, DistributionPlan().is_fsdp_dense) == (
        1,
        False,
        False,
    )


def test_a_plan_is_frozen_and_hashable():
    plan = DistributionPlan(4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.world_size = 2
    assert len({plan, DistributionPlan(4), DistributionPlan(2)}) == 2


@pytest.mark.parametrize(
    "values, message",
    [
        ({"world_size": 0}, "world_size must be a positive int, got 0"),
        ({"world_size": True}, "world_size must be a positive int, got True"),
        ({"world_size": 2.0}, "world_size must be a positive int, got 2.0"),
        ({"ep_size": -1}, "ep_size must be a positive int, got -1"),
        ({"world_size": 8, "ep_size": 3}, "ep_size must divide world_size, got ep_size=3 and world_size=8"),
        ({"dense": "ddp"}, "dense must be 'replicate' or 'fsdp', got 'ddp'"),
    ],
)
def test_an_impossible_plan_is_refused_with_field_and_value(values, message):
    with pytest.raises(ValueError, match=message):
        DistributionPlan(**values)


def test_a_plan_can_be_sent_without_further_registration():
    plan = DistributionPlan(8, 2, "fsdp")
    assert decode(encode(plan, "plan")) == plan


def test_every_current_submodule_records_the_plan_and_a_later_one_does_not():
    model, plan = tree(), DistributionPlan(2)
    keys = list(model.state_dict())
    set_distribution_plan(model, plan)
    assert all(distribution_plan(module) is plan for module in model.modules())
    model.append(nn.Linear(4, 4))
    assert recorded(model)[-1] is None and distribution_plan(model[-1]) == DistributionPlan()
    del model[-1]
    assert list(model.state_dict()) == keys
    assert not any("plan" in name for name, _ in [*model.named_parameters(), *model.named_buffers()])


@pytest.mark.parametrize("plan", [DistributionPlan(), DistributionPlan(2)], ids=["equal", "other"])
def test_a_plan_on_a_deep_child_refuses_recording_the_root_and_nothing_changes(plan):
    model = tree()
    set_distribution_plan(model[1][1], DistributionPlan())
    before = recorded(model)
    with pytest.raises(RuntimeError, match=r"submodule '1\.1' of Sequential already records"):
        set_distribution_plan(model, plan)
    assert recorded(model) == before and before.count(None) == 4


def test_a_deep_copy_keeps_the_plan_and_refuses_another():
    model = tree()
    set_distribution_plan(model, DistributionPlan(2))
    clone = copy.deepcopy(model)
    assert distribution_plan(clone[1][1]) == DistributionPlan(2)
    with pytest.raises(RuntimeError, match="Sequential already records"):
        set_distribution_plan(clone, DistributionPlan(2))


def test_only_a_plan_is_recorded():
    with pytest.raises(ValueError, match="records a DistributionPlan, got 2"):
        set_distribution_plan(tree(), 2)


def test_without_a_group_any_size_is_recorded():
    model = tree()
    set_distribution_plan(model, DistributionPlan(8))
    assert distribution_plan(model).world_size == 8


def test_one_rank_may_stand_in_for_several(group_of_one):
    model = tree()
    set_distribution_plan(model, DistributionPlan(8))
    assert distribution_plan(model).world_size == 8


def test_a_plain_module_of_one_process_has_the_default_plan(monkeypatch, group_of_one):
    assert distribution_plan(tree()) == DistributionPlan()
    dist.destroy_process_group()
    assert distribution_plan(tree()) == DistributionPlan()
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert distribution_plan(tree()) == DistributionPlan()


def test_a_sharded_model_without_a_plan_is_refused_even_on_one_rank(group_of_one):
    model = tree()
    fully_shard(model[1], mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(RuntimeError, match="Sequential is sharded but records no plan"):
        distribution_plan(model)
    assert distribution_plan(model[0]) == DistributionPlan()


def test_a_plan_recorded_before_sharding_survives_the_class_swap(group_of_one):
    model = tree()
    set_distribution_plan(model, DistributionPlan(1, dense="fsdp"))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert distribution_plan(model).is_fsdp_dense


def test_a_model_sharded_by_fxshard_without_a_plan_is_refused():
    model = tree()
    model[1]._fxshard_unit = None
    assert distribution_plan(model) == DistributionPlan()
    model[1]._fxshard_unit = SimpleNamespace()
    with pytest.raises(RuntimeError, match="sharded but records no plan"):
        distribution_plan(model)


def test_a_compiled_wrapper_reads_the_plan_recorded_inside():
    model, plan = tree(), DistributionPlan(2)
    set_distribution_plan(model, plan)
    assert distribution_plan(torch.compile(model, backend="eager")) is plan


def test_recording_on_a_compiled_wrapper_works_once():
    model = tree()
    compiled = torch.compile(model, backend="eager")
    set_distribution_plan(compiled, DistributionPlan(2))
    assert distribution_plan(model) == DistributionPlan(2)
    with pytest.raises(RuntimeError, match="already records"):
        set_distribution_plan(compiled, DistributionPlan(2))


def record_sizes():
    model = tree()
    unrecorded = outcome(distribution_plan, model)
    refused = [outcome(set_distribution_plan, model, DistributionPlan(size)) for size in (1, 3)]
    untouched = recorded(model)
    set_distribution_plan(model, DistributionPlan(2))
    model.append(nn.Linear(4, 4))
    return unrecorded, refused, untouched, distribution_plan(model).world_size, outcome(distribution_plan, model[-1])


def test_a_run_of_several_ranks_takes_only_a_plan_of_its_size_and_needs_a_plan(ranks2):
    for unrecorded, refused, untouched, size, late in ranks2.run(record_sizes):
        assert unrecorded[0] == late[0] == "RuntimeError"
        assert "read the plan off the model this module was added to" in late[1]
        assert [kind for kind, _ in refused] == ["RuntimeError"] * 2
        assert "world_size=3" in refused[1][1] and "2 ranks" in refused[1][1]
        assert set(untouched) == {None}
        assert size == 2
