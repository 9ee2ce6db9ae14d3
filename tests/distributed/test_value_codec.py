"""What can be sent to other ranks, and in how many bytes."""

import collections
import dataclasses
import datetime
import enum
import pathlib
from typing import NamedTuple

import pytest
import torch
from torch import nn

from fxshard.distributed.codec import decode, encode


@dataclasses.dataclass(frozen=True)
class Frozen:
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    number: int


class Named(NamedTuple):
    number: int


class Colour(enum.Enum):
    RED = 1


class Mapping(dict):
    pass


ACCEPTED = [
    None,
    True,
    7,
    2**200,
    1.5,
    2 + 3j,
    "text",
    b"bytes",
    bytearray(b"array"),
    [1, [2]],
    (1, (2,)),
    {"a": 1, 2: "b"},
    {1, 2},
    collections.OrderedDict(a=1),
    collections.Counter("aab"),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cpu"),
    torch.strided,
]


@pytest.mark.parametrize("value", ACCEPTED, ids=repr)
def test_plain_data_round_trips(value):
    got = decode(encode(value, "test"))
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor(True),
        torch.empty(0),
        torch.eye(3).to_sparse(),
        nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(10.0)[3:5],
        nn.Parameter(torch.arange(10.0)[3:5]),
        torch.ones(1).expand(4),
        torch.tensor([1 + 2j, 3 + 4j]).conj()[1:],
    ],
)
def test_tensors_round_trip(tensor):
    got = decode(encode(tensor, "test"))
    assert type(got) is type(tensor) and got.requires_grad == tensor.requires_grad and got.device.type == "cpu"
    torch.testing.assert_close(got, tensor)


def test_a_state_dict_round_trips_as_it_is():
    state = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).state_dict()
    got = decode(encode(state, "test"))
    assert type(got) is type(state) and list(got) == list(state)
    assert all(torch.equal(got[name], state[name]) for name in state)


REGISTRABLE = [Frozen(1), Slotted(1), Named(1), Colour.RED, Mapping(a=1), Mapping()]


@pytest.mark.parametrize(
    "value",
    [
        *REGISTRABLE,
        collections.defaultdict(int),
        pathlib.PurePosixPath("a"),
        frozenset({1}),
        range(3),
        slice(1, 2),
        datetime.timedelta(1),
        ...,
        ValueError("text"),
        nn.ReLU(),
        torch.Generator(),
        lambda: None,
        (number for number in ()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_fail_where_they_are_made_with_the_label_in_a_note(value):
    with pytest.raises(Exception) as caught:
        encode({"inside": value}, "my label")
    assert "the value of 'my label'" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("value", REGISTRABLE, ids=lambda value: type(value).__name__)
def test_classes_of_ones_own_pass_once_registered(value):
    with torch.serialization.safe_globals([type(value)]):
        got = decode(encode([value], "test"))
    assert got == [value] and type(got[0]) is type(value)


def test_a_registered_dict_subclass_keeps_its_attributes_and_sends_views_small():
    value = Mapping(view=torch.zeros(1_000_000)[:2])
    value.extra = 3
    with torch.serialization.safe_globals([Mapping]):
        data = encode(value, "test")
        assert len(data) < 4000 and decode(data).extra == 3


def test_a_slice_of_a_large_tensor_is_sent_in_a_small_size():
    large = torch.zeros(1_000_000)
    small = len(encode(torch.zeros(2), "test"))
    for value in (large[:2], {"a": [large[5:7]]}, (nn.Parameter(large[:2]),), {large[:2]}):
        assert len(encode(value, "test")) < small + 1000


def test_a_view_inside_an_object_of_ones_own_is_sent_in_a_small_size():
    value = Frozen(torch.zeros(1_000_000)[:2])
    with torch.serialization.safe_globals([Frozen]):
        assert len(encode(value, "test")) < 4000


def test_tensors_that_cover_their_storage_keep_sharing_it():
    whole = torch.zeros(2, 3)
    first, second, flat = decode(encode([whole, whole, whole.view(6)], "test"))
    flat[0] = 5
    assert first is second and first[0, 0] == 5


def test_one_view_object_sent_twice_stays_one_object():
    view = torch.zeros(10)[:2]
    first, second = decode(encode({"a": view, "b": [view]}, "test")).values()
    assert first is second[0]


def test_a_container_that_holds_itself_round_trips():
    value = [torch.zeros(10)[:2]]
    value.append(value)
    got = decode(encode(value, "test"))
    assert got[1] is got and torch.equal(got[0], torch.zeros(2))


def test_encoding_leaves_the_value_alone():
    base = torch.arange(4.0)
    view = base[:2]
    encode([view], "test")
    view[0] = 9
    assert base[0] == 9
