"""Segments that could not be written down for want of room are written down when there is some.

The daemon serves meanwhile; only the next one would not have what is in them (`Ledger.trouble`).
Rows of what is in a segment come in bounded steps, and rows of what happens in it in between come
by themselves. It is believed when all are there.
"""

import time

from kvstore.core.adopt import write_again
from kvstore.core.store import Store
from kvstore.logs import logger
from kvstore.tiers.ledger import NOBODY, Ledger

log = logger("kvstored.warm")

RETRY_S = 5.0
"""Between two tries, while there is no room."""

ROWS = 1024
"""Written down in one step: some 3 ms."""


class Mending:
    """What a ledger lacks of a store."""

    def __init__(self, store: Store, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger
        self._retry_at = 0.0
        self._number = 0
        """The segment that is being written down; 0: none."""
        self._slot = 0

    def step(self) -> bool:
        """A bounded part of what there is to do; True if there is more."""
        ledger = self._ledger
        if self._number:
            return self._go_on()
        now = time.monotonic()
        if not ledger.trouble or now < self._retry_at:
            return False
        ledger.try_again()
        for number in list(ledger.unwritten):
            segment = self._store.segments.live.get(number)
            if segment is None:
                continue  # it is being made
            if not ledger.begin_again(number, len(segment.state)):
                break
            self._number, self._slot = number, 0
            return True
        self._retry_at = now + RETRY_S
        return False

    def _go_on(self) -> bool:
        ledger, number = self._ledger, self._number
        segment = self._store.segments.live.get(number)
        if segment is None or number not in ledger.unwritten or number not in ledger.segments:
            self._number = 0  # dropped, or given to another pool, and with it written down, or not
            return True
        end = min(self._slot + ROWS, len(segment.state))
        write_again(self._store, segment, range(self._slot, end))
        self._slot = end
        if end == len(segment.state):
            tenant = NOBODY if segment.tenant is None else segment.tenant
            ledger.finish(number, tenant, segment.pool.block_bytes if segment.pool is not None else 0)
            log.info("written down after all: a segment will outlive the daemon", segment=number)
            self._number = 0
        return True
