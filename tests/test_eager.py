"""How a sharded model runs without a compiler: which collectives, what memory stays, what is refused."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from training import compiled

import fxshard
from fxshard import comm
from fxshard.unit import units_of


class Net(nn.Module):
    """Three units: two blocks in a list, and the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.out = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts calls of collectives: all-gathers and reduce-scatters of buckets, and messages between ranks."""
    counts: Counter[str] = Counter()
    saved = comm.start_all_gather, comm.start_reduce_scatter, dist.all_reduce

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return run

    comm.start_all_gather = counting("gather", saved[0])
    comm.start_reduce_scatter = counting("reduce", saved[1])
    dist.all_reduce = counting("message", saved[2])
    try:
        yield counts
    finally:
        comm.start_all_gather, comm.start_reduce_scatter, dist.all_reduce = saved


def step(model: nn.Module) -> None:
    model(torch.ones(2, 6)).sum().backward()


def sharded(**options: Any) -> Any:
    torch.manual_seed(0)
    return fxshard.shard(Net(), **options)


# -- collectives -----------------------------------------------------------------------------------------------------


def count_of_second_step(prepare: str) -> Counter[str]:
    model = sharded(reshard_after_forward=prepare != "keep")
    if prepare == "frozen":
        model.blocks.requires_grad_(False)
        model.blocks[0].requires_grad_(True)
    if prepare == "unsynchronised":
        model.set_requires_gradient_sync(False)
    step(model)
    with counted() as counts:
        step(model)
    return counts


@pytest.mark.parametrize(
    "prepare, gathers, reductions",
    # The first block needs no weight of its own in backward, since its input needs no gradient.
    [("as it is", 5, 3), ("keep", 3, 3), ("frozen", 5, 2), ("unsynchronised", 5, 0)],
)
def test_a_step_has_one_gather_a_pass_and_one_reduction_a_unit(
    ranks2: RankPool, prepare: str, gathers: int, reductions: int
) -> None:
    for counts in ranks2.run(count_of_second_step, prepare):
        # One message between ranks at the end of forward, and one at the end of backward.
        assert counts == Counter(gather=gathers, reduce=reductions, message=2) - Counter()


def counts_of_synchronisation() -> list[int]:
    model = sharded()
    reductions = []
    for synchronise in (False, False, True, True):
        model.set_requires_gradient_sync(synchronise)
        with counted() as counts:
            step(model)
        reductions.append(counts["reduce"])
    return reductions


def test_what_was_accumulated_is_reduced_once(ranks2: RankPool) -> None:
    for reductions in ranks2.run(counts_of_synchronisation):
        assert reductions == [0, 0, 3, 3]


def delayed_replicas() -> tuple[list[bool], Tensor, Tensor]:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model, at_once = sharded(mesh=mesh), sharded(mesh=mesh)
    has_grad = []
    for last in (False, True):
        model.set_requires_all_reduce(last)
        model(torch.full((2, 6), float(dist.get_rank()))).sum().backward()
        at_once(torch.full((2, 6), float(dist.get_rank()))).sum().backward()
        has_grad.append(model.out.weight.grad is not None)
    return has_grad, model.out.weight.grad.full_tensor(), at_once.out.weight.grad.full_tensor()


@pytest.mark.slow  # tests/communication/test_accumulation.py has it by default
def test_the_all_reduce_over_replicas_can_wait(ranks4: RankPool) -> None:
    for has_grad, delayed, at_once in ranks4.run(delayed_replicas):
        assert has_grad == [False, True]
        torch.testing.assert_close(delayed, at_once)


def trained_apart(steps: int) -> list[Tensor | None]:
    """Rank 0 uses the first block only, rank 1 the second; the third unit is used by both."""

    class Apart(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.blocks[dist.get_rank()](x))

    torch.manual_seed(0)
    model = fxshard.shard(Apart())
    for _ in range(steps):
        model.zero_grad()
        step(model)
    return [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]


def test_ranks_that_use_different_units_get_the_average_with_zeros(ranks2: RankPool) -> None:
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        step(nn.Sequential(block, model.out))
    expected = [p.grad / 2 for p in model.parameters()]  # type: ignore[operator]
    for steps in (1, 3):  # with the order of registration, and with the one that was agreed on
        for grads in ranks2.run(trained_apart, steps):
            for grad, wanted in zip(grads, expected, strict=True):
                torch.testing.assert_close(grad, wanted)


# -- memory ----------------------------------------------------------------------------------------------------------


def leftovers() -> tuple[int, int, int]:
    model = sharded()
    step(model)
    units = units_of(model)
    scope = units[0].scope
    late = len(scope.in_flight.take()) + len(scope._segments)
    return len(scope.windows), late, sum(len(b.unreduced.ids) for u in units for b in u.buckets)


def test_nothing_gathered_or_unreduced_stays_after_a_step(ranks2: RankPool) -> None:
    assert ranks2.run(leftovers) == [(0, 0, 0)] * 2


class Stumble(torch.autograd.Function):
    """Raises in backward if told so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, told: list[bool]) -> Tensor:
        ctx.told = told
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.told[0]:
            raise ValueError("stumbled")
        return grad, None


