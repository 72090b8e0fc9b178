"""An engine that speaks the protocol of devices by itself, without the SDK; here, or in a process of its own.

Its device is a HostDevice, whose copies are as slow as its faults say, or a GPU. Blocks are named by numbers:
key and bytes follow from them, so that every side knows what has to be where.
"""

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import KVStoreError
from kvstored_cuda.devices import Device, Direction, Event, Generation, Handle, Mapping
from kvstored_cuda.devices.discovery import device_of
from kvstored_cuda.devices.faults import VARIABLE, FaultPlan
from kvstored_cuda.devices.host_device import HostDevice
from kvstored_cuda.devices.host_pages import address_of
from tests.conftest import wait_for_line
from tests.wire import Wire

BLOCK_BYTES = 64 << 10
DEVICE_BYTES = 256 << 20
WAIT_MS, WAIT_S = 1000, 60.0
ANSWER_S = 90.0


def key_of(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number, digest_size=32).digest()


def bytes_of(number: int, size_bytes: int = BLOCK_BYTES) -> bytes:
    return np.random.default_rng(number).bytes(size_bytes)


def device_named(uuid: str) -> Device:
    """This process's side of it."""
    if uuid.startswith("HOST-"):
        return HostDevice(uuid, DEVICE_BYTES, FaultPlan.from_environment())
    return device_of(uuid, {})


class RawEngine:
    """One session, and one device of one daemon."""

    def __init__(
        self, path: Path, uuid: str, device: Device | None = None, block_bytes: int = BLOCK_BYTES, tenant: str = ""
    ) -> None:
        self.wire = Wire(path, tenant=tenant)
        self.uuid, self.block_bytes = uuid, block_bytes
        self.device = device or device_named(uuid)
        self.stream = self.device.stream()
        self.mapped: dict[int, Mapping] = {}
        self.events: list[Event] = []
        self.look()
        digest = hashlib.blake2b(b"%d" % block_bytes, digest_size=32).digest()
        opened = self.wire.call(
            open_namespace=pb.OpenNamespaceRequest(digest=digest, block_bytes=block_bytes, label="raw")
        ).open_namespace
        self.namespace = opened.namespace_id

    def look(self) -> None:
        """What the daemon says of its devices now."""
        said = self.wire.call(devices=pb.DevicesRequest()).devices
        self.exporter = Generation.from_bytes(said.exporter)
        (self.said,) = [device for device in said.devices if device.uuid == self.uuid]
        self.slot_bytes = -(-self.block_bytes // self.said.page_bytes) * self.said.page_bytes

    def ask(self, **op: Any) -> pb.DeviceReply:
        request = pb.DeviceRequest(device=self.uuid, generation=self.said.generation, **op)
        return self.wire.call(device=request).device

    # -- memory

    def address(self, slot: int) -> int:
        """Where a slot is mapped here; its segment is opened at the first need."""
        segment = slot >> 32
        if segment not in self.mapped:
            (found,) = self.ask(segments=pb.SegmentsRequest(ids=[segment])).segments.segments
            descriptor = self.wire.descriptors.pop() if self.wire.descriptors else -1
            self.mapped[segment] = self.device.open(Handle.from_bytes(found.handle, descriptor), self.exporter)
        return self.mapped[segment].address + (slot & 0xFFFFFFFF) * self.slot_bytes

    def reserve(self, count: int) -> list[int]:
        return list(self.ask(reserve=pb.ReserveRequest(namespace_id=self.namespace, count=count)).reserve.slots)

    def write(self, slots: Sequence[int], numbers: Sequence[int]) -> Event:
        """Enqueues the bytes of these blocks, and an event behind them."""
        for slot, number in zip(slots, numbers, strict=True):
            raw = bytearray(bytes_of(number, self.block_bytes))
            self.device.copy(self.address(slot), address_of(raw), len(raw), Direction.HOST_TO_DEVICE, self.stream)
        event = self.device.event()
        event.record(self.stream)
        self.events.append(event)
        return event

    def read(self, slot: int) -> bytes:
        buffer = bytearray(self.block_bytes)
        self.device.copy(address_of(buffer), self.address(slot), len(buffer), Direction.DEVICE_TO_HOST, self.stream)
        self.stream.synchronize(WAIT_S)
        return bytes(buffer)

    # -- blocks

    def commit(self, slots: Sequence[int], numbers: Sequence[int], event: Event | None) -> int:
        """A chain; the ticket, 0 where it was over at once."""
        keys = [key_of(number) for number in numbers]
        commit = pb.CommitRequest(
            namespace_id=self.namespace,
            keys=keys,
            slots=slots,
            parents=[b"", *keys[:-1]],
            depths=range(len(keys)),
        )
        raw = b"" if event is None or event.handle is None else event.handle.to_bytes()
        return int(self.ask(commit=pb.DeviceCommitRequest(commit=commit, event=raw)).commit.ticket)

    def ticket(self, number: int, wait_s: float = WAIT_S) -> pb.TicketReply:
        """Its end."""
        until = time.monotonic() + wait_s
        while True:
            found = self.wire.call(ticket=pb.TicketRequest(ticket=number, wait_ms=WAIT_MS)).ticket
            if found.state != pb.TICKET_RUNNING:
                return found
            assert time.monotonic() < until, f"ticket {number} did not end within {wait_s} s"

    def put(self, numbers: Sequence[int]) -> pb.TicketReply:
        """Reserves, writes, commits with an event, and waits for the end."""
        slots: list[int] = []
        while len(slots) < len(numbers):
            slots += self.reserve(len(numbers) - len(slots))
        return self.ticket(self.commit(slots, numbers, self.write(slots, numbers)))

    def acquire(self, numbers: Sequence[int]) -> list[int]:
        keys = [key_of(number) for number in numbers]
        return list(self.ask(acquire=pb.AcquireRequest(namespace_id=self.namespace, keys=keys)).acquire.slots)

    def get(self, numbers: Sequence[int]) -> list[bytes]:
        """The bytes of the leading run that the device has."""
        slots = self.acquire(numbers)
        found = [self.read(slot) for slot in slots]
        if slots:
            self.ask(release=pb.ReleaseRequest(slots=slots))
        return found

    def prefetch(self, numbers: Sequence[int], deadline_ms: int = 20_000) -> pb.TicketReply:
        keys = [key_of(number) for number in numbers]
        request = pb.PrefetchRequest(namespace_id=self.namespace, keys=keys, deadline_ms=deadline_ms)
        return self.ticket(self.ask(prefetch=request).prefetch.ticket)

    def tiers(self, numbers: Sequence[int]) -> list[int]:
        """Of the leading run that is in any tier."""
        keys = [key_of(number) for number in numbers]
        return list(self.wire.call(match=pb.MatchRequest(namespace_id=self.namespace, keys=keys)).match.tiers)

    def close(self) -> None:
        """Hangs up; what is mapped is closed."""
        for mapping in self.mapped.values():
            mapping.close()
        self.wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EngineProcess:
    """Engines in a process of their own: `engine("put", [1, 2])` answers what the method there does.

    There is one, "0"; `more` adds others, named by their numbers.
    """

    def __init__(self, path: Path, uuid: str, faults: str = "") -> None:
        command = [sys.executable, "-m", "tests.gpu.raw_engine", str(path), uuid]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(_environment(faults)),
        )
        assert json.loads(wait_for_line(self.process, ANSWER_S)) == "ready"

    def __call__(self, do: str, *arguments: Any, engine: int = 0) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([engine, do, *arguments]) + "\n")
        self.process.stdin.flush()
        line = wait_for_line(self.process, ANSWER_S)
        assert line, f"the engine's process ended with {self.process.wait(ANSWER_S)}"
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise AssertionError(answer["error"])
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(ANSWER_S)

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def _environment(faults: str) -> Iterator[tuple[str, str]]:
    import os

    yield from os.environ.items()
    yield VARIABLE, faults


