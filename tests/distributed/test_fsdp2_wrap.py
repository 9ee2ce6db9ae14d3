"""fsdp2_wrap, the detection of layers and the rule for parameters of another dtype."""

import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from outcomes import outcome
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fxshard.distributed import fsdp2_wrap, is_fsdp2_model, layers


class Layer(nn.Module):
    def __init__(self, dim, gate_dtype=None):
        super().__init__()
        self.up = nn.Linear(dim, dim)
        self.gate = nn.Linear(dim, 1, dtype=gate_dtype)

    def forward(self, x):
        return self.up(x) * torch.sigmoid(self.gate(x.to(self.gate.weight.dtype))).to(x.dtype)


class Decoder(nn.Module):
    def __init__(self, dim=8, depth=2, **kwargs):
        super().__init__()
        self.embed = nn.Linear(dim, dim)
        self.layers = nn.ModuleList(Layer(dim, **kwargs) for _ in range(depth))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.model = Decoder(**kwargs)
        self.head = nn.Linear(8, 8)
        self.config = SimpleNamespace(architectures=["Model"])

    def forward(self, x):
        return self.head(self.model(x))


class VisionModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.language_model = Decoder()


def seeded(**kwargs):
    torch.manual_seed(0)
    return Model(**kwargs)


def mixed():
    """bfloat16 with float32 gates."""
    model = seeded().to(torch.bfloat16)
    for layer in model.model.layers:
        layer.gate.to(torch.float32)
    return model


# --- detection ---------------------------------------------------------------------------------------------------


def test_layers_are_found_at_both_places_as_the_same_objects():
    model, vision = Model(), VisionModel()
    assert all(a is b for a, b in zip(layers.find_layers(model), model.model.layers, strict=True))
    assert layers.find_layers(vision) == list(vision.model.language_model.layers)
    assert layers.find_layers(torch.compile(model, backend="eager")) == list(model.model.layers)


def no_layers():
    model = Model()
    model.model.layers = nn.ModuleList()
    return model


def layers_of_two_classes():
    model = Model()
    model.model.layers.append(nn.Linear(1, 1))
    return model


def a_single_module_for_layers():
    model = Model()
    model.model.layers = nn.Linear(1, 1)
    return model


@pytest.mark.parametrize("build", [no_layers, layers_of_two_classes, a_single_module_for_layers])
def test_a_model_without_layers_of_one_class_is_refused_with_the_places_looked_at(build):
    with pytest.raises(
        RuntimeError,
        match=r"no decoder layers found in Model: .*model\.model\.layers, model\.model\.language_model\.layers",
    ):
        layers.find_layers(build())


def test_finders_are_tried_in_order_and_their_places_named(monkeypatch):
    mine = layers.LayerFinder(("model.head",), lambda model: hasattr(model, "head"), lambda model: [model.head])
    monkeypatch.setattr(layers, "LAYER_FINDERS", [mine, *layers.LAYER_FINDERS])
    model = Model()
    assert layers.find_layers(model) == [model.head]
    with pytest.raises(RuntimeError, match=r"Linear: .*at model\.head, model\.model\.layers"):
        layers.find_layers(nn.Linear(1, 1))


# --- parameters of another dtype ---------------------------------------------------------------------------------


def test_the_dominant_dtype_is_the_one_with_most_elements():
    model = nn.ModuleList([nn.Linear(10, 10, dtype=torch.bfloat16), *(nn.Linear(2, 2) for _ in range(5))])
    off = layers.off_dtype(model)
    assert off.dominant is torch.bfloat16 and len(off.parameters) == 10
    assert off.share == pytest.approx(30 / 140)
    assert list(off.within([model[1]]).parameters) == ["1.weight", "1.bias"]
    assert off.within([model[1]]).share == pytest.approx(6 / 140)


def test_at_a_tie_the_first_registered_dtype_dominates():
    model = nn.ModuleList([nn.Linear(2, 2, dtype=torch.float16), nn.Linear(2, 2)])
    assert layers.off_dtype(model).dominant is torch.float16


def test_a_uniform_or_empty_model_has_nothing_off_and_warns_about_nothing(recwarn):
    for model in (Model(), nn.ReLU()):
        off = layers.off_dtype(model)
        assert (off.parameters, off.share) == ({}, 0.0)
        layers.warn_off_dtype(off, "unused")
    assert not recwarn


def test_the_warning_names_eight_parameters_at_most():
    off = layers.off_dtype(nn.ModuleList([nn.Linear(9, 9), *(nn.Linear(1, 1, dtype=torch.half) for _ in range(5))]))
    expected = r"10 parameters \(10 %.*torch.float16, not torch.float32: 1.weight.*and 2 more"
    with pytest.warns(UserWarning, match=expected):
        layers.warn_off_dtype(off, "they stay whole")


# --- the wrap ----------------------------------------------------------------------------------------------------