def after_a_stumble(form: str, shape: Sequence[int]) -> list[Tensor]:
    """Gradients of a step after one whose backward raised half way on every rank."""
    torch.manual_seed(0)
    first, second = (fxshard.fully_shard(nn.Linear(6, 6), mesh=init_device_mesh("cpu", shape)) for _ in range(2))
    run_first, run_second = compiled(first, form), compiled(second, form)
    told = [True]
    for fails in (True, False):
        told[0] = fails
        out = run_second(Stumble.apply(run_first(torch.ones(2, 6)), told))
        try:
            out.square().sum().backward()
        except ValueError:
            for module in (first, second):
                module.zero_grad()
    return [p.grad.full_tensor() for module in (first, second) for p in module.parameters()]


@pytest.mark.parametrize("form", ["eager", "fx"])
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_a_backward_that_raised_leaves_nothing_to_the_next_step(
    ranks4: RankPool, form: str, shape: Sequence[int]
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    plain(torch.ones(2, 6)).square().sum().backward()
    for grads in ranks4.run(after_a_stumble, form, shape):
        for got, p in zip(grads, plain.parameters(), strict=True):
            torch.testing.assert_close(got, p.grad)


def unsharded_for_a_while() -> tuple[list[bool], bool]:
    model = fxshard.fully_shard(nn.Linear(6, 5))
    kinds = [isinstance(model.weight, fxshard.LayoutTensor)]
    model.unshard()
    kinds.append(isinstance(model.weight, fxshard.LayoutTensor))
    with torch.no_grad():
        model._parameters["weight"].add_(1)  # what is held follows the values
    equal = torch.equal(model.weight, model._parameters["weight"].full_tensor())
    model.reshard()
    kinds.append(isinstance(model.weight, fxshard.LayoutTensor))
    return kinds, equal


def test_unshard_keeps_parameters_full_until_reshard(ranks2: RankPool) -> None:
    assert ranks2.run(unsharded_for_a_while) == [([True, False, True], True)] * 2


# -- what users put on a model stays ---------------------------------------------------------------------------------


def test_attributes_hooks_and_gradients_of_parameters_stay() -> None:
    model = nn.Linear(6, 5)
    model.weight.no_decay = True  # type: ignore[assignment]
    model.weight.grad = torch.ones(5, 6)
    calls: list[Tensor] = []
    model.weight.register_hook(calls.append)
    fxshard.shard(model)
    assert model.weight.no_decay and torch.equal(model.weight.grad.full_tensor(), torch.ones(5, 6))  # type: ignore[operator,union-attr]
    step(model)
    assert len(calls) == 1


def gradient_of_a_copied_model() -> Tensor:
    model = sharded()
    model.set_reduce_op_type("sum")
    twin = copy.deepcopy(model)
    step(twin)
    return twin.out.bias.grad.full_tensor()


def test_a_copied_model_sums_gradients_as_the_original_does(ranks2: RankPool) -> None:
    for gradient in ranks2.run(gradient_of_a_copied_model):
        assert torch.equal(gradient, torch.full((5,), 4.0))  # two ranks with two samples


def test_the_signature_of_forward_stays() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 5)

        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
            return self.inner(input_ids)

    model = fxshard.shard(Named())
    assert list(inspect.signature(model.forward).parameters) == ["input_ids", "labels"]
    assert list(inspect.signature(type(model).forward).parameters) == ["self", "input_ids", "labels"]


def test_vmap_over_a_sharded_model() -> None:
    model = sharded()
    x = torch.randn(4, 6)
    torch.testing.assert_close(torch.vmap(model)(x), model(x))


# -- what is refused -------------------------------------------------------------------------------------------------


def test_an_optimizer_from_before_sharding_is_refused_by_name() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    fxshard.shard(model)
    with pytest.raises(RuntimeError, match=r"blocks.0.0.weight|0.weight.*Build the optimizer.*after"):
        optimizer.zero_grad()


def written_in_forward() -> str:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes, self.out = nn.Parameter(torch.zeros(4, 3), requires_grad=False), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.codes.add_(1)
            return self.out(x)

    with pytest.raises(RuntimeError) as caught:
        fxshard.shard(Writing())(torch.ones(2, 6))
    return str(caught.value)


def test_a_write_to_a_full_parameter_is_refused_since_it_would_be_lost(ranks2: RankPool) -> None:
    for said in ranks2.run(written_in_forward):
        assert "'codes'" in said and "Keep such state in a buffer" in said


@pytest.mark.parametrize("value", [None, nn.Parameter(torch.zeros(6, 6))], ids=["None", "plain"])
def test_a_parameter_replaced_by_something_unsharded_is_refused(value: Any) -> None:
    model = sharded()
    model.blocks[0][0].weight = value
    with pytest.raises(RuntimeError, match=r"'blocks.0.0.weight' .* was replaced by .*param.copy_"):
        model(torch.ones(2, 6))


def test_functional_call_with_other_values_is_refused() -> None:
    model = sharded()
    values = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="was replaced by a Tensor"):
        torch.func.functional_call(model, values, (torch.ones(2, 6),))