class _Told:
    """The other side."""

    def __init__(self, path: Path, uuid: str) -> None:
        self._path, self._uuid = path, uuid
        self.engines = [RawEngine(path, uuid)]

    def more(self, _: RawEngine, count: int) -> int:
        """So many engines more, which share the process's device."""
        device = self.engines[0].device
        self.engines += [RawEngine(self._path, self._uuid, device) for _ in range(count)]
        return len(self.engines)

    def put(self, engine: RawEngine, numbers: list[int]) -> dict[str, Any]:
        ended = engine.put(numbers)
        return {"state": ended.state, "why": ended.why, "results": list(ended.results)}

    def try_put(self, engine: RawEngine, numbers: list[int]) -> bool:
        """The same where there may be no room, or some of them; whether all are there then."""
        try:
            slots: list[int] = []
            while len(slots) < len(numbers):
                slots += engine.reserve(len(numbers) - len(slots))
        except KVStoreError:
            if slots:
                engine.ask(abort=pb.AbortRequest(slots=slots))
            return False
        ended = engine.ticket(engine.commit(slots, numbers, engine.write(slots, numbers)))
        kept = [slot for slot, result in zip(slots, ended.results, strict=False) if result != pb.STORED]
        if kept:
            engine.ask(abort=pb.AbortRequest(slots=kept))
        return ended.state == pb.TICKET_DONE

    def try_prefetch(self, engine: RawEngine, numbers: list[int]) -> int:
        """How many came that were not there."""
        return int(engine.prefetch(numbers, deadline_ms=2000).loaded)

    def again(self, engine: RawEngine) -> int:
        """After a device was lost: what was mapped of it is closed; its generation now."""
        for mapping in engine.mapped.values():
            mapping.close()
        engine.mapped.clear()
        engine.look()
        return int(engine.said.generation)

    def begin_put(self, engine: RawEngine, numbers: list[int]) -> int:
        """Commits with an event that comes when it comes; the ticket."""
        slots = engine.reserve(len(numbers))
        return engine.commit(slots, numbers, engine.write(slots, numbers))

    def hold(self, engine: RawEngine, numbers: list[int]) -> list[int]:
        """Acquires, and maps what it has acquired."""
        slots = engine.acquire(numbers)
        for slot in slots:
            engine.address(slot)
        return slots

    def right(self, engine: RawEngine, numbers: list[int]) -> int:
        """How many leading blocks the device has, all of them with their own bytes."""
        found = engine.get(numbers)
        for number, raw in zip(numbers, found, strict=False):
            assert raw == bytes_of(number, engine.block_bytes), f"block {number} has the bytes of another"
        return len(found)


def _serve(path: Path, uuid: str) -> None:
    told = _Told(path, uuid)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        number, do, *arguments = json.loads(line)
        call: Callable[..., Any] = getattr(told, do)
        try:
            answer = call(told.engines[number], *arguments)
        except Exception as e:  # noqa: BLE001 (it is the test's)
            answer = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2])
