"""The store against a model: every call, in any order, on a slab that is always too small.

A failure prints the steps and a blob that repeats them; `KVSTORED_SEARCH=deep` looks longer.
"""

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from kvstore.core import reclaim, room
from kvstore.core.block import NONE
from kvstore.core.holds import Namespace
from kvstore.core.probe import PROBE_TENANT
from kvstore.core.reclaim import Reclaimed
from kvstore.core.segments import Pool
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from tests.core.examples import (
    DEPTHS,
    KEYS,
    PARENTS,
    choice,
    key,
    lives,
    names,
    pauses,
    runs,
    some_names,
    subset,
)
from tests.core.machine import Machine
from tests.core.model import Block, Process
from tests.core.scene import PAGE

pytestmark = pytest.mark.timeout(900)  # many thousand steps


class StoreMachine(Machine):
    """Every call of the store, in any order; and what asks for nothing: time, memory, clients that end."""

    # -- memory

    @initialize(made=st.integers(1, 7))
    def some_memory_and_clients_are_there(self, made: int) -> None:
        for tenant, local in ((0, True), (0, True), (1, True), (0, False)):
            self.opens(tenant, local)
        for _ in range(made):
            self.store.segments.made(self.jobs.pop(0).segment)

    @precondition(lambda self: self.jobs)
    @rule(number=choice, there=st.sampled_from([True, True, True, False]))
    def memory_is_made_or_not(self, number: int, there: bool) -> None:
        job = self.jobs.pop(number % len(self.jobs))
        if there:
            self.store.segments.made(job.segment)
        else:
            self.store.segments.failed(job.segment)

    @rule(number=choice)
    def client_unmaps_what_it_was_asked_to(self, number: int) -> None:
        process = self.process(number, lambda process: bool(process.session.detach) and not process.ended)
        if process is not None:
            segments = sorted(process.session.detach)
            process.session.detach.clear()
            self.store.segments.forget_session(process.session.id, segments)
            process.mapped.difference_update(segments)

    # -- sessions

    def opens(self, tenant: int, local: bool) -> None:
        self.model.processes.append(Process(self.scene.open(self.tenants[tenant], local=local)))

    @rule(number=choice, how=st.sampled_from(["lives on", "is gone", "attaches again"]), keep=subset)
    def session_ends(self, number: int, how: str, keep: int) -> None:
        """By the end of its socket or its process; of four processes only the first goes often."""
        process = self.process(number // 2)
        if process is None:
            return
        if how == "is gone" or not process.session.local:
            self.store.end_session(process.session, process_gone=True)
            self.model.processes.remove(process)
            self.opens(number % 2, number > 1)
        elif how == "lives on":
            self.store.end_session(process.session, process_gone=False)
            process.ended = True
        else:
            self.attaches_again(process, keep)

    def attaches_again(self, old: Process, keep: int) -> None:
        heir = Process(self.scene.open(old.session.tenant))
        granted = [ref for i, ref in enumerate(old.granted) if keep >> i % 8 & 1]
        leased = [ref for i, ref in enumerate(old.leased.elements()) if keep >> (i + 4) % 8 & 1]
        committed = [b.ref for b in self.model.blocks.values()][:1]
        self.store.resume(old.session, heir.session, leased, granted + committed)
        heir.mapped = {ref >> 32 for ref in (*granted, *leased)}
        for ref in granted:
            heir.granted[ref] = float("inf")
        for ref in leased:
            heir.leased[ref] += 1
            heir.sees[ref] = old.sees[ref]
        self.model.processes.remove(old)
        self.model.processes.append(heir)

    # -- writing

    def limits(self, process: Process, before: int, tenant_before: int) -> None:
        """What was just granted or leased is within bounds, or a single slot of who held none."""
        session = process.session
        whole = self.store.segments.tenant_bytes(session.tenant.id)
        own = self.model.held_bytes(process)
        assert own <= whole // 4 or (before == 0 and len({*process.granted, *process.leased}) == 1)
        if session.tenant.held_bytes > tenant_before:
            assert session.tenant.held_bytes <= whole * 3 // 4 or tenant_before == 0

    def refusal_is_right(self, pool: Pool, why: str) -> None:
        """Refused for want of slots: there is nothing that could be had at once."""
        if "can be freed" not in why or self.store.room.pending:
            return
        assert not pool.free, "refused with a free slot"
        held = [name for name, found in self.model.blocks.items() if self.model.is_held(name)]
        here = [name for name, found in self.model.blocks.items() if self.store.pool(found.namespace) is pool]
        assert set(here) <= set(held), "refused though a block could be evicted"

    def reserved(
        self, process: Process, ns: Namespace, call: Callable[[], list[int]], count: int, expires: float
    ) -> None:
        before, tenant_before = process.session.held_bytes, process.session.tenant.held_bytes
        try:
            with self.evicting():
                refs = call()
        except ResourceExhausted as e:
            assert (process.session.held_bytes, process.session.tenant.held_bytes) == (before, tenant_before)
            self.refusal_is_right(self.store.pool(ns), str(e))
            return
        assert len(refs) <= count
        assert len(set(refs)) == len(refs)
        self.model.granted(process, refs, expires)
        for ref in refs:
            self.model.write(ref, self.content())
        if refs:
            self.limits(process, before, tenant_before)

    @rule(number=choice, ns=choice, count=st.integers(1, 8), patience=st.integers(1, 30))
    def reserves(self, number: int, ns: int, count: int, patience: int) -> None:
        process = self.writer(number)
        if process is not None:
            self.reserve(process, self.ns(ns, process), count, patience)

    def reserve(self, process: Process, space: Namespace, count: int, patience: int) -> None:
        session, reserve = process.session, self.store.reserve
        expires = float("inf") if session.local else self.scene.now + patience
        self.reserved(process, space, lambda: reserve(session, space, count, self.scene.now, expires), count, expires)

    @rule(number=choice, ns=choice, want=st.integers(0, 16))
    def is_granted_ahead(self, number: int, ns: int, want: int) -> None:
        process = self.writer(number)
        if process is None:
            return
        space, session = self.ns(ns, process), process.session
        pool = self.store.pool(space)
        bound = min(want, self.store.grant_max(pool) - session.granted_of.get(space.block_bytes, 0))
        if session.recall or not session.local:
            bound = 0
        self.reserved(process, space, lambda: self.store.top_up(session, space, want), max(bound, 0), float("inf"))

    @rule(number=choice, keep=subset)
    def writes_where_it_may(self, number: int, keep: int) -> None:
        """Also a process whose socket is gone, and also nonsense."""
        process = self.process(number)
        if process is not None:
            for i, ref in enumerate(process.granted):
                if keep >> i % 8 & 1:
                    self.model.write(ref, self.content())

    @rule(number=choice, ns=choice, keys=runs, ttl_s=lives, seconds=pauses)
    def puts(self, number: int, ns: int, keys: list[str], ttl_s: float, seconds: float) -> None:
        """What a client does with a prompt: a part of a chain, in order."""
        process = self.writer(number)
        if process is not None:
            space = self.ns(ns, process)
            self.reserve(process, space, len(keys), 5)
            self.commit(process, space, keys, 0, ttl_s)
            self.aborts(self.model.processes.index(process), number * 32)
            self.time_goes_on(seconds)

    @rule(number=choice, ns=choice, keys=runs, seconds=pauses)
    def puts_more(self, number: int, ns: int, keys: list[str], seconds: float) -> None:
        """The same again, so that it is chosen more often."""
        self.puts(number, ns, keys, 0.0, seconds)

    @rule(number=choice, ns=choice, keys=names, wild=subset, ttl_s=lives)
    def commits(self, number: int, ns: int, keys: list[str], wild: int, ttl_s: float) -> None:
        """Anything, in any order, and sometimes with parents that are nonsense."""
        process = self.writer(number)
        if process is not None:
            self.commit(process, self.ns(ns, process), keys, wild, ttl_s)

    def commit(self, process: Process, space: Namespace, keys: list[str], wild: int, ttl_s: float) -> None:
        session, pool = process.session, self.store.pool(space)
        refs = [ref for ref in process.granted if self.store.segments.live[ref >> 32].pool is pool]
        wanted = [key(name) for name in keys][: len(refs)]
        refs = refs[: len(wanted)]
        others = wanted[1:] + wanted[:1] if wild & 64 else KEYS[wild % 8 :]
        above = [others[i] if wild >> i & 1 else PARENTS[k] for i, k in enumerate(wanted)]
        above = [b"" if parent == k else parent for parent, k in zip(above, wanted, strict=True)]
        expected = []
        for k, ref in zip(wanted, refs, strict=True):
            content = self.content()
            self.model.write(ref, content)
            name = (space.tenant.id, k)
            known = self.model.blocks.get(name)
            if known is None:
                dies = self.scene.now + ttl_s if ttl_s else None
                self.model.blocks[name] = Block(space, ref, content, dies)
                del process.granted[ref]
                expected.append(pb.STORED)
            else:
                expected.append(pb.EXISTS if known.namespace is space else pb.REJECTED)
        depths = [DEPTHS[k] for k in wanted]
        results = self.store.commit(session, space, wanted, refs, above, depths, self.scene.now, ttl_s)
        assert results == expected

    @rule(number=choice, keep=subset)
    def aborts(self, number: int, keep: int) -> None:
        process = self.process(number)
        if process is not None and not process.ended:
            refs = [ref for i, ref in enumerate(process.granted) if not keep >> i % 8 & 1]
            self.store.abort(process.session, refs)
            for ref in refs:
                del process.granted[ref]

    @rule(number=choice, ns=choice, ref=choice | st.sampled_from([9, 1 << 32, 1 << 33, (1 << 64) - 1]))
    def claims_what_is_not_its_own(self, number: int, ns: int, ref: int) -> None:
        process = self.writer(number)
        others = [b.ref for b in self.model.blocks.values()]
        others += [r for p in self.model.processes if p is not process for r in (*p.granted, *p.leased)]
        if process is None:
            return
        if others and ref < 8:
            ref = others[ref % len(others)]
        space, session = self.ns(ns, process), process.session
        pool = self.store.pool(space)
        for own in process.granted:
            if self.store.segments.live[own >> 32].pool is not pool:
                with pytest.raises(InvalidArgument):
                    self.store.commit(session, space, [KEYS[0]], [own], [b""], [0], self.scene.now)
        if ref not in process.granted:
            with pytest.raises(FailedPrecondition):
                self.store.commit(session, space, [KEYS[0]], [ref], [b""], [0], self.scene.now)
            with pytest.raises(InvalidArgument):
                self.store.abort(session, [ref])
        if ref not in process.leased:
            with pytest.raises(InvalidArgument):
                self.store.release(session, [ref])

    # -- reading

    @rule(number=choice, ns=choice, keys=names)
    def acquires(self, number: int, ns: int, keys: list[str]) -> None:
        process = self.writer(number)
        if process is None:
            return
        session = process.session
        space, wanted = self.aim(ns, keys, session.tenant)
        run = self.run_of(space, wanted)
        before, tenant_before = session.held_bytes, session.tenant.held_bytes
        try:
            refs = self.store.acquire(session, space, wanted, self.scene.now)
        except ResourceExhausted:
            assert (session.held_bytes, session.tenant.held_bytes) == (before, tenant_before)
            return
        assert len(refs) == len(run), "acquired another run than is there"
        self.model.leased(process, zip(run, refs, strict=True))
        if session.held_bytes > before:
            self.limits(process, before, tenant_before)

    @rule(number=choice, keep=subset)
    def releases(self, number: int, keep: int) -> None:
        process = self.writer(number)
        if process is not None:
            refs = [ref for i, ref in enumerate(process.leased.elements()) if keep >> i % 8 & 1]
            self.store.release(process.session, refs)
            for ref in refs:
                self.model.released(process, ref)

    @rule(ns=choice, keys=names)
    def matches(self, ns: int, keys: list[str]) -> None:
        space, wanted = self.aim(ns, keys)
        found = self.store.match(space, wanted)
        assert [self.store.table.key[row] for row in found] == [k for _, k in self.run_of(space, wanted)]

    @rule(tenant=st.integers(0, 1), keys=names)
    def touches(self, tenant: int, keys: list[str]) -> None:
        self.store.touch(self.tenants[tenant], [key(name) for name in keys], self.scene.now)

    # -- management

    @rule(ns=choice, keys=some_names, everything=st.sampled_from([0, 0, 0, 7]))
    def removes(self, ns: int, keys: list[str], everything: int) -> None:
        space = self.namespaces[ns % len(self.namespaces)]
        if everything:
            self.clear(space, everything)
            return
        space, wanted = self.aim(ns, keys)
        gone = [n for n, found in self.model.blocks.items() if n[1] in wanted and found.namespace is space]
        with self.dropping(gone):
            assert self.store.remove(space, wanted) == len(gone)

    def clear(self, space: Namespace, rows: int) -> None:
        with self.dropping([name for name, found in self.model.blocks.items() if found.namespace is space]):
            at: int | None = 0
            while at is not None:
                at = self.store.clear_step(space, at, rows)

    @rule(ns=choice, keys=some_names, ttl_s=st.sampled_from([0, 1, 20, 60]))
    def pins(self, ns: int, keys: list[str], ttl_s: int) -> None:
        """For so many seconds, or (0) not any more."""
        space, wanted = self.aim(ns, keys)
        if not ttl_s:
            self.unpin(self.namespaces[ns % len(self.namespaces)], wanted)
            return
        count = self.store.pin(space, wanted, ttl_s, self.scene.now)
        pinned = 0
        for k in wanted:
            found = self.model.blocks.get((space.tenant.id, k))
            if found is not None and found.namespace is space:
                found.pinned = self.scene.now + ttl_s
                pinned += 1
        assert count == pinned

    def unpin(self, space: Namespace, wanted: list[bytes]) -> None:
        self.store.unpin(space, wanted)
        for k in wanted:
            found = self.model.blocks.get((space.tenant.id, k))
            if found is not None and found.namespace is space:
                found.pinned = None

    @rule(seconds=pauses)
    def time_goes_on(self, seconds: float) -> None:
        now = self.scene.tick(seconds)
        with self.dropping([n for n, b in self.model.blocks.items() if b.dies is not None and b.dies <= now]):
            while self.store.expire(now):
                pass
        for found in self.model.blocks.values():
            if found.pinned is not None and found.pinned <= now:
                found.pinned = None
        for process in self.model.processes:
            process.granted = {ref: at for ref, at in process.granted.items() if at > now}

    @rule(high=st.sampled_from([0.5, 0.75, 0.95]), low=st.sampled_from([0.25, 0.5]), most=st.integers(1, 8))
    def makes_room(self, high: float, low: float, most: int) -> None:
        before = self.model.evicted
        with self.evicting():
            self.store.evict_step(high, low, most)
        pools = {id(s.pool) for s in self.store.segments.live.values() if s.pool is not None}
        taken = room.EMPTY_BLOCKS * (1 + len(pools))
        assert self.model.evicted - before <= most * len(pools) + taken

    # -- administration

    @rule(what=st.sampled_from(["keys", "namespace", "tenant", "all"]), ns=choice, keys=names, rows=st.integers(1, 20))
    def evicts_as_asked(self, what: str, ns: int, keys: list[str], rows: int) -> None:
        """What is asked for goes, unless somebody holds it."""
        space, wanted = self.aim(ns, keys)
        chosen = [
            name
            for name, found in self.model.blocks.items()
            if what == "all"
            or (what == "tenant" and found.namespace.tenant is space.tenant)
            or (what == "namespace" and found.namespace is space)
            or (what == "keys" and name[0] == space.tenant.id and name[1] in wanted)
        ]
        held = [name for name in chosen if self.model.is_held(name)]
        done, asked = Reclaimed(), self.store.counts.evicted_asked
        with self.dropping([name for name in chosen if name not in held]):
            if what == "keys":
                reclaim.keys_step(self.store, space.tenant, list(dict.fromkeys(wanted)), done)
            else:
                tenant = space.tenant if what == "tenant" else None
                at: int | None = 0
                while at is not None:
                    at = reclaim.rows_step(self.store, tenant, space if what == "namespace" else None, at, rows, done)
        assert (done.blocks, done.held) == (len(chosen) - len(held), len(held))
        assert done.absent == (len(set(wanted)) - len(chosen) if what == "keys" else 0)
        assert self.store.counts.evicted_asked - asked == done.blocks

    @rule(tenant=st.sampled_from([None, 0, 1]), pages=st.integers(1, 30), most=st.integers(1, 4))
    def evicts_bytes_as_asked(self, tenant: int | None, pages: int, most: int) -> None:
        whose = None if tenant is None else self.tenants[tenant]
        there = [name for name, b in self.model.blocks.items() if whose in (None, b.namespace.tenant)]
        held, evicted, done = sum(map(self.model.is_held, there)), self.model.evicted, Reclaimed()
        with self.evicting():
            while reclaim.bytes_step(self.store, whose, pages * PAGE, most, done):
                pass
        left = [name for name in there if name in self.model.blocks]
        assert self.model.evicted - evicted == done.blocks == len(there) - len(left)
        assert done.held == (held if done.size_bytes < pages * PAGE else 0)
        assert done.size_bytes >= pages * PAGE or len(left) == held, "fewer bytes than there were to be had"

    # -- looking whether a put and a get work

    @rule(commits=st.booleans())
    def a_probe_changes_nothing(self, commits: bool) -> None:
        """And says that nothing can be put only where a writer who holds nothing is refused."""
        counts, table = vars(self.store.counts).copy(), len(self.store.namespaces)
        self.model.may_go = {(PROBE_TENANT, self.probe.key)}
        try:
            with self.probe.taken() as trial:
                if trial.row == NONE and commits:
                    self.probe.commit(trial, self.scene.now)
                    self.model.blocks[PROBE_TENANT, self.probe.key] = Block(self.namespaces[0], trial.ref, 0)
        except ResourceExhausted:
            assert not self.store.segments.unowned or self.store.segments.pools, "memory is there and nobody's"
        self.model.may_go.clear()
        assert (vars(self.store.counts), len(self.store.namespaces)) == (counts, table)

    # -- always

    @invariant()
    def all_agree(self) -> None:
        self.take_jobs()
        self.scene.check()
        self.model.compare(self.scene.index.published)


TestStore = StoreMachine.TestCase
