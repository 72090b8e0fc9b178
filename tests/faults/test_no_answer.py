"""Field fault A14: a load that was never answered held its request, and its buffers, for ever.

Seen as LMCache issue 4945, vLLM pull request 50984 and sglang pull request 16747. The daemon is stopped in
the middle (SIGSTOP), or something that is no daemon answers in its place: every call of the SDK ends by its
deadline with a miss, a rejection or a typed error, and nothing is written to the caller's memory later.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import Client, KVStoreError, Layout, Unavailable
from kvstore_client.namespace import Namespace
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block, totals
from tests.wire import LENGTH, frame

BLOCK = 64 << 10
TIMEOUT_S = 0.5
BUSY_S = 2.0
ENDS_WITHIN_S = 2 * TIMEOUT_S + BUSY_S
"""A call, a try to connect again, and room for a busy machine."""

MISS, REJECTED = "a miss", "rejected"


@contextmanager
def stopped(daemon: RunningDaemon) -> Iterator[None]:
    daemon.pause()
    try:
        yield
    finally:
        daemon.resume()


def keys_of(ns: Namespace, name: str, count: int = 4) -> list[bytes]:
    return [ns.key(f"{name} {i}".encode()) for i in range(count)]


def outcome(call: Callable[[], object]) -> object:
    """What a call ends with, in time."""
    began = time.monotonic()
    try:
        return call()
    except KVStoreError as e:
        return type(e)
    finally:
        assert time.monotonic() - began < ENDS_WITHIN_S


CALLS: dict[str, tuple[Callable[[Client, Namespace], object], object]] = {
    "match": (lambda c, ns: ns.match(keys_of(ns, "absent")).blocks, 0),
    "get": (lambda c, ns: ns.get(keys_of(ns, "absent")), []),
    "get_into": (lambda c, ns: ns.get_into(keys_of(ns, "absent"), bytearray(4 * BLOCK)), 0),
    "prefetch": (lambda c, ns: ns.prefetch(keys_of(ns, "absent")).wait(), 0),
    "acquire": (lambda c, ns: len(ns.acquire(keys_of(ns, "present"), timeout_s=TIMEOUT_S)), 0),
    "put": (lambda c, ns: ns.put(keys_of(ns, "new"), bytes(4 * BLOCK)).rejected, 4),
    "reserve": (lambda c, ns: ns.reserve(2), Unavailable),
    "remove": (lambda c, ns: ns.remove(keys_of(ns, "absent")), Unavailable),
    "pin": (lambda c, ns: ns.pin(keys_of(ns, "present"), ttl_s=5), Unavailable),
    "unpin": (lambda c, ns: ns.unpin(keys_of(ns, "present")), Unavailable),
    "clear": (lambda c, ns: c.raw_namespace("another", BLOCK).clear(), Unavailable),
    "stats": (lambda c, ns: c.stats(), Unavailable),
    "health": (lambda c, ns: c.health().reachable, False),
    "namespace": (lambda c, ns: c.raw_namespace("another", BLOCK).block_bytes, BLOCK),
    "layout": (
        lambda c, ns: (
            c.namespace(
                Layout(model="m", dtype="int8", num_layers=1, num_kv_heads=1, head_dim=1, block_tokens=1)
            ).block_bytes
        ),
        2,
    ),
    "close": (lambda c, ns: c.close(), None),
}


@pytest.fixture(scope="module")
def present(node: RunningDaemon) -> list[bytes]:
    data = [block(("present", i), BLOCK) for i in range(4)]
    with Client(node.endpoint) as client:
        ns = client.raw_namespace("no answer", BLOCK)
        ns.put(keys_of(ns, "present"), data)
    return data


# -- a daemon that is stopped


@pytest.mark.parametrize("call", CALLS)
def test_every_call_ends_while_the_daemon_is_stopped(node: RunningDaemon, present: list[bytes], call: str) -> None:
    work, expected = CALLS[call]
    client = Client(node.endpoint, timeout_s=TIMEOUT_S)
    ns = client.raw_namespace("no answer", BLOCK)
    with stopped(node):
        assert outcome(lambda: work(client, ns)) == expected
        if call != "close":
            assert outcome(lambda: work(client, ns)) == expected, "and the same once more, without a session"
    if call != "close":
        eventually(lambda: ns.get(keys_of(ns, "present")) == present, 5.0, "the client to be connected again")
        client.close()


def test_what_is_in_memory_is_read_while_the_daemon_is_stopped(node: RunningDaemon, present: list[bytes]) -> None:
    """A read makes no call, so that a daemon that stands still holds up none."""
    with Client(node.endpoint, timeout_s=TIMEOUT_S) as client:
        ns = client.raw_namespace("no answer", BLOCK)
        eventually(lambda: ns.get(keys_of(ns, "present")) == present, what="the client to be connected")
        with stopped(node):
            assert ns.match(keys_of(ns, "present")).blocks == 4
            assert ns.get(keys_of(ns, "present")) == present


@pytest.mark.parametrize("call", CALLS)
def test_a_client_made_while_the_daemon_is_stopped_has_misses(node: RunningDaemon, call: str) -> None:
    work, expected = CALLS[call]
    with stopped(node):
        began = time.monotonic()
        client = Client(node.endpoint, timeout_s=TIMEOUT_S)
        assert time.monotonic() - began < ENDS_WITHIN_S
        ns = client.raw_namespace("no answer", BLOCK)
        assert outcome(lambda: work(client, ns)) == expected
    if call != "close":
        eventually(lambda: client.health().reachable, 5.0, "the client to connect by itself")
        client.close()


def test_calls_of_many_threads_all_end(node: RunningDaemon, present: list[bytes]) -> None:
    """Those who wait for one another's call do not add up their deadlines."""
    names = [name for name in CALLS if name != "close"]
    took: dict[str, float] = {}
    with Client(node.endpoint, timeout_s=TIMEOUT_S) as client:
        ns = client.raw_namespace("no answer", BLOCK)

        def work(name: str) -> None:
            began = time.monotonic()
            with suppress(KVStoreError):
                CALLS[name][0](client, ns)
            took[name] = time.monotonic() - began

        with stopped(node):
            threads = [threading.Thread(target=work, args=(name,)) for name in names]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        assert took.keys() == set(names)
        assert max(took.values()) < 4 * TIMEOUT_S + BUSY_S, took
        eventually(lambda: ns.get(keys_of(ns, "present")) == present, 5.0, "the client to be connected again")


