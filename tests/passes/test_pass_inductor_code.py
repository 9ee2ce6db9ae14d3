"""What Inductor's code for six blocks does: one collective a unit, launched ahead, and no copies around it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from models import GPT2, tokens
from ranks import fake_world, reset_dynamo
from torch import nn

import fxshard

BLOCKS = 6
UNITS = BLOCKS + 2  # embeddings; blocks; norm and head
LINEARS = 4  # in a block
KERNEL = re.compile(r"\b(cpp_fused\w*|extern_kernels\.\w+|torch\.ops\.aten\.\w+\.\w+)\(")


@dataclass(frozen=True)
class Code:
    """The body of generated code, one call a line."""

    lines: tuple[str, ...]

    @staticmethod
    def read(folder: Path, kind: str) -> Code:
        (file,) = folder.glob(f"graph0/*-{kind}-code.py")
        body = file.read_text().split("def call(self, args):")[1].split("runner = Runner")[0]
        return Code(tuple(line.strip() for line in body.splitlines() if not line.strip().startswith("#")))

    def launches(self, op: str) -> list[tuple[int, str, str]]:
        """(line, output, input) of each launch."""
        call = re.compile(rf"(\w+) = torch\.ops\._c10d_functional\.{op}\.default\((\w+), ")
        return [(i, *m.groups()) for i, line in enumerate(self.lines) if (m := call.match(line))]  # type: ignore[misc]

    def kernels(self, reads: str) -> list[tuple[int, str]]:
        """(line, text) of each kernel call with ``reads`` among its arguments."""
        name = re.compile(rf"\b{reads}\b")
        calls = ((i, line) for i, line in enumerate(self.lines) if KERNEL.search(line))
        return [(i, line) for i, line in calls if name.search(line[line.index("(") :])]

    def line_of(self, start: str) -> int:
        return next(i for i, line in enumerate(self.lines) if line.startswith(start))


def generate(folder: Path, blocks: int, reshard: bool, pack: str = "in place") -> tuple[Code, Code]:
    """The forward and backward code of a model on two ranks whose collectives move nothing."""
    with fake_world(2), pytest.MonkeyPatch.context() as patch:
        patch.setenv("FXSHARD_DUMP", str(folder))
        torch.manual_seed(0)
        model = fxshard.shard(GPT2(width=32, blocks=blocks), reshard_after_forward=reshard)
        options = {"check_order": "error", "pack": pack}
        step = torch.compile(model, backend="fxshard", fullgraph=True, options=options)
        step(tokens(2, 8)).sum().backward()
    reset_dynamo()
    return Code.read(folder, "forward"), Code.read(folder, "backward")


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Code, Code]]:
    yield generate(tmp_path_factory.mktemp("reshard"), BLOCKS, reshard=True)


@pytest.fixture
def forward(code: tuple[Code, Code]) -> Code:
    return code[0]


@pytest.fixture
def backward(code: tuple[Code, Code]) -> Code:
    return code[1]


def test_forward_gathers_each_unit_once_and_reduces_nothing(forward: Code) -> None:
    assert len(forward.launches("all_gather_into_tensor")) == UNITS
    assert not forward.launches("reduce_scatter_tensor")


def test_backward_gathers_each_unit_that_it_reads_once_more_and_reduces_each_once(backward: Code) -> None:
    assert len(backward.launches("all_gather_into_tensor")) == UNITS - 1  # embeddings are not read
    assert len(backward.launches("reduce_scatter_tensor")) == UNITS


def test_backward_gathers_nothing_when_parameters_are_kept(tmp_path: Path) -> None:
    forward, backward = generate(tmp_path, 2, reshard=False)
    assert len(forward.launches("all_gather_into_tensor")) == 4
    assert not backward.launches("all_gather_into_tensor")
    assert len(backward.launches("reduce_scatter_tensor")) == 4


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_there_are_no_other_collectives_and_each_is_waited_for_once(code: tuple[Code, Code], kind: str) -> None:
    graph = code[kind == "backward"]
    calls = [line for line in graph.lines if "_c10d_functional" in line and ".default(" in line]
    started = [graph.launches(op) for op in ("all_gather_into_tensor", "reduce_scatter_tensor")]
    waits = [line for line in calls if line.startswith("torch.ops._c10d_functional.wait_tensor.default(")]
    asserts = [line for line in calls if line.startswith("assert_")]
    outputs = [output for launches in started for _, output, _ in launches]
    assert sorted(waits) == sorted(f"torch.ops._c10d_functional.wait_tensor.default({name})" for name in outputs)
    assert len(calls) == len(outputs) + len(waits) + len(asserts)


def test_forward_launches_each_unit_before_anything_is_computed_with_the_one_before(forward: Code) -> None:
    launches = forward.launches("all_gather_into_tensor")
    for (_, before, _), (line, _, _) in itertools.pairwise(launches):
        wait = forward.line_of(f"torch.ops._c10d_functional.wait_tensor.default({before})")
        first, text = forward.kernels(before)[0]
        assert wait < line < first, f"{forward.lines[line]} stands behind {text}"


def test_backward_launches_each_unit_before_the_matmuls_of_the_one_before(backward: Code) -> None:
    launches = backward.launches("all_gather_into_tensor")
    for (_, before, _), (line, _, _) in itertools.pairwise(launches):
        first = next(i for i, text in backward.kernels(before) if "extern_kernels" in text)
        assert line < first


def test_backward_waits_for_a_reduction_behind_the_matmuls_of_the_next_block(backward: Code) -> None:
    launches = backward.launches("reduce_scatter_tensor")[:BLOCKS]  # the next one is a block
    for line, output, _ in launches:
        wait = backward.line_of(f"torch.ops._c10d_functional.wait_tensor.default({output})")
        between = backward.lines[line:wait]
        assert sum("extern_kernels.mm(" in text for text in between) == 2 * LINEARS


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_the_flat_shard_is_what_is_sent_and_nothing_else_reads_it(code: tuple[Code, Code], kind: str) -> None:
    graph = code[kind == "backward"]
    inputs = graph.lines[1].partition(" = args")[0].split(", ")
    for _, _, flat in graph.launches("all_gather_into_tensor"):
        assert flat in inputs and not graph.kernels(flat)


def reads_of_weights(graph: Code, matmul: str) -> list[int]:
    """For each gathered buffer, how many matmuls read a weight where it lies in it; @ is such an operand."""
    found = []
    for _, name, _ in graph.launches("all_gather_into_tensor"):
        call = re.compile(matmul.replace("@", rf"reinterpret_tensor\({name}, \([\d, ]+\), \([\d, ]+\), \d+\)"))
        found.append(sum(bool(call.search(line)) for line in graph.lines))
    return found


def test_forward_matmuls_read_weights_and_biases_where_they_lie_in_the_gathered_buffer(forward: Code) -> None:
    assert reads_of_weights(forward, r"extern_kernels\.addmm\(@, .*, @, alpha") == [0, *[LINEARS] * BLOCKS, 0]
    assert reads_of_weights(forward, r"extern_kernels\.mm\(.*, @, out") == [0] * (UNITS - 1) + [1]
    assert sum("extern_kernels." in line for line in forward.lines) == LINEARS * BLOCKS + 1


def test_backward_matmuls_read_weights_where_they_lie_in_the_gathered_buffer(backward: Code) -> None:
    assert reads_of_weights(backward, r"extern_kernels\.mm\(.*, @, out") == [1, *[LINEARS] * BLOCKS]


def test_no_kernel_copies_parameters_out_of_a_gathered_buffer(forward: Code) -> None:
    """Each kernel that reads one has other inputs too: it computes."""
    for _, name, _ in forward.launches("all_gather_into_tensor"):
        for _, line in forward.kernels(name):
            operands = set(re.findall(r"\b(?:buf|primals_)\d+", line[line.index("(") :]))
            assert len(operands) > 2, line


def test_each_reduction_sends_a_buffer_of_its_own(backward: Code) -> None:
    sent = [buffer for _, _, buffer in backward.launches("reduce_scatter_tensor")]
    assert len(set(sent)) == UNITS


def matmuls_into_what_is_sent(backward: Code) -> list[int]:
    """For each reduce-scatter, how many matmuls before it have a part of its input as their output."""
    found = []
    for end, _, sent in backward.launches("reduce_scatter_tensor"):
        before = backward.lines[:end]
        parts = {line.partition(" = ")[0] for line in before if f" = reinterpret_tensor({sent}, " in line}
        outs = {out for line in before for out in re.findall(r"extern_kernels\.mm\(.*, out=(\w+)\)", line)}
        found.append(len(parts & outs))
    return found


def test_weight_gradients_are_computed_where_they_are_sent_from(backward: Code) -> None:
    assert matmuls_into_what_is_sent(backward) == [1, *[LINEARS] * BLOCKS, 0]  # head; embeddings
    matmuls = sum("extern_kernels.mm(" in line for line in backward.lines)
    assert matmuls == 2 * (LINEARS * BLOCKS + 1)  # one for the weight, one for the input


def test_asked_to_copy_it_computes_gradients_elsewhere_and_says_what_that_copies(tmp_path: Path) -> None:
    said = {}
    for pack in ("in place", "copy"):
        _, backward = generate(tmp_path / pack, 2, reshard=True, pack=pack)
        (file,) = (tmp_path / pack).glob("graph0/*-backward-schedule.txt")
        said[pack] = file.read_text().splitlines()[-1]
    assert matmuls_into_what_is_sent(backward) == [0] * 4
    weights = 4 * (2 * 32 * (3 * 32 + 32 + 4 * 32 + 4 * 32) + 61 * 32)
    assert said["in place"].startswith("0 bytes copied around all-gathers, 0 around reductions; 0 cast; ")
    assert said["copy"].startswith(f"0 bytes copied around all-gathers, {weights} around reductions; 0 cast; ")


def test_gradients_of_complex_parameters_are_copied_to_where_they_are_sent_from() -> None:
    with fake_world(2):
        model = nn.Module()
        model.weight = nn.Parameter(torch.ones(6, 5, dtype=torch.complex64))
        model.bias = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        model.forward = lambda x: torch.view_as_real((x * model.weight).sum(0)[:3] + model.bias)  # type: ignore[method-assign, assignment]
        fxshard.fully_shard(model)
        torch.compile(model, backend="fxshard", options={"check_order": "error"})(torch.ones(6, 1)).sum().backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.complex64}  # type: ignore[union-attr]
