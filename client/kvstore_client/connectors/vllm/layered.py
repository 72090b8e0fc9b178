"""A load whose layers come one after the other, while the engine already computes with those that are there.

The step waits for it, so what must be asked of the daemon has LAYERED_S; then the load is given up, and the
step computes with what is not there: its blocks are reported, and the engine computes them in the next one.
Given up and begun exclude each other: a thread that is late writes nothing into the engine's memory.
"""

import threading
import time
from collections.abc import Sequence

from kvstore_client.connectors.vllm.messages import Load

LAYERED_S = 0.08
"""How long a step waits for the daemon, for all its loads together."""

ASKED, COPYING, ENDED, GIVEN_UP = "asked", "copying", "ended", "given up"


class LayeredLoad:
    """One request's. `blocks` are the leading blocks of its run that come."""

    def __init__(self, order: Load) -> None:
        assert len(order.runs) == 1, "a model with several cache groups has no layered loads"
        self.order = order
        self.blocks = 0
        self._change = threading.Condition()
        self._state = ASKED
        self._rows = 0

    # -- of the thread that loads

    def begin(self, blocks: int) -> bool:
        """So many blocks are held and will be copied; False where it was given up: nothing may be written."""
        with self._change:
            if self._state != ASKED:
                return False
            self._state, self.blocks = COPYING, blocks
            return True

    def copied(self, rows: int) -> None:
        """The first `rows` parts of every block are there."""
        with self._change:
            self._rows = rows
            self._change.notify_all()

    def end(self, *, failed: bool = False) -> None:
        """No more is coming. `failed`: what was copied is not to be used."""
        with self._change:
            if self._state != GIVEN_UP:
                self._state = ENDED
            if failed:
                self.blocks = 0
            self._change.notify_all()

    # -- of the engine's thread

    def wait(self, rows: int, until: float) -> None:
        """Until the first `rows` parts are there, or never will be; for the daemon to `until` (of time.monotonic)."""
        with self._change:
            while self._state == ASKED:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    self._state = GIVEN_UP
                    return
                self._change.wait(left_s)
            while self._state == COPYING and self._rows < rows:
                self._change.wait()


class LayeredLoads:
    """Those of one step."""

    def __init__(self) -> None:
        self._loads: list[LayeredLoad] = []
        self._until = 0.0

    def begin(self, loads: Sequence[LayeredLoad]) -> None:
        """With the step."""
        self._loads, self._until = list(loads), time.monotonic() + LAYERED_S

    def wait(self, rows: int) -> None:
        """See LayeredLoad.wait."""
        for load in self._loads:
            load.wait(rows, self._until)

    def take(self, rows: int) -> list[LayeredLoad]:
        """At the end of the step: all of them, ended or given up."""
        self.wait(rows)
        loads, self._loads = self._loads, []
        return loads
