"""A put and a get of nobody's, to see whether they work: all of it within one step, and nothing left behind.

A probe is a block of a tenant and a namespace that nobody can name. It takes a free slot,
or, before the first client has come, one of a segment that is nobody's; it never evicts and
never asks for memory. Where every slot is taken, a block that may be evicted shows that a
put works. No counter changes, no order changes, no segment changes hands.

Between `taken` and its end nothing else may touch the store.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore.core import refusals
from kvstore.core.adopt import unrecorded
from kvstore.core.block import NONE, BlockTable
from kvstore.core.evict import PoolOrder
from kvstore.core.holds import TENANTS_MAX, Namespace, Tenant
from kvstore.core.segments import PAGE_BYTES, Pool
from kvstore.core.store import Store
from kvstored.v1.errors import ResourceExhausted

PROBE_TENANT = TENANTS_MAX
"""Its number: above that of every tenant there can be."""


@dataclass
class Trial:
    """A slot to write to; `row` is a block that is there and may be evicted where no slot is free."""

    pool: Pool
    ref: int
    row: int = NONE

    @property
    def offset(self) -> int:
        return (self.ref & 0xFFFFFFFF) * self.pool.slot_bytes


class Probe:
    """Puts and takes back one block of one store."""

    def __init__(self, store: Store, key: bytes) -> None:
        """`key` is one that nobody can ask for. Always the same, so that the index has one trace of it at most."""
        self.store = store
        self.tenant = Tenant(PROBE_TENANT, "")
        self.key = key
        self._order = PoolOrder(BlockTable())
        """For a segment that is lent; a probe is never in any order."""

    @contextmanager
    def taken(self) -> Iterator[Trial]:
        """A slot that is given back at the end, with what was committed to it.

        Raises ResourceExhausted where a put would: nothing is free and nothing may go.
        """
        pools = self._pools()
        free = next((pool for pool in pools if pool.free), None)
        with unrecorded(self.store):  # a daemon that is killed here has put nothing there
            if free is not None:
                with self._slot(free) as trial:
                    yield trial
            elif self.store.segments.unowned and (pools or not self.store.segments.pools):
                with self._lent() as trial:
                    yield trial
            else:
                yield self._evictable(pools)

    def commit(self, trial: Trial, now: float) -> int:
        """Makes the slot a visible block, as a put does; answers its row."""
        namespace = self.store.namespaces[-1]
        return self.store.tree.seal(namespace, trial.pool, self.key, trial.ref, b"", 0, now)

    def find(self) -> list[int]:
        """The rows of the block as a match finds them: one, once it is committed."""
        return self.store.match(self.store.namespaces[-1], [self.key])

    def stays(self, high: float) -> str:
        """Whether a block would outlive the next eviction in any pool: "", or why not in that with most memory.

        At `high` of a pool's slots in use, eviction begins.
        """
        pools = self._pools()
        if not pools or any(self.store.room.keeps(pool, high) for pool in pools):
            return ""  # of no pool, a put speaks
        most = max(pools, key=lambda pool: len(pool.segments))
        return refusals.no_stay(most, high, self._tenant(most))

    # -- steps

    def _pools(self) -> list[Pool]:
        """The pools that a session which holds nothing may have a slot of, as far as limits on holds go.

        Those with memory or about to have some, and the smallest of each tenant: of the others,
        which may be tens of thousands, none could have what that one could not.
        """
        segments = self.store.segments
        pools = dict.fromkeys((*segments.filled(), *segments.making_for.values(), *segments.smallest.values()))
        return [pool for pool in pools if self._may_have(pool)]

    def _tenant(self, pool: Pool) -> Tenant:
        return next(tenant for tenant in self.store.tenants.values() if tenant.id == pool.tenant)

    def _may_have(self, pool: Pool) -> bool:
        """Whether a session that holds nothing may have a slot of this pool, as far as limits on holds go."""
        return refusals.tenant_left(self._tenant(pool), self.store.segments, pool.slot_bytes) > 0

    @contextmanager
    def _slot(self, pool: Pool) -> Iterator[Trial]:
        store, segments = self.store, self.store.segments
        segment = next(iter(pool.open.values()))
        opened, used = list(pool.open), segment.used
        store.namespaces.append(Namespace(len(store.namespaces) + 1, self.tenant, b"", pool.block_bytes, ""))
        (ref,) = segments.take_slots(pool, 1)
        try:
            yield Trial(pool, ref)
        finally:
            row = self.tenant.rows.get(self.key)
            if row is not None:
                store.tree.drop(row)
            else:
                segments.free_slot(ref)
            store.namespaces.pop()
            segment.used = used
            if list(pool.open) != opened:
                pool.open = {number: pool.segments[number] for number in opened}

    @contextmanager
    def _lent(self) -> Iterator[Trial]:
        """In the last of the segments that are nobody's: no session has ever seen it, and none will see this."""
        segments = self.store.segments
        segment = next(reversed(segments.unowned.values()))
        pool = Pool(PROBE_TENANT, PAGE_BYTES, PAGE_BYTES, self._order)
        segments.assign(segment, pool)
        try:
            with self._slot(pool) as trial:
                yield trial
        finally:
            segments.unassign(segment)

    def _evictable(self, pools: list[Pool]) -> Trial:
        """A block that a put would evict. Raises ResourceExhausted where there is none."""
        store = self.store
        for pool in pools:
            row = store.policy.victim(pool.order)
            if row != NONE:
                return Trial(pool, store.table.place[row], row)
        if not pools:
            full = next(iter(store.segments.pools.values()), None)
            if full is None:
                raise ResourceExhausted("there is no memory yet")
            tenant = self._tenant(full)
            raise ResourceExhausted(
                f"all sessions of tenant {tenant.name!r} hold {tenant.held_bytes} bytes, as much as they may; "
                "release leases (kvstore-cli stats shows who holds what)"
            )
        raise ResourceExhausted(refusals.no_slot(pools[0], store.segments, pending=store.room.pending))
