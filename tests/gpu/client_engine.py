"""An engine's paged KV cache in numpy, on a HostDevice of this process, and the same as a process of its own.

Bytes of a block follow from its number (`content`), so that whoever reads it knows them. Layouts: K and V apart or in
one tensor, tokens or heads first in memory (NHD, HND), MLA's single latent; elements of 1, 2 and 4 bytes.
"""

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore_client import Client, Namespace, devices
from kvstore_client.paged import PagedKV, SlotOrder
from kvstored_cuda.devices.faults import FaultPlan
from kvstored_cuda.devices.host_device import HostDevice
from tests.conftest import eventually

CHECKOUT = Path(__file__).resolve().parents[2]
LAYERS, TOKENS, HEADS, DIM = 3, 16, 2, 32
KINDS = ("nhd", "hnd", "fused", "mla")
DTYPES = {"fp8": np.uint8, "bf16": np.uint16, "fp32": np.uint32}
ANSWER_S = 60.0
CHURN_S = 50.0


def numbered(number: int, plane: int, shape: tuple[int, ...]) -> NDArray[Any]:
    """Elements of 16 bits of one plane of a block, other ones for each."""
    first = (number * 2 * LAYERS + plane) * 7919
    return (np.arange(first, first + int(np.prod(shape))) % 65521).astype(np.uint16).reshape(shape)


class Cache:
    """One cache: `layers` for PagedKV, and `[block][layer][part][token][head][dim]` views for tests."""

    def __init__(self, kind: str, dtype: str, pages: int, seed: int = 0) -> None:
        self.kind, self.pages = kind, pages
        rng, number = np.random.default_rng(seed), DTYPES[dtype]

        def fresh(*shape: int) -> NDArray[Any]:
            array = np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(number).itemsize), number)
            return array.reshape(shape).copy()

        if kind == "mla":
            self.layers: list[Any] = [fresh(pages, TOKENS, HEADS * DIM) for _ in range(LAYERS)]
            self.axes = "BND"
        elif kind == "fused":
            self.layers = [fresh(2, pages, TOKENS, HEADS, DIM) for _ in range(LAYERS)]
            self.axes = "KBNHD"
        else:
            self.axes = "BNHD" if kind == "nhd" else "BHND"
            shape = (pages, TOKENS, HEADS, DIM) if kind == "nhd" else (pages, HEADS, TOKENS, DIM)
            self.layers = [(fresh(*shape), fresh(*shape)) for _ in range(LAYERS)]

    def page(self, number: int) -> NDArray[Any]:
        """All of one page, `[layer][part][token][head][dim]`, whatever the arrangement in memory."""
        return np.stack(
            [np.stack([self._part(layer, part, number) for part in self._parts()]) for layer in self.layers]
        )

    def _parts(self) -> range:
        return range(1 if self.kind == "mla" else 2)

    def _part(self, layer: Any, part: int, number: int) -> NDArray[Any]:
        if self.kind == "mla":
            return np.asarray(layer[number])
        if self.kind == "fused":
            return np.asarray(layer[part, number])
        whole = layer[part][number]
        return np.asarray(whole if self.kind == "nhd" else whole.swapaxes(0, 1))

    def fill(self, page: int, number: int) -> None:
        """Writes what block `number` has, of an NHD cache."""
        for layer, (k, v) in enumerate(self.layers):
            k[page], v[page] = numbered(number, layer, k[page].shape), numbered(number, layer + LAYERS, k[page].shape)

    def has(self, page: int, number: int) -> bool:
        """Whether that is what it has, of an NHD cache."""
        return all(
            np.array_equal(k[page], numbered(number, layer, k[page].shape))
            and np.array_equal(v[page], numbered(number, layer + LAYERS, v[page].shape))
            for layer, (k, v) in enumerate(self.layers)
        )

    def block(self, pages: Any) -> bytes:
        """What the store has of a block: tokens run through its pages."""
        whole = np.concatenate([self.page(int(number)) for number in np.ravel(pages)], axis=2)
        return whole.tobytes()

    def kv(self, uuid: str, **said: Any) -> PagedKV:
        return PagedKV(self.layers, self.axes, device=f"gpu:{uuid}", **said)


def use_host_device(uuid: str, faults: str = "", size_bytes: int = 256 << 20, **said: Any) -> HostDevice:
    """A fresh device of this process, under that UUID."""
    plan = FaultPlan.from_environment({"KVSTORED_HOST_DEVICE_FAULTS": faults})
    device = HostDevice(uuid, size_bytes, plan, **said)
    devices.use(device)
    return device


def namespace_for(client: Client, kv: PagedKV, name: str = "paged") -> Namespace:
    return client.raw_namespace(f"{name}-{kv.packing}", kv.block_bytes)


def keys_of(ns: Namespace, count: int, name: str = "k") -> list[bytes]:
    return [ns.key(f"{name}{i}".encode()) for i in range(count)]