# -- what comes late


@pytest.mark.parametrize("reads", ["by shared memory", "by calls"])
@pytest.mark.parametrize("what", ["present", "absent"])
def test_nothing_is_written_to_a_buffer_after_its_call(
    node: RunningDaemon, present: list[bytes], reads: str, what: str
) -> None:
    """`by calls` is how machines read whose processors order stores otherwise."""
    with Client(node.endpoint, timeout_s=TIMEOUT_S) as client:
        ns = client.raw_namespace("no answer", BLOCK)
        eventually(lambda: client.health().reachable, what="the client to be connected")
        if reads == "by calls":
            client._transport._shared_reads = False  # type: ignore[attr-defined]
        out = np.full(4 * BLOCK, 7, np.uint8)
        with stopped(node):
            copied = ns.get_into(keys_of(ns, what), out)
            assert copied == (4 if (what, reads) == ("present", "by shared memory") else 0)
            after = out.copy()
        # Answers to what was asked have been sent when an answer to a later question is there.
        eventually(lambda: client.health().reachable, 5.0, "the client to be connected again")
        assert client.stats()["daemon"]["pid"] == node.pid
        assert (out == after).all()
        if not copied:
            assert (out == 7).all()


@pytest.mark.parametrize("held", ["a lease", "a reservation", "nothing"])
@pytest.mark.parametrize("tries", [1, 4], ids=["one try", "many tries"])
def test_what_a_late_daemon_grants_is_not_lost(
    node: RunningDaemon, present: list[bytes], held: str, tries: int
) -> None:
    """It answers calls that nobody waits for any more; what it hands out in them goes back, what lives stays."""
    with (
        Client(node.endpoint, name="watch") as watch,
        Client(node.endpoint, name="late", timeout_s=TIMEOUT_S) as client,
    ):
        ns = client.raw_namespace("no answer", BLOCK)
        keys = keys_of(ns, "present")
        assert not any(totals(watch.stats())[kind] for kind in ("leased", "quarantined"))
        eventually(lambda: client.health().reachable, what="the client to be connected")
        lease = ns.acquire(keys[:2]) if held == "a lease" else None
        slots = ns.reserve(3) if held == "a reservation" else None
        views = lease.views if lease is not None else []
        with stopped(node):
            for _ in range(tries):
                assert len(ns.acquire(keys, timeout_s=TIMEOUT_S)) == 0
                assert ns.put(keys_of(ns, f"late {held}"), bytes(4 * BLOCK)).rejected == 4
                assert not client.health().reachable
        eventually(lambda: client.health().reachable, 5.0, "the client to be connected again")
        assert [bytes(view) for view in views] == present[: len(views)]
        if lease is not None:
            assert totals(watch.stats())["leased"] == 2, "the lease that is looked at holds"
            views.clear()
            lease.release()
            del lease
        if slots is not None:
            assert totals(watch.stats())["granted"] >= 3
            for view in slots.views:
                view[:] = b"r" * BLOCK
            written = keys_of(ns, f"reserved {tries}", 3)
            assert slots.commit(written).stored == 3
            assert ns.get(written) == [b"r" * BLOCK] * 3
        eventually(lambda: nothing_held(watch), 10.0, "every hold to end, though the process lives")
        ns.remove(keys_of(ns, f"late {held}"))


