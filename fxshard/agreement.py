"""Agreement of ranks on the order of eager collectives, also where they run different code.

A collective needs every rank of its group. Compiled graphs have theirs in an order fixed at compile time; eager code
takes branches: an expert that gets tokens on some ranks only, an encoder that is skipped. So every rank follows a list
of the collectives that a forward, or a backward, is expected to have: at first the order of registration, later what
all ranks did last time.

* What a rank wants and finds further down the list, it does after *joining* all that stands before it: taking part
  with its shard, or with zero gradients, and dropping what comes back.
* For what is not on the list it joins the rest of the list and then asks: a *round* is one small all-reduce in which
  every rank says what it wants next, the lowest number wins, and all take part in that.
* A compiled graph inside eager code announces its collectives before it runs, in one piece, since it cannot stop in
  between. Where they are not next on the list, the round says whose they are, and that rank sends them.
* At the end of a forward or backward each rank joins the rest of the list and takes part in rounds until nobody wants
  more. What somebody wanted becomes the list of the next time.

So ranks that run the same code pay for one round a forward and one a backward. That last round also carries which
parameters got a gradient on any rank, so that ``.grad`` is None on all ranks or on none.

Where all of a forward is compiled nobody waits: each backward *posts* such a message and reads the answer at the next
one. It says whether another rank ran eager code, and, by a checksum, whether it ran graphs with other collectives: of
equal sizes those would have been taken for each other, and the gradients be wrong.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fxshard import _torch
from fxshard.mesh import share_timeout

if TYPE_CHECKING:
    from fxshard.bucket import ParamBucket


class Kind(IntEnum):
    """What a rank can want of a bucket: full parameters in forward; again in backward, from the shards or from the
    parts that some ranks kept; or its gradients reduced."""

    GATHER = 0
    REGATHER = 1
    GATHER_PARTS = 2
    REDUCE = 3


@dataclass(frozen=True)
class Ticket:
    """One collective: ``kind`` for the bucket with number ``bucket`` in its scope."""

    kind: Kind
    bucket: int


@dataclass
class Phase:
    """A forward or a backward on its way: the expected list, how far it is, and what was done and wanted."""

    expected: list[Ticket]
    at: int = 0
    done: list[Ticket] = field(default_factory=list)
    wanted: Counter[Ticket] = field(default_factory=Counter)


@dataclass
class Ran:
    """The collectives of compiled graphs that ran since the last message, by number: a checksum, and the latest."""

    checksum: int = 0
    latest: deque[int] = field(default_factory=lambda: deque(maxlen=40))

    def add(self, codes: Sequence[int]) -> None:
        self.checksum = zlib.crc32(repr(codes).encode(), self.checksum)
        self.latest.extend(codes)


class Agreement:
    """The collectives of one scope of units over one mesh.

    Args:
        buckets: all buckets of the scope over this mesh, in the same order on every rank.
        mesh: where they live.
        join: take part in a collective that another rank wants.
        settle: launch what others may wait for before they answer; called before this rank stops for them.
    """

    def __init__(
        self,
        buckets: Sequence[ParamBucket],
        mesh: DeviceMesh,
        join: Callable[[Kind, ParamBucket], None],
        settle: Callable[[], None],
    ) -> None:
        self.buckets = list(buckets)
        self.number = {b: i for i, b in enumerate(self.buckets)}
        self.mesh = mesh
        self.eager = False  # whether a forward ever ran eagerly: else all collectives are in whole compiled graphs
        self._join, self._settle = join, settle
        self._first_param: list[int] = [0]
        for b in self.buckets:
            self._first_param.append(self._first_param[-1] + len(b.slots))
        self._graded: set[int] = set()  # numbers of parameters that this rank's backward gave a gradient
        self._ran = Ran()
        self._posted: tuple[dist.Work, Tensor, Ran] | None = None

    @property
    def _end(self) -> int:
        return len(Kind) * len(self.buckets)

    # -- during a forward or backward ---------------------------------------------------------------------------------

    def want(self, phase: Phase, wanted: Sequence[tuple[Kind, ParamBucket]]) -> None:
        """Return when it is this rank's turn to take part in collectives that it wants, one after another.

        Collective, like all here.
        """
        tickets = [Ticket(kind, self.number[bucket]) for kind, bucket in wanted]
        phase.wanted.update(tickets)
        stop = _place_of(tickets, phase.expected, phase.at)
        self._join_until(phase, len(phase.expected) if stop is None else stop)
        if stop is None:
            code = self._code(tickets[0]) if len(tickets) == 1 else -1 - self._rank
            while True:
                chosen, _ = self._round(phase, code)
                chosen_tickets = self._tickets(chosen, tickets if chosen == code else None)
                if chosen_tickets == tickets:
                    break
                self._take_part(phase, chosen_tickets)
        else:
            phase.at = stop + len(tickets)
        phase.done += tickets

    def note_graded(self, bucket: ParamBucket, ids: Sequence[int]) -> None:
        """Parameters ``ids`` of the bucket got a gradient in the running backward."""
        first = self._first_param[self.number[bucket]]
        self._graded.update(first + i for i in ids)

    def note_graph(self, launched: Sequence[tuple[Kind, ParamBucket]]) -> None:
        """A compiled graph with these collectives, in order, is run by every rank, or else something is wrong."""
        self._ran.add([self._code(Ticket(kind, self.number[b])) for kind, b in launched if b in self.number])

    # -- at its end ---------------------------------------------------------------------------------------------------

    def finish(self, phase: Phase) -> list[Ticket]:
        """Take part until no rank wants more. Returns the list to expect next time. Ends with ``graded`` known."""
        self._join_until(phase, len(phase.expected))
        while True:
            chosen, said = self._round(phase, self._end)
            if chosen == self._end:
                break
            self._take_part(phase, self._tickets(chosen, None))
        self._ran = Ran()
        times = (-said[1 : 1 + self._end]).tolist()
        self._graded = set(said[1 + self._end : -2].nonzero().flatten().tolist())
        expected: list[Ticket] = []
        for ticket in reversed(phase.done):  # what was joined too early was done again when it was wanted
            if times[self._code(ticket)] > 0:
                times[self._code(ticket)] -= 1
                expected.insert(0, ticket)
        return expected

    def post(self, phase: Phase) -> None:
        """Say that this rank wants nothing and knows all it needs, without waiting for the others."""
        self._check_posted()
        message = self._message(phase, self._end, self._ran.checksum)
        work = dist.all_reduce(message, dist.ReduceOp.MIN, group=control_group(self.mesh), async_op=True)
        self._posted = (work, message, self._ran) if work is not None else None
        if work is not None and _torch.profiler_is_on():
            work.wait()  # gloo notes the end of its work in the profile, and writes to freed memory once that is over
        self._ran = Ran()
        self._graded.clear()

    def take_graded(self) -> dict[ParamBucket, set[int]]:
        """Which parameters got a gradient on any rank in the backward that was finished last."""
        graded = {
            b: {i for i in range(len(b.slots)) if first + i in self._graded}
            for b, first in zip(self.buckets, self._first_param, strict=False)
        }
        self._graded.clear()
        return graded

    # -- parts --------------------------------------------------------------------------------------------------------

    def _code(self, ticket: Ticket) -> int:
        return ticket.kind * len(self.buckets) + ticket.bucket

    def _ticket(self, code: int) -> Ticket:
        kind, bucket = divmod(code, len(self.buckets))
        return Ticket(Kind(kind), bucket)

    def _tickets(self, code: int, own: Sequence[Ticket] | None) -> Sequence[Ticket]:
        """What a number that was chosen stands for; ``own`` if it is this rank's. Collective for a list of several."""
        if code >= 0:
            return [self._ticket(code)]
        group, sender = control_group(self.mesh), -1 - code
        device = _torch.collective_device_type(group)
        codes = torch.tensor([self._code(t) for t in own or ()], dtype=torch.int64, device=device)
        count = torch.tensor([len(codes)], device=device)
        dist.broadcast(count, group=group, group_src=sender)
        codes = codes if own is not None else torch.empty(int(count), dtype=torch.int64, device=device)
        dist.broadcast(codes, group=group, group_src=sender)
        return [self._ticket(c) for c in codes.tolist()]

    @property
    def _rank(self) -> int:
        return dist.get_group_rank(control_group(self.mesh), dist.get_rank())

    def _join_until(self, phase: Phase, stop: int) -> None:
        if phase.at < stop:
            self._take_part(phase, phase.expected[phase.at : stop])
            phase.at = stop

    def _take_part(self, phase: Phase, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            phase.done.append(ticket)
            self._join(ticket.kind, self.buckets[ticket.bucket])

    def _message(self, phase: Phase, code: int, checksum: int = 0) -> Tensor:
        """[what this rank wants, -n for each collective it wanted n times, -1 for each parameter with a gradient,
        checksum of its graphs, the same negated]: so the least of the last two over all ranks shows whether they are
        equal."""
        message = torch.zeros(1 + self._end + self._first_param[-1] + 2, dtype=torch.int64)
        message[0], message[-2], message[-1] = code, checksum, -checksum
        for ticket, times in phase.wanted.items():
            message[1 + self._code(ticket)] = -times
        message[[1 + self._end + i for i in self._graded]] = -1
        return message.to(_torch.collective_device_type(control_group(self.mesh)))

    def _round(self, phase: Phase, code: int) -> tuple[int, Tensor]:
        """The lowest number that any rank wants, and everything said so far by any rank."""
        self._check_posted()
        self._settle()
        message = self._message(phase, code)
        dist.all_reduce(message, dist.ReduceOp.MIN, group=control_group(self.mesh))
        return int(message[0]), message

    def _check_posted(self) -> None:
        if self._posted is None:
            return
        work, message, ran = self._posted
        self._posted = None
        work.wait()
        if (code := int(message[0])) != self._end:
            ticket = self._ticket(code)
            raise RuntimeError(
                f"ranks went different ways: one of them wants to {ticket.kind.name.lower()} bucket "
                f"{self.buckets[ticket.bucket].name!r} in eager code, while this rank runs compiled graphs only; let "
                "every rank compile, or none"
            )
        if int(message[-2]) != -int(message[-1]):
            tickets = map(self._ticket, ran.latest)
            names = [f"{t.kind.name.lower()} {self.buckets[t.bucket].name}" for t in tickets]
            raise RuntimeError(
                "ranks ran different compiled graphs up to the last backward, so their collectives did not match, and "
                f"the gradients are wrong; rank {dist.get_rank()} ran, at last, {', '.join(names) or 'none'}. Let "
                "every rank take the same branches"
            )


def _place_of(tickets: Sequence[Ticket], expected: Sequence[Ticket], at: int) -> int | None:
    """Where ``tickets`` stand in ``expected``, one after another, at or after place ``at``."""
    n = len(tickets)
    return next((i for i in range(at, len(expected) - n + 1) if list(expected[i : i + n]) == list(tickets)), None)


def control_group(mesh: DeviceMesh) -> Any:
    """A process group over all ranks of the mesh for messages; made at the first call (collective).

    Over gloo where the mesh's own group is NCCL's, so that no message waits for the GPU.
    """
    cached = getattr(mesh, "_fxshard_control", None)
    if cached is None:
        ranks = mesh.mesh.flatten().tolist()
        dim = mesh.ndim - 1
        own = dist.get_backend(mesh.get_group(dim))
        backend = "gloo" if "nccl" in own and dist.is_gloo_available() else own
        cached = _torch.new_group(ranks, share_timeout(mesh, dim), "control", backend)
        mesh._fxshard_control = cached  # type: ignore[attr-defined]
    return cached
