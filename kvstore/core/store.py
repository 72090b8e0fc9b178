"""The store: every decision about blocks in memory, as a pure function of calls and time.

One event loop owns it. Every call is one step that leaves all invariants true
(`audit.check` proves them); nothing waits, nothing is half done between calls. Errors
are those of the wire (kvstored.v1.errors), and a call that raises has changed nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from kvstore.core import audit, holds, leaving, refusals
from kvstore.core.block import HINTED, NONE, PINNED, SEALED, BlockTable
from kvstore.core.conversations import Conversations
from kvstore.core.counts import Counts
from kvstore.core.evict import POLICIES, PoolOrder
from kvstore.core.holds import INFINITY, Namespace, Session, Tenant
from kvstore.core.ledger import GRANT, LEASE, NO_LEDGER, UNGRANT, UNLEASE, Ledger
from kvstore.core.moves import Watcher
from kvstore.core.room import Room
from kvstore.core.segments import PAGE_BYTES, Job, Pool, SegmentTable, pages
from kvstore.core.spaces import Spaces
from kvstore.core.tree import IndexPort, PrefixTree
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import InvalidArgument, ResourceExhausted

EXPIRE_STEP = 256
"""Ends of pins and lives looked at in one call of `expire`: about a millisecond."""

PIN_TTL_S_MAX = 30 * 86400.0

STORED, EXISTS, REJECTED = int(pb.STORED), int(pb.EXISTS), int(pb.REJECTED)


class Store:
    """All tenants' blocks in one slab."""

    def __init__(
        self, size_bytes: int, index: IndexPort, *, policy: str = "lru", huge_pages: bool = False, lazily: bool = False
    ) -> None:
        """`lazily`: memory is asked for when it is needed, not all at the start."""
        self.table = BlockTable()
        self.segments = SegmentTable(size_bytes, huge_pages, lazily=lazily)
        self.policy = POLICIES[policy](self.table)
        self.room = Room(self.table, self.segments, self.policy, self.evict)
        self.tenants: dict[str, Tenant] = {}
        self.namespaces: list[Namespace] = []
        self.spaces = Spaces(self)
        self.sessions: dict[int, Session] = {}
        self.counts = Counts()
        self.conversations = Conversations(self.counts, self.table.forget_conversations)
        self.tree = PrefixTree(self.table, self.segments, self.policy, index, self.namespaces)
        self.watcher: Watcher | None = None
        self.ledger: Ledger = NO_LEDGER
        self._last_session = 0

    # -- tenants, namespaces, sessions

    def tenant(self, name: str) -> Tenant:
        """The tenant of that name, made at first sight."""
        found = self.tenants.get(name)
        if found is None:
            if len(self.tenants) >= holds.TENANTS_MAX:
                raise ResourceExhausted(f"{holds.TENANTS_MAX} tenants exist already; {name!r} would be one more")
            found = self.tenants[name] = Tenant(len(self.tenants), name)
            self.ledger.tenant(found)
        return found

    def open_namespace(
        self, tenant: Tenant, digest: bytes, block_bytes: int, label: str, block_tokens: int = 0
    ) -> Namespace:
        """The namespace of that digest; a second opener must mean the same block size, and as many tokens if any."""
        return self.spaces.open(tenant, digest, block_bytes, label, block_tokens)

    def namespace(self, tenant: Tenant, number: int) -> Namespace:
        """The namespace that a message names by its number."""
        return self.spaces.by_number(tenant, number)

    def open_session(
        self,
        tenant: Tenant,
        client: str,
        now: float,
        *,
        local: bool,
        read_only: bool,
        pid: int,
        nonce: int,
        born: int = 0,
    ) -> Session:
        """A new session, holding nothing."""
        if len(self.sessions) >= holds.SESSIONS_MAX:
            raise ResourceExhausted(f"{holds.SESSIONS_MAX} sessions are open already")
        self._last_session += 1
        session = Session(self._last_session, tenant, client, local, read_only, pid, nonce, now, born)
        self.ledger.opened(session)
        self.sessions[session.id] = session
        self.counts.sessions_opened += 1
        return session

    def end_session(self, session: Session, *, process_gone: bool) -> None:
        """The socket has hung up. What a live process may still write to is quarantined.

        Called again when the process of a session that ended before it is gone too; once
        nothing is left of a session, a further call does nothing.
        """
        leaving.end(self, session, process_gone=process_gone)

    def resume(self, old: Session, heir: Session, leased: Sequence[int], granted: Sequence[int]) -> None:
        """The process of `old` attached again as `heir` and says what it still uses; the rest is free.

        A slot named in `granted` that is not granted (any more) is passed over: it was committed
        by a call whose answer never arrived, and its next Commit answers FailedPrecondition.
        A lease that was never there is an error: whoever looks at that slot must stop.
        """
        leaving.resume(self, old, heir, leased, granted)

    # -- writing

    def pool(self, namespace: Namespace) -> Pool:
        """The pool that blocks of this namespace live in."""
        key = (namespace.tenant.id, namespace.block_bytes)
        found = self.segments.pools.get(key)
        if found is None:
            found = Pool(*key, pages(namespace.block_bytes, PAGE_BYTES), PoolOrder(self.table))
            self.segments.add_pool(found)
        return found

    def grant_max(self, pool: Pool) -> int:
        """Slots that one session may hold ahead in this pool; none where one is more than 1/64 of the memory."""
        share = self.segments.tenant_bytes(pool.tenant) // holds.GRANT_SHARE
        return min(holds.GRANT_SLOTS_MAX, share // pool.slot_bytes)

    def reserve(
        self, session: Session, namespace: Namespace, count: int, now: float, expires: float = INFINITY
    ) -> list[int]:
        """Grants up to `count` slots to write to; at least one, or ResourceExhausted says why not."""
        if not 1 <= count <= holds.RESERVE_SLOTS_MAX:
            raise InvalidArgument(f"count {count} is not between 1 and {holds.RESERVE_SLOTS_MAX}")
        refusals.check_may_hold(session)
        pool = self.pool(namespace)
        allowed = min(count, self.allowed(session, pool))
        if allowed < 1:
            self._refuse_hold(session, pool, 1)
        refs = self.take(session, pool, allowed, expires)
        if not refs:
            self._refuse(refusals.no_slot(pool, self.segments, pending=self.room.pending), self.sessions.values())
        return refs

    def top_up(self, session: Session, namespace: Namespace, want: int) -> list[int]:
        """Slots ahead for the next put: up to `want` or what is allowed, none being legal.

        Nothing is evicted for them: it might be what has just been stored.
        """
        if session.recall or session.read_only or session.ended or not session.local:
            return []
        pool = self.pool(namespace)
        want = min(want, self.grant_max(pool) - session.granted_of.get(pool.block_bytes, 0))
        if want < 1:
            return []
        allowed = min(want, self.allowed(session, pool))
        return self.take(session, pool, allowed, INFINITY, evict=False) if allowed > 0 else []

    def commit(
        self,
        session: Session,
        namespace: Namespace,
        keys: Sequence[bytes],
        refs: Sequence[int],
        parents: Sequence[bytes],
        depths: Sequence[int],
        now: float,
        ttl_s: float = 0.0,
        conversation: str = "",
    ) -> list[int]:
        """Makes written slots visible, one step a block; results as the contract's CommitResult."""
        results, new, known = self.place(session, namespace, keys, refs, parents, depths, now, ttl_s)
        number, column = self.conversations.seen(namespace.tenant.name, conversation), self.table.conversation
        for row in (*new, *known) if number else new:
            column[row] = number
        if self.watcher is not None:
            self.watcher.stored(new, known)
        counts = self.counts
        counts.stored += len(new)
        counts.existing += len(known)
        counts.rejected += len(results) - len(new) - len(known)
        return results

    def place(
        self,
        session: Session,
        namespace: Namespace,
        keys: Sequence[bytes],
        refs: Sequence[int],
        parents: Sequence[bytes],
        depths: Sequence[int],
        now: float,
        ttl_s: float = 0.0,
    ) -> tuple[list[int], list[int], list[int]]:
        """`commit` without telling anybody or counting: results, rows of new blocks, rows of those that were here."""
        pool = self.pool(namespace)
        refusals.check_commit(session, self.segments, pool, keys, refs, parents, depths, ttl_s)
        tenant, granted, seal = namespace.tenant, session.granted, self.tree.seal
        results: list[int] = []
        new: list[int] = []
        known: list[int] = []
        for key, ref, parent, depth in zip(keys, refs, parents, depths, strict=True):
            row = tenant.rows.get(key)
            if row is None:
                del granted[ref]
                new.append(seal(namespace, pool, key, ref, parent, depth, now))
                results.append(STORED)
            elif self.table.namespace[row] == namespace.id:
                known.append(row)
                results.append(EXISTS)
            else:
                results.append(REJECTED)
        session.ungranted(len(new), pool.block_bytes, pool.slot_bytes)
        if self.ledger is not NO_LEDGER and new:
            self.ledger.holds(session, UNGRANT, list(map(self.table.place.__getitem__, new)))
        session.committed = now
        self.tree.list_new(pool, new, now)
        if known:
            self.tree.touch(known, now)
        for row in new if ttl_s else ():
            self.tree.set_until(row, HINTED, now + ttl_s)
        return results, new, known

    def abort(self, session: Session, refs: Sequence[int]) -> None:
        """Gives granted slots back; the client writes to them no more."""
        refusals.check_open(session)
        if len(set(refs)) != len(refs) or not session.granted.keys() >= set(refs):
            raise InvalidArgument("a slot that this session was not granted (or named twice) cannot be given back")
        for ref in refs:
            pool = self.pool_at(ref)
            del session.granted[ref]
            session.ungranted(1, pool.block_bytes, pool.slot_bytes)
            self.segments.free_slot(ref)
        session.half_written.difference_update(refs)
        self.ledger.holds(session, UNGRANT, refs)

    # -- reading

    def match(self, namespace: Namespace, keys: Sequence[bytes]) -> list[int]:
        """Rows of the leading run of `keys` that is present."""
        rows: list[int] = []
        get, of, number = namespace.tenant.rows.get, self.table.namespace, namespace.id
        for key in keys:
            row = get(key)
            if row is None or of[row] != number:
                break
            rows.append(row)
        return rows

    def acquire(self, session: Session, namespace: Namespace, keys: Sequence[bytes], now: float) -> list[int]:
        """Holds the leading run that is present; all of it, or ResourceExhausted and nothing."""
        refusals.check_may_hold(session)
        rows = self.match(namespace, keys)
        if not rows:
            return []
        refusals.check_leases(session, len(rows))
        if not self.ledger.has_room(session, len(rows)):
            raise ResourceExhausted(refusals.NO_LEDGER_ROOM)
        place, leases, leased = self.table.place, self.table.leases, session.leased
        pool = self.pool(namespace)
        refs = list(map(place.__getitem__, rows))
        fresh = len(set(refs) - leased.keys())
        if fresh and fresh > refusals.own_limit(session, self.segments, pool.slot_bytes):
            self._refuse_hold(session, pool, fresh)
        limit = refusals.tenant_limit(session, self.segments, pool.slot_bytes)
        if len(rows) > limit and (unheld := len({row for row in rows if not leases[row]})) > limit:
            self._refuse_hold(session, pool, unheld)
        session.held_bytes += fresh * pool.slot_bytes
        session.leases += len(refs)
        if fresh == len(refs):
            leased.update(dict.fromkeys(refs, 1))
        else:
            for ref in refs:
                leased[ref] = leased.get(ref, 0) + 1
        self.ledger.holds(session, LEASE, refs)
        self.tree.lease(rows, namespace.tenant, pool)
        self.tree.touch(rows, now)
        if self.watcher is not None:
            self.watcher.used(rows)
        return refs

    def release(self, session: Session, refs: Sequence[int]) -> None:
        """Ends one hold for each reference named."""
        refusals.check_open(session)
        leased = session.leased
        counted = dict.fromkeys(refs, 1)
        if len(counted) < len(refs):
            for ref in counted:
                counted[ref] = 0
            for ref in refs:
                counted[ref] += 1
        if set(map(leased.get, counted)) != {1} or len(counted) < len(refs):
            for ref, count in counted.items():
                if leased.get(ref, 0) < count:
                    raise InvalidArgument(f"slot {ref:#x} is not leased {count} times by this session")
        number, slot_bytes = -1, 0
        for ref, count in counted.items():
            if leased[ref] > count:
                leased[ref] -= count
                continue
            del leased[ref]
            if ref >> 32 != number:
                number, slot_bytes = ref >> 32, self.pool_at(ref).slot_bytes
            session.held_bytes -= slot_bytes
        session.leases -= len(refs)
        self.tree.unlease(session.tenant, counted)
        self.ledger.holds(session, UNLEASE, refs)

    def touch(self, tenant: Tenant, keys: Sequence[bytes], now: float, conversation: str = "") -> None:
        """Blocks were used, by that conversation if any; those that are gone meanwhile are skipped."""
        get = tenant.rows.get
        rows = [row for key in keys if (row := get(key)) is not None]
        self.tree.hit(rows)
        self.tree.touch(rows, now)
        if self.watcher is not None:
            self.watcher.used(rows)
        number = self.conversations.seen(tenant.name, conversation)
        for row in rows if number else ():
            self.table.conversation[row] = number

    # -- management

    def remove(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """Drops these blocks; leased ones vanish now and their slots follow with the last lease."""
        removed = 0
        for key in keys:
            row = namespace.tenant.rows.get(key)
            if row is not None and self.table.namespace[row] == namespace.id:
                self.tree.drop(row)
                removed += 1
        self.counts.removed += removed
        return removed

    def clear_step(self, namespace: Namespace, start: int, rows_max: int) -> int | None:
        """Drops a namespace's blocks among `rows_max` rows from `start`; where to go on, None at the end."""
        stop = min(start + rows_max, len(self.table))
        state, owner = self.table.state, self.table.namespace
        for row in range(start, stop):
            if state[row] == SEALED and owner[row] == namespace.id:
                self.tree.drop(row)
                self.counts.removed += 1
        return stop if stop < len(self.table) else None

    def pin(self, namespace: Namespace, keys: Sequence[bytes], ttl_s: float, now: float) -> int:
        """Keeps present blocks from eviction for `ttl_s` from now (a second pin replaces the first)."""
        if not 0 < ttl_s <= PIN_TTL_S_MAX:
            raise InvalidArgument(f"ttl_s {ttl_s} is not above 0 and at most {PIN_TTL_S_MAX:.0f} (30 days)")
        pinned = 0
        for key in keys:
            row = namespace.tenant.rows.get(key)
            if row is None or self.table.namespace[row] != namespace.id:
                continue
            self.tree.pin(row, now + ttl_s)
            pinned += 1
        return pinned

    def unpin(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """Lets eviction have these blocks again."""
        unpinned = 0
        for key in keys:
            row = namespace.tenant.rows.get(key)
            if row is not None and self.table.namespace[row] == namespace.id and self.table.marks[row] & PINNED:
                self.tree.unpin(row)
                unpinned += 1
        return unpinned

    def expire(self, now: float) -> bool:
        """Ends pins, lives and remote reservations that are due, and what calls left for later; True if more is."""
        self.spaces.now = now
        for session in self.sessions.values():
            if not session.local and session.granted and not session.ended:
                late = [ref for ref, at in session.granted.items() if at <= now]
                self.abort(session, late)
                self.counts.reservations_expired += len(late)
        more = self.tree.catch_up(now)
        for _ in range(EXPIRE_STEP):
            if not self.tree.due(now):
                return more
            due = self.tree.next_due()
            if due is None:
                continue
            row, mark = due
            if mark == PINNED:
                self.tree.unpin(row)
            else:
                self.counts.expired += 1
                self.tree.drop(row)
        return more or self.tree.due(now)

    def evict_step(self, high: float, low: float, blocks_max: int) -> bool:
        """Keeps every full pool's use between two watermarks; True if more remains to be done."""
        return self.room.evict_step(high, low, blocks_max)

    def take_jobs(self) -> list[Job]:
        """Work for the slab's owner since the last call; its sessions are asked to unmap what is dropped."""
        jobs, self.segments.jobs = self.segments.jobs, []
        for segment in self.segments.draining.values():
            for number in segment.sessions:
                self.sessions[number].detach.add(segment.id)
        return jobs

    def check(self, published: Mapping[tuple[int, bytes], audit.Published] | None = None) -> None:
        """Audits everything against everything; AssertionError names what disagrees."""
        audit.check(self, published)

    # -- steps

    def evict(self, row: int) -> None:
        """A block goes for room."""
        self.counts.evicted += 1
        self.conversations.evicted(self.table.conversation[row])
        if self.tree.families.is_orphan(row):
            self.counts.evicted_orphans += 1
        elif self.table.child[row] != NONE:
            self.counts.evicted_inner += 1
        self.tree.drop(row)

    def take(self, session: Session, pool: Pool, count: int, expires: float, *, evict: bool = True) -> list[int]:
        """Grants up to `count` slots, which the session is allowed; there may be fewer."""
        if not self.ledger.has_room(session, count):
            return []
        if pool.free < count:
            self.room.make(pool, count, evict=evict, keep_since=session.committed)
        refs = self.segments.take_slots(pool, min(count, pool.free))
        if refs:
            session.grant(refs, pool.block_bytes, pool.slot_bytes, expires)
            self.ledger.holds(session, GRANT, refs)
        return refs

    def allowed(self, session: Session, pool: Pool) -> int:
        """Further slots of this pool that the session may be granted."""
        return min(
            refusals.own_limit(session, self.segments, pool.slot_bytes),
            refusals.tenant_limit(session, self.segments, pool.slot_bytes),
        )

    def _refuse_hold(self, session: Session, pool: Pool, more: int) -> NoReturn:
        """A limit on holds: who could make place is the session itself, or all of its tenant."""
        own = refusals.own_limit(session, self.segments, pool.slot_bytes) < more
        tenant = session.tenant
        asked = [session] if own else [other for other in self.sessions.values() if other.tenant is tenant]
        self._refuse(refusals.above_limits(session, self.segments, pool.slot_bytes, more), asked)

    def _refuse(self, why: str, asked: Iterable[Session]) -> NoReturn:
        """Memory is short: what was granted ahead is asked back, and this call gets nothing."""
        self.counts.exhausted += 1
        for session in asked:
            if session.granted and session.local and not session.ended:
                session.recall = True
        raise ResourceExhausted(why)

    def pool_at(self, ref: int) -> Pool:
        """The pool of a slot that is granted or holds a block."""
        pool = self.segments.live[ref >> 32].pool
        assert pool is not None
        return pool