def test_flags_are_bools() -> None:
    model = sharded()
    for set_flag in (model.set_requires_gradient_sync, model.set_requires_all_reduce, model.set_reshard_after_forward):
        with pytest.raises(ValueError, match="should be a bool, got int"):
            set_flag(1)


def test_a_forward_method_must_exist() -> None:
    with pytest.raises(ValueError, match="Net has no method 'encode'"):
        fxshard.register_forward_method(sharded(), "encode")


class Shuffled(nn.Module):
    """Uses its units in another order than they are registered in, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.third(self.second(self.first(x.tanh()).tanh()).tanh()))


def count_of_third_step() -> Counter[str]:
    model: Any = Shuffled()
    for unit in (model.first, model.second, model.third, model):
        fxshard.fully_shard(unit, reshard_after_forward=True)
    for _ in range(3):
        with counted() as counts:
            model(torch.ones(2, 4)).sum().backward()
    return counts


def test_an_order_of_use_is_learned_and_nothing_is_done_twice(ranks2: RankPool) -> None:
    for counts in ranks2.run(count_of_third_step):
        assert counts == {"gather": 7, "reduce": 4, "message": 2}  # backward does not read the first weight


class Deep(nn.Module):
    """``reentrant``: of the checkpoints in which each layer runs, if not None."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x).tanh()
            else:
                x = checkpoint(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=self.reentrant)
        return x


def order_of_gathers(prefetch: bool, reentrant: bool | None = None) -> tuple[list[str], list[Tensor]]:
    """Launches and waits of the second step, by layer, and the gradients."""
    torch.manual_seed(0)
    model: Any = Deep(reentrant)
    for layer in model.layers:
        fxshard.fully_shard(layer, reshard_after_forward=True)
    fxshard.fully_shard(model)
    if prefetch:
        for before, after in itertools.pairwise(model.layers):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
    number = {layer._fxshard_unit.buckets[0].flat.data_ptr(): i for i, layer in enumerate(model.layers)}
    said: list[str] = []
    start, finish = comm.start_all_gather, comm.finish_all_gather

    def started(segment: Tensor, ranks: int, group: str) -> Tensor:
        said.append(f"launch {number[segment.data_ptr()]}")
        return start(segment, ranks, group)

    def finished(sent: Tensor, segment: Tensor) -> Tensor:
        said.append(f"wait {number[segment.data_ptr()]}")
        return finish(sent, segment)

    comm.start_all_gather, comm.finish_all_gather = started, finished
    try:
        for _ in range(2):
            said.clear()
            model.zero_grad()
            model(torch.ones(2, 4, requires_grad=reentrant is not None)).sum().backward()
    finally:
        comm.start_all_gather, comm.finish_all_gather = start, finish
    return said, [p.grad.full_tensor() for p in model.parameters()]


def test_units_that_are_named_are_gathered_ahead(ranks2: RankPool) -> None:
    plain = ranks2.run(order_of_gathers, False)[0]
    for said, grads in ranks2.run(order_of_gathers, True):
        # The first layer's input needs no gradient, so backward does not read its weight but for being named.
        assert ", ".join(plain[0]) == (
            "launch 0, wait 0, launch 1, wait 1, launch 2, wait 2, launch 2, wait 2, launch 1, wait 1"
        )
        forward = "launch 0, wait 0, launch 1, wait 1, launch 2, wait 2"
        backward = "launch 2, launch 1, wait 2, launch 0, wait 1, wait 0"
        assert said == f"{forward}, {backward}".split(", ")
        assert all(torch.equal(a, b) for a, b in zip(grads, plain[1], strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_gathers_once_and_nothing_ahead(ranks2: RankPool, reentrant: bool) -> None:
    plain = ranks2.run(order_of_gathers, False)[0]
    for said, grads in ranks2.run(order_of_gathers, True, reentrant):
        forward = ["launch 0", "wait 0", "launch 1", "wait 1", "launch 2", "wait 2"]
        assert sorted(said[:6]) == sorted(forward)
        assert said[6:] == ["launch 2", "wait 2", "launch 1", "wait 1", "launch 0", "wait 0"]
        assert all(torch.equal(a, b) for a, b in zip(grads, plain[1], strict=True))


def held_twice() -> Counter[str]:
    model: Any = fxshard.fully_shard(nn.Linear(4, 4))
    for _ in range(2):
        with counted() as counts:  # once the order is learned
            model.unshard()
            model.unshard()
            model(torch.ones(2, 4))
        model.reshard()
    return counts


def test_what_is_unsharded_already_is_not_gathered_again(ranks2: RankPool) -> None:
    for counts in ranks2.run(held_twice):
        assert counts["gather"] == 1


@pytest.mark.parametrize("modules", [(nn.Linear(1, 1),), [nn.Linear(1, 1)], None], ids=("tuple", "unsharded", "none"))
def test_only_units_can_be_gathered_ahead(modules: Any) -> None:
    layer: Any = fxshard.fully_shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="modules to prefetch"):
        layer.set_modules_to_forward_prefetch(modules)