def nothing_held(client: Client) -> bool:
    stats = client.stats()
    found = totals(stats)
    ended = any(session["ended"] for session in stats["sessions"])
    return not (found["leased"] or found["quarantined"] or found["granted"] or ended)


# -- something that is no daemon


class Impostor:
    """Listens where a daemon should and treats each connection in its own way."""

    def __init__(self, path: Path, treat: Callable[[socket.socket], None], backlog: int = 50) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(backlog)
        self._treat = treat
        self._ended = threading.Event()
        self._kept: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            if self._ended.is_set():
                connection.close()
                return
            self._kept.append(connection)
            with suppress(OSError):
                self._treat(connection)

    def close(self) -> None:
        self._ended.set()
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(self._listener.getsockname())
            self._thread.join(20)
        assert not self._thread.is_alive()
        for connection in [self._listener, *self._kept]:
            connection.close()


def trickle(connection: socket.socket) -> None:
    """A reply of which a byte comes now and then, each in time, the last one never."""
    connection.sendall(LENGTH.pack(1000))
    pause = threading.Event()
    for _ in range(120):
        connection.sendall(b"\0")
        pause.wait(TIMEOUT_S / 6)


def break_off(connection: socket.socket) -> None:
    connection.sendall(LENGTH.pack(16) + b"half")
    connection.close()


def reply_to(number: int, **fields: object) -> bytes:
    return frame(pb.Reply(id=number, **fields).SerializeToString())  # type: ignore[arg-type]


IMPOSTORS: dict[str, Callable[[socket.socket], None]] = {
    "says nothing": lambda connection: None,
    "hangs up": lambda connection: connection.close(),
    "hangs up in a reply": break_off,
    "half a reply": lambda connection: connection.sendall(LENGTH.pack(100) + b"half"),
    "trickles": trickle,
    "an endless reply": lambda connection: connection.sendall(LENGTH.pack(0xFFFFFFFF) + b"x" * 1000),
    "no protobuf": lambda connection: connection.sendall(frame(b"\xff" * 50)),
    "a reply to something else": lambda connection: connection.sendall(reply_to(77, health=pb.HealthReply())),
    "an empty reply": lambda connection: connection.sendall(reply_to(1)),
    "HTTP": lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
}


@pytest.mark.parametrize("kind", IMPOSTORS)
def test_every_call_ends_whatever_answers_in_the_daemons_place(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "kvstored.sock"
    impostor = Impostor(path, IMPOSTORS[kind])
    try:
        began = time.monotonic()
        client = Client(f"unix://{path}", timeout_s=TIMEOUT_S)
        assert time.monotonic() - began < ENDS_WITHIN_S
        ns = client.raw_namespace("impostor", BLOCK)
        for call in ("match", "get_into", "put", "acquire", "stats", "health", "close"):
            work, expected = CALLS[call]
            assert outcome(lambda: work(client, ns)) == expected, call  # noqa: B023 (called at once)
    finally:
        impostor.close()


def test_an_error_of_no_known_kind_is_raised_as_it_came(tmp_path: Path) -> None:
    path = tmp_path / "kvstored.sock"
    error = pb.Error(code=99, message="from the future")  # type: ignore[arg-type]
    impostor = Impostor(path, lambda connection: connection.sendall(reply_to(1, error=error)))
    try:
        with pytest.raises(KVStoreError, match="from the future"):
            Client(f"unix://{path}", timeout_s=TIMEOUT_S)
    finally:
        impostor.close()


def test_a_full_backlog_is_no_reason_to_wait(tmp_path: Path) -> None:
    path = tmp_path / "kvstored.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        fillers = []
        try:
            for _ in range(2):
                fillers.append(socket.socket(socket.AF_UNIX))
                fillers[-1].setblocking(False)
                with suppress(BlockingIOError):
                    fillers[-1].connect(str(path))
            began = time.monotonic()
            with Client(f"unix://{path}", timeout_s=TIMEOUT_S) as client:
                assert time.monotonic() - began < ENDS_WITHIN_S
                ns = client.raw_namespace("full", BLOCK)
                for call in ("match", "put", "stats", "health"):
                    work, expected = CALLS[call]
                    assert outcome(lambda: work(client, ns)) == expected, call  # noqa: B023 (called at once)
        finally:
            for filler in fillers:
                filler.close()


def test_a_client_of_an_impostor_finds_the_daemon_when_it_comes(daemon: RunningDaemon) -> None:
    daemon.stop()
    impostor = Impostor(daemon.socket, IMPOSTORS["says nothing"])
    client = Client(daemon.endpoint, timeout_s=TIMEOUT_S)
    ns = client.raw_namespace("found", BLOCK)
    assert ns.match(keys_of(ns, "x")).blocks == 0
    impostor.close()
    daemon.socket.unlink()
    daemon.restart()
    eventually(lambda: client.health().reachable, 10.0, "the client to find the daemon")
    eventually(lambda: ns.put(keys_of(ns, "x"), bytes(4 * BLOCK)).rejected == 0, what="its puts to be stored")
    client.close()
