"""Blocks on a device of the daemon's: held there for reading in place, or brought there ahead of use."""

import logging
import time
from collections.abc import Sequence

from kvstore_client.device_lease import DeviceLease
from kvstore_client.devices import explained, uuid_of
from kvstore_client.holdings import DeviceHold
from kvstore_client.loads import DEADLINE_MS_MAX, answer_s
from kvstore_client.marks import Uses
from kvstore_client.pool import Pool
from kvstore_client.pools import Pools
from kvstore_client.tickets import STATES, Ticket, of_session
from kvstore_client.transport import Identity
from kvstored.v1 import KEYS_MAX
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import DeadlineExceeded, FailedPrecondition, ResourceExhausted, Unavailable
from kvstored_cuda.devices.errors import DeviceError, DeviceLost

log = logging.getLogger("kvstore_client")

FIND_S = 2.0
"""For the daemon to say what it has of a device, ahead of a prefetch."""


def acquire(pools: Pools, ns: Identity, keys: Sequence[bytes], timeout_s: float, to: str) -> DeviceLease:
    """Holds the leading run on a device; what is missing there is brought within `timeout_s`.

    A daemon that is away is a miss. Raises what else is in the way: no such device here, memory that this process may
    not open, a session's share held already.
    """
    uuid = uuid_of(to)
    until = time.monotonic() + timeout_s
    slots: list[int] = []
    holds: list[DeviceHold] = []
    addresses: list[int] = []
    pool: Pool | None = None
    try:
        pool = pools.pool(uuid, until)
        _hold(pool, ns, keys, slots, holds, until)
        if len(slots) < len(keys) and time.monotonic() < until:
            try:
                _begin(pool, ns, keys, until, 0).wait()
                _hold(pool, ns, keys, slots, holds, until)
            except (ResourceExhausted, DeadlineExceeded) as e:
                log.debug("blocks from %d on are not held on %s: %s", len(slots), to, e)
        addresses = pool.addresses(slots, ns.block_bytes, until)
    except (Unavailable, DeadlineExceeded) as e:
        if isinstance(e, DeviceLost):
            raise
        log.debug("nothing is held on %s: %s", to, e)
        holds.clear()
    except DeviceError as e:
        raise explained(e) from e
    device = pool.device if pool is not None else None
    uses = Uses(pools.marks(device), device) if device is not None and holds else None
    for hold in holds:
        assert uses is not None
        hold.release_behind(uses)
    return DeviceLease(addresses, ns.block_bytes, holds, device, uses)


def _hold(
    pool: Pool, ns: Identity, keys: Sequence[bytes], slots: list[int], holds: list[DeviceHold], until: float
) -> None:
    """Adds what the device has from where `slots` end."""
    more, hold = pool.acquire(ns, keys[len(slots) :], until)
    if hold is not None:
        slots += more
        holds.append(hold)


def prefetch(pools: Pools, ns: Identity, keys: Sequence[bytes], deadline_s: float, priority: int, to: str) -> Ticket:
    """Begins to bring the leading run to a device. What is in the way ends it at once: `why` says what."""
    uuid = uuid_of(to)
    until = time.monotonic() + deadline_s
    try:
        pool = pools.pool(uuid, time.monotonic() + min(FIND_S, deadline_s))
        return _begin(pool, ns, keys[:KEYS_MAX], until, priority)
    except (Unavailable, ResourceExhausted, FailedPrecondition, DeadlineExceeded, DeviceError) as e:
        return Ticket("failed", 0, str(e))


def _begin(pool: Pool, ns: Identity, keys: Sequence[bytes], until: float, priority: int) -> Ticket:
    session = pool.session
    left_ms = int((until - time.monotonic()) * 1000)
    request = pb.PrefetchRequest(
        namespace_id=session.number_of(ns, answer_s(session, until)),
        keys=keys,
        deadline_ms=min(max(left_ms, 1), DEADLINE_MS_MAX),
        priority=priority,
    )
    begun = pool.prefetch(request, answer_s(session, until))
    if begun.state != pb.TICKET_RUNNING:
        return Ticket(STATES[begun.state], begun.blocks, begun.why)
    ticket = of_session(session, begun.ticket, until)
    ticket.blocks = begun.blocks
    return ticket
