"""A store with everything around it that tests need: a clock, an index that remembers, sessions, memory on request."""

from collections.abc import Callable, Sequence
from hashlib import blake2b

from kvstore.core import segments
from kvstore.core.audit import Published
from kvstore.core.holds import Namespace, Session, Tenant
from kvstore.core.segments import PAGE_BYTES, DropSegment, MakeSegment
from kvstore.core.store import Store
from kvstore.core.tree import Numbers

PAGE = PAGE_BYTES


def key_of(name: str) -> bytes:
    """A key like any other, the same for the same name."""
    return blake2b(name.encode(), digest_size=32).digest()


def chain(name: str, length: int) -> list[bytes]:
    """Keys of one prefix, root first."""
    return [key_of(f"{name}/{i}") for i in range(length)]


class Index:
    """What readers see, and a check that it is told only what makes sense."""

    def __init__(self) -> None:
        self.published: dict[tuple[int, bytes], Published] = {}
        self.on_withdraw: Callable[[int, bytes], None] = lambda tenant, key: None

    def publish(self, tenant: int, key: bytes, ref: int, offset: int, length: int, namespace: int) -> None:
        assert (tenant, key) not in self.published, "published twice"
        self.published[tenant, key] = (ref, offset, length, namespace)

    def fill(
        self, tenant: int, keys: list[bytes], refs: Numbers, offsets: Numbers, lengths: Numbers, namespaces: Numbers
    ) -> None:
        assert not any(of == tenant for of, _ in self.published), "filled and not empty"
        columns = (numbers.tolist() for numbers in (refs, offsets, lengths, namespaces))
        for key, *place in zip(keys, *columns, strict=True):
            self.publish(tenant, key, *place)

    def withdraw(self, tenant: int, key: bytes) -> None:
        del self.published[tenant, key]
        self.on_withdraw(tenant, key)


class Scene:
    """`slots` pages of memory in segments of `in_segment` pages, one tenant, one namespace, one session, a clock.

    `check()` audits everything; tests call it after each step that matters.
    """

    def __init__(self, slots: int = 64, in_segment: int = 1, *, ready: bool = True) -> None:
        wanted = segments.SEGMENTS_WANTED
        segments.SEGMENTS_WANTED = slots // in_segment
        self.index = Index()
        try:
            self.store = Store(slots * PAGE, self.index)
        finally:
            segments.SEGMENTS_WANTED = wanted
        self.now = 100.0
        self.dropped: list[int] = []
        self.tenant = self.store.tenant("default")
        self.ns = self.namespace()
        self.session = self.open()
        if ready:
            self.run_jobs()

    def namespace(self, name: str = "ns", size_bytes: int = PAGE, tenant: Tenant | None = None) -> Namespace:
        return self.store.open_namespace(tenant or self.tenant, key_of(name), size_bytes, name)

    def open(self, tenant: Tenant | None = None, *, local: bool = True, read_only: bool = False) -> Session:
        number = len(self.store.sessions)
        return self.store.open_session(
            tenant or self.tenant,
            f"client {number}",
            self.now,
            local=local,
            read_only=read_only,
            pid=1000 + number,
            nonce=number,
        )

    def tick(self, seconds: float = 10.0) -> float:
        self.now += seconds
        return self.now

    def run_jobs(self) -> int:
        """Carries out what the store wants done with memory; answers how many segments were made."""
        made = 0
        while jobs := self.store.take_jobs():
            for job in jobs:
                if isinstance(job, MakeSegment):
                    self.store.segments.made(job.segment)
                    made += 1
                else:
                    self.dropped.append(job.segment)
        return made

    def waiting_jobs(self) -> tuple[list[MakeSegment], list[DropSegment]]:
        """Takes what the store wants done, and leaves it to the test."""
        jobs = self.store.take_jobs()
        return [j for j in jobs if isinstance(j, MakeSegment)], [j for j in jobs if isinstance(j, DropSegment)]

    def commit(
        self,
        keys: Sequence[bytes],
        refs: Sequence[int],
        *,
        after: bytes = b"",
        depth: int = 0,
        ns: Namespace | None = None,
        session: Session | None = None,
        ttl_s: float = 0.0,
    ) -> list[int]:
        """Commits a run of a chain; `after` is the parent of its first block."""
        parents = [after, *keys[:-1]]
        depths = [depth + i for i in range(len(keys))]
        return self.store.commit(session or self.session, ns or self.ns, keys, refs, parents, depths, self.now, ttl_s)

    def put(
        self,
        keys: Sequence[bytes],
        *,
        start: int = 0,
        batch: int = 4,
        ns: Namespace | None = None,
        session: Session | None = None,
        ttl_s: float = 0.0,
    ) -> int:
        """Stores keys[start:] of a chain as a client does: in batches, what is there is skipped; how many are new."""
        session, ns = session or self.session, ns or self.ns
        stored = 0
        at = start
        while at < len(keys):
            here = keys[at : at + batch]
            missing = [key for key in here if not self.present(key, ns)]
            refs = self.reserve(len(missing), ns, session) if missing else []
            for key, ref in zip(missing, refs, strict=False):
                place = keys.index(key)
                self.commit(
                    [key],
                    [ref],
                    after=keys[place - 1] if place else b"",
                    depth=place,
                    ns=ns,
                    session=session,
                    ttl_s=ttl_s,
                )
                stored += 1
            if len(refs) < len(missing):
                continue
            at += len(here)
        return stored

    def reserve(self, count: int = 1, ns: Namespace | None = None, session: Session | None = None) -> list[int]:
        return self.store.reserve(session or self.session, ns or self.ns, count, self.now)

    def acquire(self, keys: Sequence[bytes], ns: Namespace | None = None, session: Session | None = None) -> list[int]:
        return self.store.acquire(session or self.session, ns or self.ns, keys, self.now)

    def fill(self, ns: Namespace | None = None, session: Session | None = None, name: str = "fill") -> list[bytes]:
        """Stores roots until every slot that the pool can have holds a block; their keys, oldest first."""
        ns = ns or self.ns
        keys: list[bytes] = []
        evicted = self.store.counts.evicted
        while self.store.counts.evicted == evicted:
            keys.append(key_of(f"{name} {len(keys)}"))
            self.tick()
            self.put([keys[-1]], ns=ns, session=session)
        return keys[1:]

    def present(self, key: bytes, ns: Namespace | None = None) -> bool:
        return self.store.match(ns or self.ns, [key]) != []

    def here(self, keys: Sequence[bytes], ns: Namespace | None = None) -> list[int]:
        """Places in `keys` of those that are present."""
        return [i for i, key in enumerate(keys) if self.present(key, ns)]

    def mapped(self, session: Session, refs: Sequence[int]) -> None:
        """`session` was given the descriptors of these slots' segments."""
        for ref in refs:
            self.store.segments.live[ref >> 32].sessions.add(session.id)

    def check(self) -> None:
        self.store.check(self.index.published)
