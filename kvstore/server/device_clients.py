"""What the edge knows of clients of devices: which process each is, what it has there, and how it ends.

A client's copies go straight to memory, too: a kernel of its, or the copy engine of a device,
writes to slots of the slab that are page-locked. The exit of its process is seen before the last
of these has ended. So what a process was granted of memory stays in quarantine until every device
that it may have used says that nothing of it runs there any more. A process may have a session for
memory and another one for devices: they are told to be one's by its number and its start.

A process may have used a device once it was told of it (`Devices`), also where it holds nothing
there, where the device was lost meanwhile, and where it was the daemon before this one that told
it (`adopted`): then any of them. What nobody can tell is kept, and `degraded` says so.
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
        self._adopted: set[tuple[int, int]] = set()
        """Processes of sessions of the daemon before this one: nobody knows here which devices they have used."""

    def pools(self) -> list["GpuPool"]:
        """Of the devices that there are."""
        return [] if self._node.gpu is None else list(self._node.gpu.tier.pools.values())

    def told(self, session: Session) -> None:
        """Its process learns which devices there are: it may use those that are in use from now on."""
        for pool in self.pools():
            if session.local and not session.read_only and not pool.trouble:
                pool.strays.add(session.pid, session.born)

    def adopted(self, session: Session) -> None:
        """A session of the daemon before this one, which has ended; its process may have, too."""
        if self._node.gpu is not None:
            self._adopted.add((session.pid, session.born))
            self._node.gpu.tier.added = self._came
            for pool in self.pools():
                pool.strays.add(session.pid, session.born)

    def _came(self, pool: "GpuPool") -> None:
        """A device was opened after sessions were adopted."""
        pool.on_quiet = self.quiet
        for pid, born in self._adopted:
            pool.strays.add(pid, born)
        for session in self._until_quiet.values():
            pool.strays.gone(session.pid, session.born)

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
        of_process = list(self._of_process(session)) if process_gone and pools else []
        writes = any(map(self._granted_to, of_process))
        for pool in pools:
            pool.on_quiet = self.quiet
            if len(of_process) == 1 and not writes:  # the last one: whatever its process does, it has no memory
                pool.strays.quiet(session.pid, session.born)
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
        if any(pool.knows(session.pid, session.born) for pool in self.pools()):
            return True
        return not self.pools() and (session.pid, session.born) in self._adopted  # and nobody is there to say it

    def degraded(self) -> list[str]:
        """What is kept because a device does not say that it may be used again."""
        away = [f"device {pool.uuid} is out of use" for pool in self.pools() if pool.trouble]
        if not self._until_quiet or (self.pools() and not away):
            return []
        why = ", ".join(away) or "there is no device"
        return [
            f"memory granted to dead processes ({len(self._until_quiet)} sessions) is kept until it is told that "
            f"nothing of them runs on a device: {why}"
        ]

    def quiet(self, number: int) -> None:
        """Nothing of the process of that session can touch one of the devices any more; who waits for that looks again.

        Told by a pool (`GpuPool.on_quiet`), and by whoever has called `GpuPool.lose`, of every number that it answers.
        """
        ended = [session for session in self._until_quiet.values() if not self._may_run(session)]
        for session in ended:
            del self._until_quiet[session.id]
            self._adopted.discard((session.pid, session.born))
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
