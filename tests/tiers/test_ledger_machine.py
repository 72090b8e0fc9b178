"""The ledger against the store's model: at any moment the daemon may be replaced, and nothing is lost, reused or wrong.

The same machine as tests/core/test_store_machine.py, whose store writes down what it does on real
memory; now and then another store is put together from that, and takes the place of the first.
"""

import os
from unittest import mock

from hypothesis import settings
from hypothesis.stateful import rule

from kvstore.core import adopt
from kvstore.core.adopt import Adoption, record
from kvstore.core.holds import Session, Tenant
from kvstore.core.probe import Probe
from kvstore.core.segments import DropSegment, MakeSegment, Segment
from kvstore.core.store import Store
from kvstore.tiers import ledger as layout
from kvstore.tiers.ledger import Ledger
from kvstore.tiers.ledger_reader import Left, read, read_header, rows_name
from kvstore.tiers.slab import sealed_memfd, segment_name
from tests.core.examples import subset
from tests.core.model import Process
from tests.core.scene import Index, key_of
from tests.core.test_store_machine import StoreMachine


class RestartMachine(StoreMachine):
    """Every call of the store, and the daemon replaced in between."""

    def __init__(self) -> None:
        super().__init__()
        patch = mock.patch.object(layout, "LOG_FIRST", 8)
        patch.start()
        self._patches.append(patch)
        self.memory: dict[str, int] = {}
        self.last_nonce = 0
        self.scene.open = self.open_session  # type: ignore[method-assign]
        self.descriptor = sealed_memfd("kvstored-test-ledger", layout.LEDGER_BYTES)
        self.ledger = self.ledger_on_memory()
        self.ledger.begin(self.store.segments.size_bytes, self.store.segments.page_bytes, os.getpid(), 1, bytes(16))
        for tenant in self.store.tenants.values():
            self.ledger.tenant(tenant)
        for namespace in self.store.namespaces:
            self.ledger.namespace(namespace)
        self.write_down()

    def teardown(self) -> None:
        super().teardown()
        for descriptor in (*self.memory.values(), self.descriptor):
            os.close(descriptor)

    def open_session(self, tenant: Tenant | None = None, *, local: bool = True, read_only: bool = False) -> Session:
        """As the scene does, with a name that no other session has, also of another daemon."""
        self.last_nonce += 1
        return self.store.open_session(
            tenant or self.scene.tenant,
            f"client {self.last_nonce}",
            self.scene.now,
            local=local,
            read_only=read_only,
            pid=1000 + self.last_nonce,
            nonce=self.last_nonce,
            born=self.last_nonce,
        )

    def ledger_on_memory(self) -> Ledger:
        made = Ledger(os.dup(self.descriptor))
        made.rows_for = self.rows_for
        made.rows_gone = lambda number: os.close(self.memory.pop(rows_name(number)))
        return made

    def rows_for(self, number: int, size_bytes: int) -> int:
        found = self.memory[rows_name(number)] = sealed_memfd("kvstored-test-rows", layout.rows_bytes(size_bytes))
        return os.dup(found)

    def write_down(self) -> None:
        record(self.store, self.ledger)
        segments, made = self.store.segments, self.store.segments.made

        def made_and_written(number: int) -> Segment:
            size_bytes = segments.making[number]
            descriptor = self.memory[segment_name(number)] = sealed_memfd("kvstored-test-segment", size_bytes)
            self.ledger.made(number, size_bytes, os.fstat(descriptor).st_ino)
            return made(number)

        segments.made = made_and_written  # type: ignore[method-assign,assignment]

    def take_jobs(self) -> None:
        for job in self.store.take_jobs():
            if isinstance(job, DropSegment):
                self.ledger.dropping(job.segment)
                os.close(self.memory.pop(segment_name(job.segment)))
                self.model.dropped(job.segment)
            else:
                self.jobs.append(job)

    def attaches_again(self, old: Process, keep: int) -> None:
        """What was reserved of a daemon before can be given back, and that is all."""
        super().attaches_again(old, keep)
        heir = self.model.processes[-1]
        half_written = sorted(heir.session.half_written)
        assert heir.session.half_written <= heir.session.granted.keys()
        self.store.abort(heir.session, half_written)
        for ref in half_written:
            del heir.granted[ref]

    @rule(die=subset)
    def the_daemon_is_replaced(self, die: int) -> None:
        """Meanwhile some clients' processes end; those without shared memory had their holds in the daemon."""
        while adopt.write_uses(self.store, 3):
            pass
        was, self.jobs = self.store, []
        survivors = [
            process for i, process in enumerate(self.model.processes) if process.session.local and not die >> i % 8 & 1
        ]
        header = read_header(self.descriptor)
        self.ledger = self.ledger_on_memory()
        left = read(self.ledger, self.memory, header.last_segment)
        nonces = {process.session.nonce for process in survivors}
        for found in left.found.sessions:
            if found.nonce not in nonces:
                self.ledger.strike_session(found.place)
        left.found.sessions = [found for found in left.found.sessions if found.nonce in nonces]
        self.begin_again(was, Adoption(self.new_store(was), left.found, self.scene.now), left)
        self.follow(was, survivors)
        self.write_down()
        for _ in range(2):
            self.opens(0, local=True)
        self.opens(1, local=True)

    def new_store(self, was: Store) -> Store:
        self.scene.index = Index()
        self.scene.index.on_withdraw = self.model.withdrawn
        made = Store(was.segments.size_bytes, self.scene.index)
        made.segments.segment_bytes = was.segments.segment_bytes
        made.segments.take_back()
        return made

    def begin_again(self, was: Store, adoption: Adoption, left: Left) -> None:
        store = adoption.store
        adoption.begin()
        assert store.segments.live.keys() == was.segments.live.keys(), "a segment is lost"
        for segment in left.found.segments:
            self.ledger.adopted(segment.id, left.rows[segment.id], left.slots[segment.id])
        adoption.blocks(left.blocks())
        adoption.sessions()
        done = adoption.end()
        assert (done.refused, done.without) == ([], [])
        assert done.whole == {session.id for _, session in done.sessions}
        for found, session in done.sessions:
            self.ledger.kept(session, found.place)
        self.sessions: dict[int, Session] = {session.nonce: session for _, session in done.sessions}
        self.store = self.scene.store = self.model.store = store
        self.take_jobs()
        assert all(isinstance(job, MakeSegment) for job in self.jobs)

    def follow(self, was: Store, survivors: list[Process]) -> None:
        """The model and the machine speak of the new store."""
        for process in survivors:
            process.session, process.ended = self.sessions.pop(process.session.nonce), True
            process.mapped &= self.store.segments.live.keys()
        assert not self.sessions, "sessions of nobody"
        self.model.processes = survivors
        self.namespaces = [self.store.namespaces[space.id - 1] for space in self.namespaces]
        self.tenants = [self.store.tenants[tenant.name] for tenant in self.tenants]
        self.scene.tenant, self.scene.ns = self.tenants[0], self.store.namespaces[self.scene.ns.id - 1]
        for (tenant, key), block in self.model.blocks.items():
            namespace = block.namespace = self.store.namespaces[block.namespace.id - 1]
            now, before = namespace.tenant.rows[key], was.tenants[namespace.tenant.name].rows[key]
            for column in ("used", "stored", "hits"):  # depths that contradict each other may come out otherwise
                assert getattr(self.store.table, column)[now] == getattr(was.table, column)[before], column
            assert namespace.tenant.id == tenant
        self.probe = Probe(self.store, key_of("nobody's"))


RestartMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=80)
TestLedger = RestartMachine.TestCase
