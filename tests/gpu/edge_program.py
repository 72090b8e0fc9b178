"""A client of devices that has the contract, the session socket and a HostDevice alone; and the same as a process.

    python -m tests.gpu.edge_program SOCKET UUID WHAT

says one line when it has done WHAT, and waits to be killed: `committed`, it has a commit whose copy
(and so its event) takes as long as its faults say; `writing`, it has besides a slot in memory,
reserved by a session of its own. `many:NAME`: puts block after block, and says the number of each.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from kvstored.v1 import PROTOCOL
from kvstored.v1 import kvstore_pb2 as pb
from kvstored_cuda.devices import Direction, Event, Generation, Handle, Mapping
from kvstored_cuda.devices.faults import VARIABLE, FaultPlan
from kvstored_cuda.devices.host_device import HostDevice
from kvstored_cuda.devices.host_pages import address_of
from tests.conftest import RunningDaemon, eventually, wait_for_line
from tests.gpu.gpu_nodes import GpuNode
from tests.nodes import block
from tests.server.ssd_program import Program
from tests.wire import Wire

BLOCK = 64 << 10
CLIENT_BYTES = 64 << 20
COPY_S = 60.0


class DeviceProgram(Program):
    """One session, one namespace, one device; a block's bytes follow from its key, as those of a Program."""

    def __init__(
        self,
        socket: Path,
        uuid: str,
        *,
        tenant: str = "",
        namespace: str = "ns",
        plan: FaultPlan | None = None,
        resume: pb.Resume | None = None,
        read_only: bool = False,
    ) -> None:
        self.wire = Wire(socket, hello=False)
        hello = pb.HelloRequest(protocol=PROTOCOL, client="wire", tenant=tenant, resume=resume, read_only=read_only)
        try:
            self.hello = self.wire.call(hello=hello).hello
        except BaseException:
            self.wire.close()
            raise
        self.token = self.hello.token
        self.maps = {}
        opened = self.wire.call(
            open_namespace=pb.OpenNamespaceRequest(digest=block(namespace, 32), block_bytes=BLOCK, label=namespace)
        ).open_namespace
        self.number, self.slot_bytes = opened.namespace_id, opened.slot_bytes
        self.uuid = uuid
        self.device = HostDevice(uuid, CLIENT_BYTES, plan)
        self.stream = self.device.stream()
        self.opened: dict[int, Mapping] = {}
        self.look()

    def look(self) -> None:
        """What devices there are, and of which generation ours is."""
        self.devices = self.wire.call(devices=pb.DevicesRequest()).devices
        self.exporter = Generation.from_bytes(self.devices.exporter)
        self.generation = next(one.generation for one in self.devices.devices if one.uuid == self.uuid)

    def close(self) -> None:
        self.wire.close()
        self.device.close()

    # -- calls

    def request(self, **op: Any) -> pb.DeviceRequest:
        return pb.DeviceRequest(device=self.uuid, generation=self.generation, **op)

    def ask_device(self, **op: Any) -> pb.DeviceReply:
        """Raises the error that is answered."""
        return self.wire.call(device=self.request(**op)).device

    def reserve(self, count: int) -> list[int]:
        slots: list[int] = []
        while len(slots) < count:
            want = pb.ReserveRequest(namespace_id=self.number, count=count - len(slots))
            slots += self.ask_device(reserve=want).reserve.slots
        return slots

    def commit_request(self, keys: Sequence[bytes], slots: Sequence[int], event: bytes = b"") -> pb.DeviceCommitRequest:
        """Of a chain from its root."""
        commit = pb.CommitRequest(
            namespace_id=self.number,
            keys=keys,
            slots=slots,
            parents=[keys[i - 1] if i else b"" for i in range(len(keys))],
            depths=range(len(keys)),
        )
        return pb.DeviceCommitRequest(commit=commit, event=event)

    def commit_on_device(self, keys: Sequence[bytes], slots: Sequence[int], event: bytes = b"") -> pb.CommitReply:
        return self.ask_device(commit=self.commit_request(keys, slots, event)).commit

    def put_on_device(self, keys: Sequence[bytes]) -> tuple[pb.CommitReply, Event]:
        """Copies, records and commits; the event is the caller's to close once the commit has ended."""
        slots = self.reserve(len(keys))
        self.write(slots, keys)
        event = self.record()
        assert event.handle is not None, "an event without a handle"
        return self.commit_on_device(keys, slots, event.handle.to_bytes()), event

    def stored_on_device(self, keys: Sequence[bytes]) -> list[int]:
        """The same, and its results."""
        reply, event = self.put_on_device(keys)
        found = self.ended_commit(reply)
        event.close()
        assert (found.state, found.why) == (pb.TICKET_DONE, "")
        return list(found.results)

    def ended_commit(self, reply: pb.CommitReply) -> pb.TicketReply:
        found: pb.TicketReply = eventually(lambda: self.ended_ticket(reply.ticket), what="the end of a commit")
        return found

    def prefetched(self, keys: Sequence[bytes], deadline_ms: int = 30_000) -> pb.TicketReply:
        """A prefetch to the device, and its end."""
        request = pb.PrefetchRequest(namespace_id=self.number, keys=keys, deadline_ms=deadline_ms)
        reply = self.ask_device(prefetch=request).prefetch
        found: pb.TicketReply = eventually(lambda: self.ended_ticket(reply.ticket), what="the end of a prefetch")
        return found

    def acquired_on_device(self, keys: Sequence[bytes]) -> list[int]:
        request = pb.AcquireRequest(namespace_id=self.number, keys=keys)
        return list(self.ask_device(acquire=request).acquire.slots)

    def release_on_device(self, slots: Sequence[int]) -> None:
        self.ask_device(release=pb.ReleaseRequest(slots=slots))

    # -- bytes

    def address(self, slot: int) -> int:
        """Where a slot of the device is in this process."""
        segment, number = slot >> 32, slot & 0xFFFFFFFF
        if segment not in self.opened:
            (found,) = self.ask_device(segments=pb.SegmentsRequest(ids=[segment])).segments.segments
            handle = Handle.from_bytes(found.handle)
            if handle.kind == handle.kind.DESCRIPTOR:
                handle = Handle.from_bytes(found.handle, self.wire.descriptors[-1])
            self.opened[segment] = self.device.open(handle, self.exporter)
        return self.opened[segment].address + number * self.slot_bytes

    def write(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        """Enqueues copies of the keys' blocks."""
        for slot, key in zip(slots, keys, strict=True):
            raw = bytearray(block(key, BLOCK))
            self.device.copy(self.address(slot), address_of(raw), BLOCK, Direction.HOST_TO_DEVICE, self.stream)

    def record(self) -> Event:
        event = self.device.event()
        event.record(self.stream)
        return event

    def read(self, slot: int) -> bytes:
        """The bytes of a slot of the device, once what is enqueued is done."""
        raw = bytearray(BLOCK)
        self.device.copy(address_of(raw), self.address(slot), BLOCK, Direction.DEVICE_TO_HOST, self.stream)
        self.stream.synchronize(COPY_S)
        return bytes(raw)

    def check_device(self, keys: Sequence[bytes]) -> None:
        """The device has all of these, byte for byte."""
        slots = self.acquired_on_device(keys)
        assert len(slots) == len(keys), f"{len(slots)} of {len(keys)} blocks are on the device"
        for slot, key in zip(slots, keys, strict=True):
            assert self.read(slot) == block(key, BLOCK), f"bytes of another block under {key.hex()[:12]}"
        self.release_on_device(slots)

    def check_memory(self, keys: Sequence[bytes]) -> None:
        """Memory has all of these, byte for byte."""
        slots = self.load(keys).slots
        assert len(slots) == len(keys), f"{len(slots)} of {len(keys)} blocks are in memory"
        self.check(keys, slots)
        self.release(slots)


Make = Callable[..., DeviceProgram]


@contextlib.contextmanager
def programs(node: GpuNode) -> Iterator[Make]:
    """Makes clients on the first device of a node, and closes them."""
    made: list[DeviceProgram] = []

    def make(**settings: Any) -> DeviceProgram:
        made.append(DeviceProgram(node.socket, node.uuids[0], **settings))
        return made[-1]

    try:
        yield make
    finally:
        for one in made:
            one.close()


class Process:
    """The same in another process, which can be killed."""

    def __init__(self, daemon: RunningDaemon, uuid: str, what: str, faults: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.edge_program", str(daemon.socket), uuid, what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, VARIABLE: faults},
        )
        self.pid = self._process.pid
        self.said = self.next_line()

    def next_line(self) -> str:
        return wait_for_line(self._process)

    def kill(self) -> None:
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self._process.communicate(timeout=COPY_S)


def put_many(program: DeviceProgram, name: str) -> NoReturn:
    """Two commits are under way at a time."""
    waiting: deque[tuple[pb.CommitReply, Event]] = deque()
    for i in count():
        waiting.append(program.put_on_device([block((name, i), 32)]))
        print(i, flush=True)
        if len(waiting) > 1:
            reply, event = waiting.popleft()
            found = program.ended_commit(reply)
            assert list(found.results) == [pb.STORED], found
            event.close()
    raise AssertionError("numbers do not end")


def main(socket: str, uuid: str, what: str) -> None:
    """As the docstring of the module says."""
    program = DeviceProgram(Path(socket), uuid, plan=FaultPlan.from_environment())
    if what.startswith("many:"):
        put_many(program, what)
    keys = [block((what, i), 32) for i in range(2)]
    program.put_on_device(keys)
    if what == "writing":
        beside = Wire(Path(socket))
        opening = pb.OpenNamespaceRequest(digest=block("ns", 32), block_bytes=BLOCK, label="ns")
        number = beside.call(open_namespace=opening).open_namespace.namespace_id
        beside.call(reserve=pb.ReserveRequest(namespace_id=number, count=1))
    print("committed", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
