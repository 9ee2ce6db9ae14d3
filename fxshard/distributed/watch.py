"""A watch over the ranks of a run: who failed, who hangs where, who is gone; and nobody is left behind.

A collective that a peer left tells little: "connection closed", or after the group's timeout that somebody did not
come. So each rank of `distributed_run` has a thread that sleeps until a message for its rank appears in the store where
the ranks of a launch meet. It costs nothing while all is well: no polling, no collective, nothing in a step.

* A rank that fails holds a *roll call* before it aborts: it says what failed and where, and the thread of every other
  rank says where its main thread is. No answer means a process that is gone, or stuck outside of Python. Its result
  is put in the store, and goes into the error of every rank.
* A rank that failed because of that prints it and aborts as well. One that does not notice (it sleeps, it waits for
  something else) is ended by its thread some seconds later, with the same text and its own stack.
* Ranks that wait in vain at the end of a run hold a roll call, too, and leave. Who is still busy then may come to its
  end, but not stay for longer than two more timeouts of the group.

Many ranks fail together when one does. The first one holds the roll call and the others wait for its result, so that
the store gets a few messages a rank. What is exchanged is JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from fxshard import _torch
from fxshard.distributed.envelope import describe
from fxshard.distributed.where import stack_now, where_now, where_raised

_PATIENCE = timedelta(seconds=2)  # for an answer to a roll call
_GRACE = 3.0  # seconds from a peer's failure until a rank that did not notice is ended
_LINES = 12  # of an error's text that go into a roll call

Kind = Literal["fault", "teardown"]


class Watch:
    """This rank's part in the watch, for the thread that makes it, from now until `stop`.

    store: where all ranks of the run meet; keys are kept apart from those of earlier runs over the same store.
    timeout: that of the run's group.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._rank, self._size = rank, size
        self._grace = {"fault": _GRACE, "teardown": 2 * timeout.total_seconds()}  # until a rank is ended, in seconds
        run = store.add(f"fxshard watch/runs of {rank}", 1)
        self._store = dist.PrefixStore(f"fxshard watch/{run}", store)
        self._listening = _torch.other_connection(self._store)
        self._watched = threading.get_ident()
        self._state = ""  # what there is to say beside the place
        self._heard = ""  # of a rank that failed
        self._ending, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._listen, name="fxshard watch", daemon=True)
        self._thread.start()

    # -- the rank's own thread ----------------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """Hold a roll call, or hear of the one that is held, and note it on `error`; this rank ends after that."""
        self._ending.set()
        with contextlib.suppress(Exception):  # nothing may keep the rank from ending
            lines = describe(error).strip().splitlines()
            text = "\n    ".join(lines[:_LINES] + ["..."] * (len(lines) > _LINES))
            place = where_raised(error)
            self._state = f"failed as well, at {place}"
            error.add_note(self._roll_call("fault", f"failed first, at {place}: {text}"))

    def leaves(self, how: str) -> None:
        """The rank leaves the run in the way said, and is about to wait for its peers."""
        self._state = f"left the run {how} and waits there for the others"
        with contextlib.suppress(Exception):  # for who asks when this rank has waited long enough and is gone
            self._store.set(f"state of {self._rank}", f"left the run {how}, waited for the others, and ended")

    def waited_in_vain(self) -> str:
        """Who did not come to the end of the run, for a rank that now ends without them."""
        self._ending.set()
        with contextlib.suppress(Exception):
            if self._store.check(["fault/result"]):
                return self._result("fault")
        return self._roll_call("teardown", self._state)

    def stop(self) -> None:
        """End the watch, whatever state the store is in. A second call does nothing."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        with contextlib.suppress(Exception):
            self._send(self._rank, "stop", "")
        self._thread.join(timeout=5)

    def _roll_call(self, kind: Kind, mine: str) -> str:
        try:
            if self._store.add(f"{kind}/callers", 1) > 1:
                with contextlib.suppress(dist.DistStoreError):
                    self._store.wait([f"{kind}/result"], 2 * _PATIENCE)
                return self._result(kind)
            for other in self._others():
                self._send(other, kind, mine)
            answers = [f"{kind}/answer of {other}" for other in self._others()]
            with contextlib.suppress(dist.DistStoreError):
                self._store.wait(answers, _PATIENCE)
            said = {r: self._read(a) for r, a in zip(self._others(), answers, strict=True)}
            self._store.set(f"{kind}/result", self._compose(mine, said))
            return self._result(kind)
        except Exception as error:
            return self._store_is_gone(error)

    def _compose(self, mine: str, said: dict[int, str | None]) -> str:
        gone = f"gives no answer within {_PATIENCE.seconds} s: its process is gone, or stuck outside of Python"
        silent = [r for r, answer in said.items() if answer is None]
        lines = [f"  rank {r} {self._read(f'state of {r}') or gone}" for r in silent]
        lines.append(f"  rank {self._rank} {mine}")
        lines += [f"  rank {r} {answer}" for r, answer in said.items() if answer is not None]
        return "\n".join(["fxshard.distributed: roll call of the ranks", *lines])

    def _result(self, kind: Kind) -> str:
        return self._read(f"{kind}/result") or "fxshard.distributed: no roll call of the ranks came to an end"

    # -- the watching thread ------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        kind: Kind
        why: tuple[Kind, str]
        number, until, why = 1, math.inf, ("fault", "")  # when to end this rank, and why
        while True:
            try:
                key = f"message {number} for {self._rank}"
                self._listening.wait([key], _seconds(until - time.monotonic()))
                kind, said = json.loads(self._listening.get(key))
            except dist.DistStoreError:  # nothing came until then
                return self._end(*why)
            except Exception as error:
                self._stopped.wait(_GRACE)
                return self._end("fault", self._store_is_gone(error))
            if self._stopped.is_set():
                return
            number += 1
            self._heard = said
            if time.monotonic() + self._grace[kind] < until:
                until, why = time.monotonic() + self._grace[kind], (kind, said)
            with contextlib.suppress(Exception):
                answer = self._state or f"is alive, at {where_now(self._watched)}"
                self._listening.set(f"{kind}/answer of {self._rank}", answer)

    def _end(self, kind: Kind, said: str) -> None:
        """End the process, unless its own thread is about to."""
        if self._ending.is_set():
            self._stopped.wait(5 * _GRACE)
        with contextlib.suppress(Exception):
            self._listening.wait([f"{kind}/result"], 2 * _PATIENCE)
            said = self._listening.get(f"{kind}/result").decode()
        if self._stopped.is_set() or not dist.is_initialized():
            return
        text = (
            f"fxshard.distributed: rank {self._rank} of {self._size} is ended: another rank "
            f"{'failed' if kind == 'fault' else 'left the run'}, and this one did not end by itself within "
            f"{self._grace[kind]:.0f} s\n{said}\nIts stack, innermost last:\n{stack_now(self._watched)}"
        )
        os.write(2, text.encode())
        flush = threading.Thread(target=sys.stdout.flush, daemon=True)  # a full pipe must not keep the process
        flush.start()
        flush.join(1)
        os._exit(1)

    # -- the store ----------------------------------------------------------------------------------------------------

    def _others(self) -> list[int]:
        return [r for r in range(self._size) if r != self._rank]

    def _send(self, to: int, kind: str, text: str) -> None:
        number = self._store.add(f"messages for {to}", 1)
        self._store.set(f"message {number} for {to}", json.dumps((kind, f"rank {self._rank} {text}")))

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _store_is_gone(self, error: Exception) -> str:
        said = (
            "fxshard.distributed: the store that ranks meet in is gone, so the process that serves it ended: the "
            f"launcher, or rank 0 where there is none ({describe(error).splitlines()[0]})"
        )
        return f"{said}\n  {self._heard}" if self._heard else said


def _seconds(number: float) -> timedelta:
    return timedelta(seconds=min(max(number, 0.01), 1e7))  # a store takes no infinity