class Engine:
    """The other process: a client, a device, a cache; does what it is told by lines of JSON, and can be killed."""

    def __init__(self, endpoint: str, uuid: str, kind: str, dtype: str, pages: int, **said: Any) -> None:
        ours, theirs = socket.socketpair()
        arguments = json.dumps(
            {"endpoint": endpoint, "uuid": uuid, "kind": kind, "dtype": dtype, "pages": pages, **said}
        )
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.client_engine", str(theirs.fileno()), arguments],
                cwd=CHECKOUT,
                pass_fds=[theirs.fileno()],
            )
        self._socket, self._lines = ours, ours.makefile("rb")

    def start(self, do: str, **arguments: Any) -> None:
        self._socket.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        self._socket.settimeout(timeout_s)
        line = self._lines.readline()
        assert line, f"the engine ended with {self.process.wait(ANSWER_S)}"
        found = json.loads(line)
        assert "error" not in found, found
        return found["answer"]

    def __call__(self, do: str, **arguments: Any) -> Any:
        self.start(do, **arguments)
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(ANSWER_S)
        self._lines.close()
        self._socket.close()


class Gate:
    """For a stream to wait at."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def wait(self) -> None:
        self._open.wait(ANSWER_S)

    def set(self) -> None:
        self._open.set()


class Served:
    """What the process does: methods named as in `do`."""

    def __init__(
        self,
        endpoint: str,
        uuid: str,
        kind: str,
        dtype: str,
        pages: int,
        seed: int = 1,
        device: dict[str, Any] | None = None,
        pages_per_slot: int = 1,
        order: str = "canonical",
        timeout_s: float = 5.0,
    ) -> None:
        self.device = use_host_device(uuid, **(device or {}))
        self.client = Client(endpoint, name="engine", timeout_s=timeout_s)
        self.cache = Cache(kind, dtype, pages, seed)
        self.kv = self.cache.kv(uuid, pages_per_slot=pages_per_slot, order=SlotOrder(order))
        self.ns = namespace_for(self.client, self.kv)
        self.stream = self.device.stream()
        self.gate = Gate()

    def put(self, count: int, pages: list[int], start: int = 0, name: str = "k") -> Any:
        result = self.ns.put(keys_of(self.ns, count, name), self.kv.blocks(pages, stream=self.stream), start)
        return [result.stored, result.existing, result.rejected, str(result.error or "")]

    def get(self, count: int, pages: list[int], start: int = 0, name: str = "k") -> Any:
        """How many came, and the blocks' bytes in hex once the stream has come to its end."""
        each = self.kv.layout.pages_per_slot
        copied = self.ns.get_into(keys_of(self.ns, count, name), self.kv.blocks(pages, stream=self.stream), start)
        self.stream.synchronize(ANSWER_S)
        return [copied, [self.cache.block(pages[i * each : (i + 1) * each]).hex() for i in range(copied)]]

    def churn(self, seconds: float, seed: int, chains: int, depth: int, enough: str) -> Any:
        """Puts and gets of random chains for so long: how many came, and those that had not their own bytes.

        It goes on until the file `enough` is there and something has come, or CHURN_S have passed.

        What a block has follows from its number alone, so every engine knows what all others put.
        """
        chance, began = random.Random(seed), time.monotonic()
        got, wrong = 0, []

        def over() -> bool:
            gone_s = time.monotonic() - began
            return gone_s > CHURN_S or (gone_s > seconds and bool(got) and Path(enough).exists())

        while not over():
            chain, count = chance.randrange(chains), chance.randrange(1, depth + 1)
            numbers = [chain * depth + i for i in range(count)]
            pages = chance.sample(range(self.cache.pages), count)
            keys = [self.ns.key(f"churn{number}".encode()) for number in numbers]
            blocks = self.kv.blocks(pages, stream=self.stream)
            putting = chance.random() < 0.5
            for page, number in zip(pages, numbers, strict=True):
                self.cache.fill(page, number if putting else chains * depth + page)
            if putting:
                self.ns.put(keys, blocks)
                continue
            copied = self.ns.get_into(keys, blocks)
            self.stream.synchronize(ANSWER_S)
            got += copied
            for page, number in zip(pages[:copied], numbers, strict=False):
                if not self.cache.has(page, number):
                    wrong.append(number)
        return [got, wrong]

    def hold_stream(self) -> Any:
        """What is enqueued from now on waits for `let_go`."""
        self.stream.enqueue(self.gate.wait)

    def let_go(self) -> Any:
        self.gate.set()

    def stats(self) -> Any:
        return self.client.device_stats()

    def page_locked(self, figure: str = "page_locked_bytes") -> Any:
        """Waits until the client has page-locked shared memory, or was refused to, which it does behind."""
        state = self.client.device_stats
        return eventually(lambda: state()["devices"][self.device.uuid][figure], what="page-locked memory")

    def opened(self) -> Any:
        """How much of the daemon's memory and events is open."""
        return self.device.use().opened

    def close(self) -> Any:
        self.client.close()


Engines = Callable[..., Served]
"""The fixture `engine` starts them."""


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    served = Served(**json.loads(sys.argv[2]))
    with connection, connection.makefile("rb") as lines:
        for line in lines:
            asked = json.loads(line)
            try:
                answer = {"answer": getattr(served, asked.pop("do"))(**asked)}
            except Exception as e:  # noqa: BLE001  the other side raises it
                answer = {"error": f"{type(e).__name__}: {e}"}
            connection.sendall(json.dumps(answer).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    main()
