"""What the rules of test_store_machine.py work on: the store, its model, and how examples choose from them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

from hypothesis.stateful import RuleBasedStateMachine

from kvstore.core import block, evict, families, holds, room, tree
from kvstore.core.holds import Namespace, Tenant
from kvstore.core.probe import Probe
from kvstore.core.segments import MakeSegment
from tests.core.examples import PARENTS, SIZES, key
from tests.core.model import Model, Name, Process
from tests.core.scene import PAGE, Scene, key_of


class Machine(RuleBasedStateMachine):
    """Two tenants, five namespaces of four sizes, a handful of processes, 28 pages."""

    def __init__(self) -> None:
        super().__init__()
        self._patches = [
            mock.patch.object(block, "GROW_ROWS", 16),
            mock.patch.object(holds, "GRANT_SHARE", 6),
            mock.patch.object(evict, "PASS_MAX", 1),
            mock.patch.object(room, "EMPTY_BLOCKS", 1),
            mock.patch.object(room, "STEP_POOLS", 2),
            mock.patch.object(families, "SETTLE_NOW", 0),
            mock.patch.object(tree, "SETTLE_STEP", 1),
            mock.patch.object(tree, "CLIMB_MAX", 1),
            mock.patch.object(tree, "CLIMBS_MAX", 2),
            mock.patch.object(tree, "UNTIL_SLACK", 0),
            mock.patch.object(tree, "SIFT_STEP", 1),
        ]
        for patch in self._patches:
            patch.start()
        self.scene = Scene(28, 4, ready=False)
        self.store = self.scene.store
        self.model = Model(self.store)
        self.scene.index.on_withdraw = self.model.withdrawn
        self.store.end_session(self.scene.session, process_gone=True)
        other = self.store.tenant("other")
        self.namespaces = [self.scene.namespace(name, size) for name, size in SIZES.items()]
        self.namespaces.append(self.scene.namespace("one", PAGE, other))
        self.tenants = [self.scene.tenant, other]
        self.probe = Probe(self.store, key_of("nobody's"))
        self.jobs: list[MakeSegment] = []
        self.written = 0
        self.take_jobs()

    def teardown(self) -> None:
        for patch in self._patches:
            patch.stop()

    # -- choosing

    def process(self, number: int, wanted: Callable[[Process], bool] = lambda _: True) -> Process | None:
        able = [process for process in self.model.processes if wanted(process)]
        return able[number % len(able)] if able else None

    def writer(self, number: int) -> Process | None:
        return self.process(number, lambda process: not process.ended)

    def ns(self, number: int, process: Process) -> Namespace:
        able = [ns for ns in self.namespaces if ns.tenant is process.session.tenant]
        return able[number % len(able)]

    def aim(self, at: int, keys: list[str], tenant: Tenant | None = None) -> tuple[Namespace, list[bytes]]:
        """A namespace and keys in it; mostly such that the first one is there."""
        wanted = [key(name) for name in keys]
        there = [
            (found.namespace, k)
            for (_, k), found in self.model.blocks.items()
            if tenant in (None, found.namespace.tenant)
        ]
        if there and at % 4:
            space, first = there[at % len(there)]
            return space, [first, *(k for k, parent in PARENTS.items() if parent == first), *wanted]
        able = [space for space in self.namespaces if tenant in (None, space.tenant)]
        return able[at % len(able)], wanted

    @contextmanager
    def evicting(self) -> Iterator[None]:
        self.model.may_evict = True
        try:
            yield
        finally:
            self.model.may_evict = False

    @contextmanager
    def dropping(self, names: Iterable[Name]) -> Iterator[None]:
        """These go, all of them; nothing else does."""
        self.model.may_go = {name for name in names if name in self.model.blocks}
        yield
        assert not self.model.may_go, "something that was to go is still there"

    def content(self) -> int:
        self.written += 1
        return self.written

    def run_of(self, ns: Namespace, keys: list[bytes]) -> list[Name]:
        """The leading run of `keys` that the model has."""
        names: list[Name] = []
        for k in keys:
            found = self.model.blocks.get((ns.tenant.id, k))
            if found is None or found.namespace is not ns:
                break
            names.append((ns.tenant.id, k))
        return names

    def take_jobs(self) -> None:
        for job in self.store.take_jobs():
            if isinstance(job, MakeSegment):
                self.jobs.append(job)
                continue
            self.model.dropped(job.segment)
