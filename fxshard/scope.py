"""Scope: the forwards and backwards of one tree of units, as eager code runs them.

``depth`` decides what reading a parameter means: sharded at 0, full above. Compiled code guards on it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxshard import _torch, comm
from fxshard.agreement import Agreement, Kind, Phase, Ticket
from fxshard.ahead import Ahead
from fxshard.bucket import ParamBucket
from fxshard.in_flight import InFlight
from fxshard.kept_parts import KeptParts
from fxshard.mesh import ranks_of
from fxshard.unreduced import dense
from fxshard.unshard import SavedParam, Window

if TYPE_CHECKING:
    from fxshard.graph_calls import Launched
    from fxshard.unit import Unit

_BACKWARD = "backward"


class Scope:
    """What the units of one tree share. ``units`` are listed outermost first, in the same order on every rank."""

    def __init__(self, units: Sequence[Unit] = ()) -> None:
        self.depth = 0
        self.units = list(units)
        self.windows: dict[ParamBucket, Window] = {}
        self.held: dict[ParamBucket, Window] = {}  # by ``unshard()``, until ``reshard()``
        self.ahead = Ahead()
        self.parts = KeptParts()
        self.in_flight = InFlight()
        self._segments: list[tuple[ParamBucket, Tensor, set[int]]] = []  # reduced, to be handed out when backward ends
        self.records = False  # whether the outermost forward, now or last, was to have a backward
        self._regathered: list[Window] = []
        self._running: list[nn.Module] = []  # whose forward is on its way, outermost first
        self._backward = _torch.NO_BACKWARD  # the backward whose end is awaited
        self._agreements: list[Agreement] | None = None
        self._phases: dict[bool, dict[Agreement, Phase]] = {False: {}, True: {}}  # of the forward, of the backward
        self._learned: dict[tuple[Any, Any], dict[Agreement, list[Ticket]]] = {}
        self._piece = 0
        self._piece_key: tuple[Any, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Scope:
        twin = Scope()
        memo[id(self)] = twin
        twin.units = copy.deepcopy(self.units, memo)
        return twin

    # -- reading ------------------------------------------------------------------------------------------------------

    def reads_full(self, bucket: ParamBucket) -> bool:
        """Whether reading a parameter in eager code now gives the full one."""
        return self.depth > 0 or bucket in self.held or _torch.current_backward() != _torch.NO_BACKWARD

    @_torch.outside_dynamo
    def read(self, bucket: ParamBucket, index: int) -> Tensor:
        """The full parameter ``index`` of the bucket; collective unless its window is open."""
        window = self.windows.get(bucket)
        if window is None or not window.serves:
            if window is not None:
                self._close(window)
            window = self._held(bucket) if bucket in self.held else self._open(bucket)
            if self.depth > 0 or bucket not in self.held:
                self.windows[bucket] = window
        return window.params[index]

    def _held(self, bucket: ParamBucket) -> Window:
        if not self.held[bucket].serves:
            self.held[bucket] = self._open(bucket)
        return self.held[bucket]

    def _open(self, bucket: ParamBucket) -> Window:
        self.await_backward()
        if bucket.groups.gather is not None and bucket not in self.ahead:
            self._launch(bucket)
        window = Window(bucket)
        window.open()
        if self.depth > 0 and _torch.current_backward() == _torch.NO_BACKWARD:  # recomputation does not prefetch
            self._launch_ahead(bucket.unit.forward_prefetch)
        return window

    def _launch_ahead(self, units: Iterable[Unit]) -> None:
        for bucket in (b for unit in units for b in unit.buckets):
            here = bucket in self.ahead or bucket in self.windows or bucket in self.held
            if bucket.groups.gather is not None and not here:
                self._launch(bucket)

    def _launch(self, bucket: ParamBucket) -> None:
        """Start an all-gather when it is this rank's turn: in backward from what some ranks share, if this one kept its
        part of that."""
        in_backward = _torch.current_backward() != _torch.NO_BACKWARD
        part = self.parts.current(bucket) if in_backward and bucket.kept_part is not None else None
        self._want([(self._gather_kind() if part is None else Kind.GATHER_PARTS, bucket)])
        self.ahead.launch(bucket, part)

    @_torch.outside_dynamo
    def hold(self, buckets: Iterable[ParamBucket]) -> None:
        """Gather buckets and keep them, also outside forwards; collective."""
        for bucket in buckets:
            if bucket not in self.held or not self.held[bucket].serves:
                self.held[bucket] = self._open(bucket)

    def release(self, buckets: Iterable[ParamBucket]) -> None:
        for bucket in buckets:
            window = self.held.pop(bucket, None)
            if window is not None and self.windows.get(bucket) is not window:
                window.close()

    def reset(self) -> None:
        """Forget what a forward or backward that raised left behind."""
        self.windows.clear()
        self.parts = KeptParts()
        self._forget_backward()
        self._running.clear()
        self.depth = 0
        self._phases[False].clear()

    def _forget_backward(self) -> None:
        """Drop what is left of a backward: gathered buffers and, if it raised, what it was about to reduce."""
        self.in_flight.drop()
        self._segments.clear()
        for window in self._regathered:
            window.regathered = None
        self._regathered.clear()
        self._phases[True].clear()
        self._backward = _torch.NO_BACKWARD

    # -- forward ------------------------------------------------------------------------------------------------------

    @contextmanager
    def entered(self, module: nn.Module) -> Iterator[None]:
        """One forward of ``module``, run eagerly."""
        if module in self._running:  # a forward that was replaced and calls the original one
            yield
            return
        outermost = self.depth == 0
        in_backward = _torch.current_backward() != _torch.NO_BACKWARD
        if outermost and not in_backward:
            self.await_backward()
            self._piece = 0
            self.parts.drop_stale()
            self.records = torch.is_grad_enabled()
            self._begin((id(module), torch.is_grad_enabled()), module)
        self.depth += 1
        self._running.append(module)
        try:
            # Hooks do not compose: inside somebody else's (activation checkpointing, offload) theirs must see all.
            if outermost and not _torch.saved_tensor_hooks_active():
                with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                    yield
            else:
                yield
            self._leave(module, outermost)
            if outermost and not in_backward:
                self._end_forward((id(module), torch.is_grad_enabled()))
        finally:
            self._running.pop()
            self.depth -= 1
            if outermost:
                self._close_all()
                self.ahead.drop()
                if not in_backward:
                    self._phases[False].clear()

    def _leave(self, module: nn.Module, outermost: bool) -> None:
        """Close the windows that end with a module's forward."""
        unit: Unit | None = getattr(module, "_fxshard_unit", None)
        ended = unit is not None and unit.ran(module) and unit.reshard_after_forward
        for bucket in list(self.windows) if outermost else unit.buckets if ended and unit is not None else ():
            window = self.windows.pop(bucket, None)
            if window is not None:
                window.check_unwritten()
                self._close(window)

    @_torch.outside_dynamo
    def _close(self, window: Window) -> None:
        if self.held.get(window.bucket) is not window:
            window.close()

    def _close_all(self) -> None:
        for window in self.windows.values():
            self._close(window)
        self.windows.clear()

    @_torch.outside_dynamo
    def _pack(self, saved: Tensor) -> Tensor | SavedParam:
        if not self.windows or saved.layout is not torch.strided or type(saved) not in (Tensor, nn.Parameter):
            return saved
        address = saved.untyped_storage().data_ptr()
        window = next((w for w in self.windows.values() if w.storage == address), None)
        if window is None or not window.regathers or saved.dtype != window.bucket.dtypes.gather or saved.is_neg():
            return saved
        window.saved = True
        return SavedParam(window, saved.size(), saved.stride(), int(saved.storage_offset()), saved.is_conj())

    # -- backward -----------------------------------------------------------------------------------------------------

    @_torch.outside_dynamo
    def await_backward(self) -> None:
        """See to it that ``_end_backward`` runs when the backward that is running now, if any, ends."""
        running = _torch.current_backward()
        if running == self._backward:
            return
        if running == _torch.NO_BACKWARD:  # the last one raised
            self._forget_backward()
            return
        # A backward in a backward (reentrant checkpointing) cuts the outer one into pieces, each agreed on by itself.
        self._end_piece()
        self._backward = running
        self._piece_key = (self._piece, *((u.reduces, u.reshard_after_forward, u.reshard_size) for u in self.units))
        self._begin((_BACKWARD, self._piece_key), None)
        self._piece += 1
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    @_torch.outside_dynamo
    def prepare_regather(self, window: Window) -> None:
        self.await_backward()
        if window.bucket not in self.ahead:
            self._launch(window.bucket)
        self._regathered.append(window)
        had = {w.bucket.unit for w in self._regathered}
        self._launch_ahead(u for u in window.bucket.unit.backward_prefetch if u.reshard_after_forward and u not in had)

    @_torch.outside_dynamo
    def reduce(self, bucket: ParamBucket, grads: Sequence[Tensor | None]) -> None:
        """Start to reduce gradients of full parameters, or keep them while gradients are not synchronised."""
        self.await_backward()
        if not bucket.unit.reduces:
            given = [None if g is None else dense(g) for g in grads]
            bucket.unreduced.keep("none", bucket.pack(given), [i for i, g in enumerate(given) if g is not None])
            return
        self._want([(Kind.REDUCE, bucket)])
        self.in_flight.launch(bucket, grads)

    @_torch.outside_dynamo
    def note_segment(self, bucket: ParamBucket, segment: Tensor, ids: set[int]) -> None:
        """A compiled backward reduced gradients of parameters ``ids``."""
        self.await_backward()
        self._segments.append((bucket, segment, ids))

    @_torch.outside_dynamo
    def _end_backward(self) -> None:
        self._end_piece()
        self._forget_backward()
        self.ahead.drop()
        if self.depth == 0:
            self._close_all()

    @torch.no_grad()
    def _end_piece(self) -> None:
        """Reduce what waited for it, let every rank catch up, and hand out gradients: not before all are there.

        A parameter that got a gradient on another rank alone gets its part of it too.
        """
        phases = self._phases[True]
        if self._backward == _torch.NO_BACKWARD:
            return
        self.in_flight.drain()
        for bucket in self._buckets():
            if bucket.unreduced.due:
                self._want([(Kind.REDUCE, bucket)])
                self.in_flight.launch(bucket)
        self.in_flight.drain()
        self._segments += self.in_flight.take()
        undecided: set[ParamBucket] = set()
        for bucket, _, ids in self._segments:
            self._note_graded(bucket, bucket.trainable() & ids)
            undecided |= {bucket} if bucket.trainable() - ids else set()
        graded: dict[ParamBucket, set[int]] = {}
        for agreement, phase in phases.items():
            if not agreement.eager:
                phase.expected = []  # all collectives were in compiled graphs
            if agreement.eager or undecided & agreement.number.keys():
                self._learned.setdefault((_BACKWARD, self._piece_key), {})[agreement] = agreement.finish(phase)
                graded |= agreement.take_graded()
            else:
                agreement.post(phase)
        phases.clear()
        self.in_flight.drain()
        segments, self._segments = [*self._segments, *self.in_flight.take()], []
        for bucket, segment, ids in segments:
            bucket.give(segment, (ids | graded.get(bucket, set())) & bucket.trainable())

    # -- agreement with other ranks -----------------------------------------------------------------------------------

    @_torch.outside_dynamo
    def before_graph(self, launches: Sequence[tuple[Launched, ParamBucket]], same_everywhere: bool) -> None:
        """A compiled graph is about to run. ``launches``: its collectives in order.

        Where all of a forward is compiled they are only noted, to be compared later if they should be the
        ``same_everywhere``; inside eager code ranks may run different graphs.
        """
        self.await_backward()
        self.in_flight.drain()  # the graph has reductions of its own, in its own order
        kinds = {"gather": self._gather_kind(), "gather parts": Kind.GATHER_PARTS, "reduce": Kind.REDUCE}
        wanted = [(kinds[what], b) for what, b in launches if what == "reduce" or b.groups.gather]
        if wanted:
            self._want(wanted)
            for agreement in self._all_agreements() if same_everywhere else ():
                agreement.note_graph(wanted)

    def _gather_kind(self) -> Kind:
        forward = self._phases[False] and _torch.current_backward() == _torch.NO_BACKWARD
        return Kind.GATHER if forward else Kind.REGATHER

    @_torch.outside_dynamo
    def _begin(self, key: tuple[Any, Any], module: nn.Module | None) -> None:
        phases = self._phases[key[0] == _BACKWARD]
        for agreement in self._all_agreements():
            learned = self._learned.get(key, {}).get(agreement)
            if learned is None:
                learned = self._first_guess(agreement, module) if module is not None or key[1][0] == 0 else []
            phases[agreement] = Phase([t for t in learned if self._can_join(agreement, t)])
            agreement.eager |= module is not None

    @_torch.outside_dynamo
    def _end_forward(self, key: tuple[Any, Any]) -> None:
        for agreement, phase in self._phases[False].items():
            self._learned.setdefault(key, {})[agreement] = agreement.finish(phase)

    def _want(self, wanted: Sequence[tuple[Kind, ParamBucket]]) -> None:
        phases = self._phases[wanted[0][0] != Kind.GATHER]
        for agreement, phase in list(phases.items()):  # none outside of any forward or backward: all ranks come here
            mine = [(kind, bucket) for kind, bucket in wanted if bucket in agreement.number]
            if mine and agreement.eager:
                agreement.want(phase, mine)

    def _join(self, kind: Kind, bucket: ParamBucket) -> None:
        """Take part in a collective of other ranks."""
        with torch.no_grad():
            if kind == Kind.REDUCE:
                self.in_flight.launch(bucket)
                self.in_flight.finish_scatter()
            elif kind == Kind.GATHER_PARTS:
                kept = bucket.kept_part
                assert kept is not None
                comm.gather_parts(self.parts.part(bucket), kept)
            else:
                bucket.refresh()
                gathered = comm.all_gather(bucket.gather_input(), bucket.groups)
                if kind == Kind.GATHER and bucket.kept_part is not None:
                    self.parts.keep_for_others(bucket, gathered)

    def _note_graded(self, bucket: ParamBucket, ids: Iterable[int]) -> None:
        """Parameters ``ids`` of the bucket get a gradient from the running backward of this rank."""
        agreement = next((a for a in self._all_agreements() if bucket in a.number), None)
        if agreement is not None:
            agreement.note_graded(bucket, sorted(ids))

    def _buckets(self) -> list[ParamBucket]:
        return [b for u in self.units for b in u.buckets]

    def _all_agreements(self) -> list[Agreement]:
        if self._agreements is None:
            by_ranks: dict[tuple[int, ...], list[ParamBucket]] = {}
            for bucket in self._buckets():
                if bucket.groups.size > 1:
                    by_ranks.setdefault(ranks_of(bucket.mesh), []).append(bucket)
            self._agreements = [
                Agreement(buckets, buckets[0].mesh, self._join, self.in_flight.finish_scatter)
                for buckets in by_ranks.values()
            ]
        return self._agreements

    def _first_guess(self, agreement: Agreement, module: nn.Module | None) -> list[Ticket]:
        """The collectives of a forward of ``module``, or of a backward, if all units run once as registered."""
        numbered = list(enumerate(agreement.buckets))
        if module is not None:
            units = [u for m in module.modules() if (u := getattr(m, "_fxshard_unit", None)) is not None]
            inside = {b for u in units for b in u.buckets}
            return [Ticket(Kind.GATHER, i) for i, b in numbered if b in inside and b.groups.gather is not None]
        expected = []
        for i, b in reversed(numbered):
            if b.unit.reshard_after_forward and b.groups.gather is not None:
                expected.append(Ticket(Kind.REGATHER if self.parts.current(b) is None else Kind.GATHER_PARTS, i))
            if b.requires_grad and b.unit.reduces:
                expected.append(Ticket(Kind.REDUCE, i))
        return expected

    def _can_join(self, agreement: Agreement, ticket: Ticket) -> bool:
        """Whether forward kept what backward gathers; all ranks did or none."""
        return ticket.kind != Kind.GATHER_PARTS or self.parts.current(agreement.buckets[ticket.bucket]) is not None


@_torch.outside_dynamo
def _unpack(saved: Tensor | SavedParam) -> Tensor:
    return saved.restore() if isinstance(saved, SavedParam) else saved