def wrapped(build, **options):
    """What a wrap did, as plain data: layers kept, who is wrapped, what is sharded, warnings, output, gradient."""
    model = build()
    before, kinds = list(model.model.layers), [type(layer) for layer in model.model.layers]
    x = torch.ones(2, 8, dtype=model.head.weight.dtype)
    expected = model(x)
    was_fsdp = is_fsdp2_model(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fsdp2_wrap(model, **options)
    out = model(x)
    out.sum().backward()
    return {
        "same layers": all(a is b for a, b in zip(before, found, strict=True)),
        "same classes": all(isinstance(layer, kind) for layer, kind in zip(found, kinds, strict=True)),
        "layers wrapped": all(isinstance(layer, FSDPModule) for layer in found),
        "root wrapped": isinstance(model, FSDPModule),
        "is_fsdp2_model": (was_fsdp, is_fsdp2_model(model)),
        "whole": [name for name, p in model.named_parameters() if not isinstance(p, DTensor)],
        "dtypes": {name: str(p.dtype) for name, p in model.named_parameters() if "layers.0" in name},
        "resharded": all(isinstance(p, DTensor) for p in found[0].up.parameters()),
        "architectures": model.config.architectures,
        "warnings": [str(each.message) for each in caught if "parameters" in str(each.message)],
        "error": (out - expected).abs().max().item(),
        "gradients": all(p.grad is not None for p in model.parameters()),
    }


def test_layers_and_root_are_wrapped_and_the_model_computes_the_same(ranks2):
    for got in ranks2.run(wrapped, seeded):
        assert got["same layers"] and got["same classes"] and got["layers wrapped"] and got["root wrapped"]
        assert got["is_fsdp2_model"] == (False, True)
        assert got["whole"] == [] and got["resharded"] and got["gradients"]
        assert got["architectures"] == ["Model"] and got["warnings"] == []
        assert got["error"] < 1e-6


def test_without_the_root_everything_outside_the_layers_stays_whole(ranks2):
    for got in ranks2.run(wrapped_without_root):
        assert got["layers wrapped"] and not got["root wrapped"]
        assert got["whole"] == ["model.embed.weight", "model.embed.bias", "head.weight", "head.bias"]
        assert got["is_fsdp2_model"] == (False, True) and got["error"] < 1e-6


def wrapped_without_root():
    return wrapped(seeded, shard_root=False)


def test_gates_of_another_dtype_stay_whole_and_rank_0_warns_once(ranks2):
    first, second = ranks2.run(wrapped, mixed)
    gates = [f"model.layers.{index}.gate.{name}" for index in range(2) for name in ("weight", "bias")]
    for got in (first, second):
        assert got["whole"] == gates and got["gradients"]
        assert got["dtypes"]["model.layers.0.gate.weight"] == "torch.float32"
        assert got["dtypes"]["model.layers.0.up.weight"] == "torch.bfloat16"
        assert got["error"] < 0.05
    (text,) = first["warnings"]
    assert all(name in text for name in gates) and "4 parameters (5.88 %" in text
    assert second["warnings"] == []


def mixed_on_meta():
    with torch.device("meta"):
        model = mixed()
    fsdp2_wrap(model)
    gate = model.model.layers[0].gate.weight
    return type(gate).__name__, gate.device.type, str(gate.dtype)


def test_meta_parameters_of_another_dtype_are_left_on_meta(ranks2):
    assert ranks2.run(mixed_on_meta) == [("Parameter", "meta", "torch.float32")] * 2


def wrapped_with_policies():
    computed = []
    model = mixed()
    fsdp2_wrap(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32), cpu_offload=True)
    hook = model.model.layers[0].up.register_forward_pre_hook(lambda m, args: computed.append(m.weight.dtype))
    model(torch.ones(2, 8)).sum().backward()
    hook.remove()
    gate = model.model.layers[0].gate.weight
    devices = {p.device.type for p in model.parameters()}
    return [str(dtype) for dtype in computed], devices, gate.grad is not None


def test_policies_reach_fsdp(ranks2):
    assert ranks2.run(wrapped_with_policies) == [(["torch.float32"], {"cpu"}, True)] * 2


def only_gates_inside_layers():
    """Layers wholly of another dtype, and no root: nothing is left to shard."""
    model = seeded()
    model.head = nn.Linear(8, 64)
    for layer in model.model.layers:
        layer.to(torch.float16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fsdp2_wrap(model, shard_root=False)
    return [str(each.message) for each in caught], any(isinstance(p, DTensor) for p in model.parameters())


def test_a_wrap_that_shards_nothing_warns(ranks2):
    for messages, sharded in ranks2.run(only_gates_inside_layers):
        assert not sharded and messages == ["fsdp2_wrap sharded no parameter of Model"]


def refuse_no_layers():
    model = no_layers()
    return outcome(fsdp2_wrap, model)[0], is_fsdp2_model(model)


def test_a_model_without_layers_is_refused_and_not_wrapped(ranks2):
    assert ranks2.run(refuse_no_layers) == [("RuntimeError", False)] * 2


def wrap_a_child():
    model = seeded()
    fully_shard(model.head)
    return is_fsdp2_model(model), is_fsdp2_model(model.model)


def test_a_wrapped_child_makes_an_fsdp2_model(ranks2):
    assert ranks2.run(wrap_a_child) == [(True, False)] * 2


def test_without_a_group_the_wrap_is_refused():
    with pytest.raises(RuntimeError, match="none is set up"):
        fsdp2_wrap(Model())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU shows that a parameter moves")
def test_parameters_of_another_dtype_move_to_the_gpu_that_the_shards_compute_on():
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        for offload in (False, True):
            model = mixed()
            with pytest.warns(UserWarning, match="replicated"):
                fsdp2_wrap(model, cpu_offload=offload)
            assert {p.device.type for name, p in model.named_parameters() if "gate" in name} == {"cuda"}
            assert model(torch.ones(2, 8, device="cuda", dtype=torch.bfloat16)).device.type == "cuda"
    finally:
        dist.destroy_process_group()
