"""Another process with a device, for tests: it does what it is told over a socket, and can be killed.

Spawned, never forked. Requests and answers are lines of JSON; descriptors travel beside
them. Bytes are named by a seed, so that both sides know them without sending them.
"""

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvstored_cuda.devices import Device, Direction, Generation, Handle, HandleKind, Stream
from kvstored_cuda.devices.errors import DeviceError
from kvstored_cuda.devices.faults import VARIABLE, FaultPlan
from kvstored_cuda.devices.host_device import HostDevice
from kvstored_cuda.devices.host_pages import address_of

CHECKOUT = Path(__file__).resolve().parents[2]
HOST_UUID = "HOST-00000000-0000-0000-0000-000000000000"
HOST_BYTES = 256 << 20
ANSWER_S = 60.0
COPY_S = 30.0


def pattern(seed: int, size_bytes: int) -> bytes:
    return np.random.default_rng(seed).bytes(size_bytes)


def make_device(kind: str, plan: FaultPlan | None = None, **settings: Any) -> Device:
    """`host`; `cuda`: the first GPU there is; `standin`: CudaDevice without a GPU; `bindings`: the
    same, with cuda-bindings over it."""
    if kind == "host":
        return HostDevice(HOST_UUID, HOST_BYTES, plan or FaultPlan.from_environment(), **settings)
    if kind in ("standin", "bindings"):
        from tests.cuda.standin import standin_device

        return standin_device(named=kind == "bindings")
    from kvstored_cuda.devices.discovery import device_of, devices

    return device_of(devices({}).found[0].uuid, {})


def write(device: Device, address: int, raw: bytes, stream: Stream) -> None:
    """Enqueues; the bytes are staged by the device, since they are not page-locked."""
    buffer = bytearray(raw)
    device.copy(address, address_of(buffer), len(buffer), Direction.HOST_TO_DEVICE, stream)


def read(device: Device, address: int, size_bytes: int, stream: Stream) -> bytes:
    """Waits for the copy, with a deadline."""
    buffer = bytearray(size_bytes)
    device.copy(address_of(buffer), address, size_bytes, Direction.DEVICE_TO_HOST, stream)
    stream.synchronize(COPY_S)
    return bytes(buffer)


