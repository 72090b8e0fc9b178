"""Ready is who can put and get, now; and what is in the way, by name, for who cannot.

The check is a put and a get: a slot is taken, bytes are written into the slab, the block is
committed, found in shared memory as a reader finds it, read and compared. Then it is gone
again, within the same step of the event loop (core/probe.py). Nobody can meet it. Where
all but the last of the memory is held, such a put works and its block is evicted at once:
that is no store either, and is said of the memory.

An SSD or a device that is out of use stops neither: memory serves. Nor does memory that would not
outlive the daemon. Each is named, as "degraded: ...", and keeps nobody from being sent here: elsewhere the same
request would find no more.

Health is less: what `Node.problems` says. A daemon whose memory is all held is healthy and
not ready; one that is not healthy is never ready. What went wrong in passing is a problem
until it has not come again for a while and a put and a get work (`Troubles`): a load
balancer must not lose a daemon for good by one bug that one call met.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.core.block import NONE
from kvstore.core.probe import PROBE_TENANT, Probe, Trial
from kvstore.logs import logger
from kvstore.server.calls import Node
from kvstored.v1 import KEY_BYTES
from kvstored.v1.errors import KVStoreError

log = logger("kvstored.ready")

PROBE_BYTES = 4096
"""Written and compared at the beginning of a block, and at its end."""

LATE_S_MAX = 0.5
"""The event loop may turn so much later than it should before nobody is sent here."""

TROUBLE_S = 10.0
"""What has not come again for so long is over, if a put and a get work."""

DEGRADED = "degraded: "
IN_A_FREE_SLOT = "ok: in a free slot"
BY_EVICTION = "ok: no slot is free, and a block may be evicted for one"


@dataclass(frozen=True)
class Answer:
    """What `/readyz` says: each check by its name, "ok", "degraded: ..." (ready all the same), or what is wrong."""

    ready: bool
    checks: dict[str, str]

    def wrong(self) -> str:
        """All that is wrong, in one line."""
        return "; ".join(f"{name}: {said}" for name, said in self.checks.items() if not _is_ok(said))


class Readiness:
    """Checks one daemon."""

    def __init__(self, node: Node, late_s: Callable[[], float], evict_high: float) -> None:
        """`late_s` answers how much later than it should the event loop turned lately."""
        self._node = node
        self._late_s = late_s
        self._evict_high = evict_high
        self._probe = Probe(node.store, secrets.token_bytes(KEY_BYTES))

    def check(self) -> Answer:
        """Everything at once, in well under a millisecond."""
        put, get = self._put_and_get()
        late, problems = self._late_s(), self._node.problems()
        checks = {
            "put": put,
            "get": get,
            "memory": self._probe.stays(self._evict_high) or "ok",
            "event loop": "ok" if late <= LATE_S_MAX else f"{late:.1f} s late; at most {LATE_S_MAX} s are well",
            "health": "; ".join(problems) or "ok",
        }
        for name, part in (("ssd", self._node.ssd), ("persist", self._node.persist), ("gpu", self._node.gpu)):
            if part is not None:
                degraded = "; ".join(part.degraded())
                checks[name] = f"{DEGRADED}{degraded}" if degraded else "ok"
        return Answer(all(map(_is_ok, checks.values())), checks)

    def works(self) -> bool:
        """Whether a put and a get do."""
        return all(map(_is_ok, self._put_and_get()))

    def _put_and_get(self) -> tuple[str, str]:
        untried = "not tried: nothing could be put"
        try:
            with self._probe.taken() as trial:
                if trial.row != NONE:
                    return BY_EVICTION, self._get_of_another(trial)
                wrote = self._write(trial)
                row = self._probe.commit(trial, time.monotonic())
                if self._probe.find() != [row]:
                    return "a block that was committed is not in the store", untried
                return IN_A_FREE_SLOT, self._get(trial, wrote)
        except KVStoreError as e:
            return f"{type(e).__name__}: {e}", untried
        except Exception as e:
            log.exception("a probe failed")
            return f"{type(e).__name__}: {e}", untried

    def _write(self, trial: Trial) -> bytes:
        """Fills both ends of the slot; answers what was written to each."""
        size = min(trial.pool.block_bytes, PROBE_BYTES)
        wrote = secrets.token_bytes(size)
        with self._node.slab.bytes_at(trial.ref >> 32, trial.offset, trial.pool.block_bytes) as slot:
            slot[-size:] = wrote
            slot[:size] = wrote
        return wrote

    def _get(self, trial: Trial, wrote: bytes) -> str:
        """Finds the block where the index says it is, and compares it."""
        found = self._node.indexes.find(PROBE_TENANT, self._probe.key)
        length = trial.pool.block_bytes
        if found != (trial.ref >> 32, trial.offset, length):
            return f"a block that was committed is not where the index says ({found})"
        segment, offset, _ = found
        with self._node.slab.bytes_at(segment, offset, length) as block:
            if length >= 2 * len(wrote):
                same = block[: len(wrote)] == wrote and block[-len(wrote) :] == wrote
            else:
                same = block[: len(wrote)] == wrote
        return "ok: the same bytes" if same else "a block does not have the bytes that were put"

    def _get_of_another(self, trial: Trial) -> str:
        """Finds a block of somebody's in the index and reads its ends."""
        store = self._node.store
        key = store.table.key[trial.row]
        assert key is not None, "a victim is a block with a key"
        found = self._node.indexes.find(trial.pool.tenant, key)
        if found is None:
            return "ok: not tried on a block that waits for a larger index"
        segment, offset, length = found
        if (segment, offset) != (trial.ref >> 32, trial.offset):
            return f"a block is not where the index says ({found})"
        with self._node.slab.bytes_at(segment, offset, length) as block:
            bytes(block[:PROBE_BYTES]), bytes(block[-PROBE_BYTES:])
        return "ok: a block was found and read"


class Troubles:
    """What went wrong in passing: bugs that calls met, and whatever is told to `meet`."""

    def __init__(self, node: Node, works: Callable[[], bool]) -> None:
        self._node = node
        self._works = works
        self._met, self._times = "", 0
        self._over = 0
        """Of the node's internal errors."""
        self._seen = (0, 0)
        self._quiet_since = 0.0

    def meet(self, what: str) -> None:
        """The daemon has this problem from now on; "" for none."""
        self._met = what
        self._times += bool(what)

    def names(self) -> list[str]:
        """Those that are not over."""
        errors = self._node.internal_errors - self._over
        found = [f"{errors} internal errors in calls; see the log"] if errors else []
        return [*found, self._met] if self._met else found

    def settle(self, now: float) -> None:
        """To be called every second or so: ends what has not come again."""
        if not self.names():
            return
        seen = (self._node.internal_errors, self._times)
        if seen != self._seen:
            self._seen, self._quiet_since = seen, now
        elif now - self._quiet_since >= TROUBLE_S and self._works():
            log.warning("a put and a get work: over", problems="; ".join(self.names()))
            self._over, self._met = self._node.internal_errors, ""


def _is_ok(said: str) -> bool:
    return said == "ok" or said.startswith(("ok:", DEGRADED))
