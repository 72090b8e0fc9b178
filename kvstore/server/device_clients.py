"""What the edge knows of clients of devices: which process each is, what it has there, and how it ends.

A client's copies go straight to memory, too: a kernel of its, or the copy engine of a device,
writes to slots of the slab that are page-locked. The exit of its process is seen before the last
of these has ended. So what a process was granted of memory stays in quarantine until every device
that it has used says that nothing of it runs there any more. A process may have a session for
memory and another one for devices: they are told to be one's by its number and its start.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvstore.core import leaving
from kvstore.core.holds import Session
from kvstore.logs import logger
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition, InvalidArgument

log = logger("kvstored.session")

if TYPE_CHECKING:  # a daemon without devices does not pay for their memory
    from kvstore.core.gpu_pool import GpuPool
    from kvstore.server.calls import Node
    from kvstored_cuda.devices.handles import Generation, Handle

Uses = Mapping[str, tuple[Sequence[int], Sequence[int]]]
"""Device -> slots leased and granted there."""


class DeviceClients:
    """Of one node; nothing but memory's store where it has no devices."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._lives: dict[int, Generation] = {}
        """Session -> its process, as the handles that it exports name it."""
        self._until_quiet: dict[int, Session] = {}
        """Sessions whose process is gone, and that were granted memory which a device may still be writing to."""

    def pools(self) -> list["GpuPool"]:
        """Of the devices that there are."""
        return [] if self._node.gpu is None else list(self._node.gpu.tier.pools.values())

    # -- what a client has

    def held_bytes(self, session: Session) -> int:
        """On all devices."""
        return sum(pool.held_bytes(session) for pool in self.pools())

    def granted(self, session: Session) -> int:
        """Slots that it was granted, in memory and on all devices."""
        here = [pool.session_here(session) for pool in self.pools()]
        return len(session.granted) + sum(len(of.granted) for of in here if of is not None)

    def maps(self, session: Session) -> bool:
        """Whether it was given memory of a device that it has not said to have closed."""
        return any(pool.maps(session) for pool in self.pools())

    def knows(self, session: Session) -> bool:
        """Whether it has used a device: kernels of its process may be at work, though it holds nothing."""
        return any(pool.session_here(session) is not None for pool in self.pools())

    def detaching(self, session: Session) -> Iterator[pb.DeviceDetach]:
        """What it is asked to close."""
        if self._node.gpu is None:
            return
        tier = self._node.gpu.tier
        for uuid, segments in tier.detaching(session):
            yield pb.DeviceDetach(device=uuid, generation=tier.pools[uuid].generation, segments=sorted(segments))

    def check_exporter(self, session: Session, handle: "Handle") -> None:
        """Raises FailedPrecondition for a handle that is not of this session's process, or of another life of it.

        What an event of a process says counts only while that process lives, and it is this one that is watched.
        """
        life = handle.generation
        known = self._lives.get(session.id, life)
        if life != known:
            raise FailedPrecondition(f"a handle of {life}, and this session's are of {known}")
        if session.born and life.born and life.born != session.born:
            raise FailedPrecondition(
                f"a handle of {life}, which began at {life.born} ticks since boot; the process of this session "
                f"({session.pid}) began at {session.born}"
            )
        self._lives[session.id] = life

    # -- how it ends

    def forget(self, session: Session) -> None:
        """The end of one that holds nothing, and has nothing mapped: it says so, or never had. Its process may live."""
        for pool in self.pools():
            pool.left(session)
        self.end_session(session, process_gone=True)

    def end_session(self, session: Session, *, process_gone: bool) -> None:
        """As `Store.end_session`, of all tiers."""
        node, pools = self._node, self.pools()
        writes = process_gone and bool(pools) and any(map(self._granted_to, self._of_process(session)))
        for pool in pools:
            pool.on_quiet = self.quiet
            pool.end_session(session, process_gone=process_gone, writes=writes)
        if process_gone:
            self._lives.pop(session.id, None)
        wait = process_gone and self._granted_to(session) and self._may_run(session)
        if wait:
            self._until_quiet[session.id] = session
        node.store.end_session(session, process_gone=process_gone and not wait)
        self._pump()

    def _of_process(self, session: Session) -> Iterator[Session]:
        """All sessions of its process, itself among them."""
        yield session
        for other in self._node.store.sessions.values():
            if other is not session and (other.pid, other.born) == (session.pid, session.born):
                yield other

    def _granted_to(self, session: Session) -> bool:
        return session.local and bool(session.granted)

    def _may_run(self, session: Session) -> bool:
        return any(pool.knows(session.pid, session.born) for pool in self.pools())

    def quiet(self, number: int) -> None:
        """Nothing of the process of that session can touch one of the devices any more; who waits for that looks again.

        Told by a pool (`GpuPool.on_quiet`), and by whoever has called `GpuPool.lose`, of every number that it answers.
        """
        ended = [session for session in self._until_quiet.values() if not self._may_run(session)]
        for session in ended:
            del self._until_quiet[session.id]
            self._node.store.end_session(session, process_gone=True)
        if ended:
            log.debug("a device is quiet", session=number, ended=len(ended))
            self._node.jobs_ready()

    def _pump(self) -> None:
        if self._node.gpu is not None:
            self._node.gpu.pump()

    # -- how another takes over

    def resume(self, old: Session, heir: Session, said: pb.Resume) -> None:
        """`heir` takes over what the process of `old` still uses, of all tiers. Where it raises nothing has changed."""
        node, uses = self._node, self._uses(old, said.devices)
        leaving.check_resume(node.store, old, heir, said.leased, said.granted)
        if node.gpu is not None:
            node.gpu.tier.resume(old, heir, uses)
        node.store.resume(old, heir, said.leased, said.granted)
        if old.id in self._lives:
            self._lives[heir.id] = self._lives.pop(old.id)
        self._pump()

    def _uses(self, old: Session, said: Sequence[pb.DeviceUses]) -> Uses:
        """What was said of devices where the old session has something; elsewhere there is nothing (any more)."""
        pools = {pool.uuid: pool for pool in self.pools()}
        uses: dict[str, tuple[Sequence[int], Sequence[int]]] = {}
        seen: set[str] = set()
        for of in said:
            if of.device in seen:
                raise InvalidArgument(f"device {of.device!r} is named twice in one Resume")
            seen.add(of.device)
            pool = pools.get(of.device)
            if pool is not None and pool.generation == of.generation and pool.session_here(old) is not None:
                uses[of.device] = list(of.leased), list(of.granted)
        return uses

    def kept(self, heir: Session, said: Sequence[pb.DeviceUses]) -> Iterator[pb.DeviceUses]:
        """Of what was said, what is the heir's now."""
        pools = {pool.uuid: pool for pool in self.pools()}
        for of in said:
            pool = pools.get(of.device)
            if pool is None or pool.generation != of.generation or pool.session_here(heir) is None:
                continue
            yield pb.DeviceUses(
                device=of.device, generation=of.generation, leased=of.leased, granted=pool.own(heir, of.granted)
            )