class PeerError(Exception):
    """What the other process raised: `kind` is the name of its class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Peer:
    """This side: `peer("open", ...)` answers what the other process answers, or raises PeerError."""

    def __init__(self, kind: str = "host", faults: str = "", **settings: Any) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.cuda.device_peer", str(theirs.fileno()), kind, json.dumps(settings)],
                cwd=CHECKOUT,
                pass_fds=[theirs.fileno()],
                env={**os.environ, VARIABLE: faults},
            )
        self._socket = ours
        self._lines = ours.makefile("rb")
        self.generation = generation_from(self("generation"))

    def start(self, do: str, descriptor: int = -1, **arguments: Any) -> None:
        """Sends a request; `answer` takes what comes back."""
        line = json.dumps({"do": do, **arguments}).encode() + b"\n"
        socket.send_fds(self._socket, [line], [descriptor] if descriptor >= 0 else [])

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        self._socket.settimeout(timeout_s)
        line = self._lines.readline()
        if not line:
            raise PeerError("Gone", f"process {self.process.pid} ended")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"], answer["message"])
        return answer["answer"]

    def __call__(self, do: str, descriptor: int = -1, **arguments: Any) -> Any:
        self.start(do, descriptor, **arguments)
        return self.answer()

    def open(self, handle: Handle, of: Generation) -> int:
        """Opens it there; the address it has there."""
        return int(self("open", handle.descriptor, handle=handle.to_bytes().hex(), of=generation_to(of)))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(ANSWER_S)

    def close(self) -> None:
        self.kill()
        self._lines.close()
        self._socket.close()


def generation_to(generation: Generation) -> list[Any]:
    return [generation.pid, generation.born, generation.nonce.hex()]


def generation_from(answer: list[Any]) -> Generation:
    return Generation(answer[0], answer[1], bytes.fromhex(answer[2]))


class Told:
    """The other side: one method for each thing to do."""

    def __init__(self, kind: str, device: Device) -> None:
        self.kind, self.device = kind, device
        self.stream = device.stream()
        self.mappings: list[Any] = []
        self.events: list[Any] = []
        self.allocations: list[Any] = []
        self.descriptor = -1

    def generation(self) -> list[Any]:
        return generation_to(self.device.generation)

    def handle(self, raw: str) -> Handle:
        return Handle.from_bytes(bytes.fromhex(raw), self.descriptor)

    def open(self, handle: str, of: list[Any]) -> int:
        self.mappings.append(self.device.open(self.handle(handle), generation_from(of)))
        return int(self.mappings[-1].address)

    def close(self) -> None:
        """The mapping that was opened last."""
        self.mappings.pop().close()

    def close_while_counting(self, block_s: float) -> int:
        """Closes on a thread, in a driver that blocks so long; how often this one came round meanwhile."""
        from tests.cuda.standin import block

        block(block_s, self.kind == "bindings")
        thread, rounds = threading.Thread(target=self.close), 0
        began = time.monotonic()
        thread.start()
        while time.monotonic() - began < block_s / 2:
            rounds += 1
        still = thread.is_alive()
        thread.join(ANSWER_S)
        block(0, self.kind == "bindings")
        return rounds if still else 0

    def allocate(self, size_bytes: int, kind: int = 1) -> list[Any]:
        self.allocations.append(self.device.allocate(size_bytes, HandleKind(kind)))
        return [self.allocations[-1].address, self.allocations[-1].handle.to_bytes().hex()]

    def descriptor_number(self) -> int:
        """Of the last segment."""
        return int(self.allocations[-1].handle.descriptor)

    def descriptors(self) -> int:
        """How many this process has open."""
        return len(list(Path("/proc/self/fd").iterdir()))

    def free(self) -> None:
        self.allocations.pop().free()

    def write(self, address: int, seed: int, size_bytes: int) -> None:
        """Enqueues a copy onto the device."""
        write(self.device, address, pattern(seed, size_bytes), self.stream)

    def write_for_ever(self, address: int, size_bytes: int) -> None:
        until = time.monotonic() + ANSWER_S
        while time.monotonic() < until:
            write(self.device, address, pattern(1, size_bytes), self.stream)
            self.stream.synchronize(COPY_S)

    def read(self, address: int, size_bytes: int) -> str:
        return read(self.device, address, size_bytes, self.stream).hex()

    def touch(self, address: int) -> None:
        """Past all checks, as a kernel would."""
        ctypes.memset(address, 1, 1)

    def event(self) -> str:
        """A new event, recorded on the stream; its handle."""
        self.events.append(self.device.event())
        return self.record()

    def record(self) -> str:
        self.events[-1].record(self.stream)
        return str(self.events[-1].handle.to_bytes().hex())

    def open_event(self, handle: str, of: list[Any]) -> None:
        self.events.append(self.device.open_event(self.handle(handle), generation_from(of)))

    def wait(self) -> None:
        """Makes the stream wait for the last event."""
        self.stream.wait(self.events[-1])

    def query(self) -> bool:
        return bool(self.events[-1].query())

    def close_event(self) -> None:
        self.events.pop().close()

    def synchronize(self) -> None:
        self.stream.synchronize(COPY_S)

    def use(self) -> list[int]:
        use = self.device.use()
        return [use.allocations, use.allocated_bytes, use.opened, use.events, use.page_locked_bytes]


def serve(connection: socket.socket, told: Told) -> None:
    """Until the other side hangs up. A request is one message and fits into 64 KiB."""
    while True:
        raw, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 4)
        if not raw:
            return
        told.descriptor = descriptors[0] if descriptors else -1
        request = json.loads(raw)
        call: Callable[..., Any] = getattr(told, request.pop("do"))
        try:
            answer = {"answer": call(**request)}
        except DeviceError as e:
            answer = {"error": type(e).__name__, "message": str(e)}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        connection.sendall(json.dumps(answer).encode() + b"\n")


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    serve(connection, Told(sys.argv[2], make_device(sys.argv[2], **json.loads(sys.argv[3]))))
    sys.stdout.flush()
    os._exit(0)  # threads of calls that hang on purpose must not keep the process


if __name__ == "__main__":
    main()
