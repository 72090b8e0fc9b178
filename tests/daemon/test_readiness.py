"""`/readyz` is true when a put and a get work, and says by name what is wrong when they do not."""

import contextlib
import itertools
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_client import Client
from kvstored.v1.errors import KVStoreError
from tests.conftest import RunningDaemon, eventually
from tests.daemon.test_http import ask
from tests.nodes import Watch, block, descriptors, running

BLOCK = 64 << 10
OK = {"memory": "ok", "event loop": "ok", "health": "ok"}


@pytest.fixture
def node() -> Iterator[RunningDaemon]:
    with running(server__http="127.0.0.1:0", host__size="8MiB") as daemon:
        yield daemon


def readyz(daemon: RunningDaemon) -> tuple[int, bool, dict[str, str]]:
    status, _, body = ask(daemon, "/readyz")
    answer = json.loads(body)
    assert status == (200 if answer["ready"] else 503)
    return status, answer["ready"], answer["checks"]


def when_ready(daemon: RunningDaemon) -> dict[str, str]:
    """The checks once all is well: on a busy machine the event loop may have been late a moment ago."""
    return eventually(lambda: (found := readyz(daemon))[1] and found[2], 10, "the daemon to be ready")  # type: ignore[no-any-return]


def not_ready(daemon: RunningDaemon, name: str) -> str:
    """What that check says once it is wrong."""

    def said() -> str:
        _, ready, checks = readyz(daemon)
        return "" if ready or checks[name].startswith("ok") else checks[name]

    return str(eventually(said, 10, f"{name} to be wrong"))


def test_before_the_first_client_a_put_and_a_get_are_tried_all_the_same(node: RunningDaemon) -> None:
    assert when_ready(node) == {"put": "ok: in a free slot", "get": "ok: the same bytes", **OK}
    with Client(node.endpoint) as client:
        stats = client.stats()
        assert (stats["pools"], stats["namespaces"]) == ([], [])
        assert [index["tenant"] for index in stats["indexes"]] == ["default"], "the client's own"


def test_a_probe_is_met_by_nobody_and_changes_no_figure(node: RunningDaemon) -> None:
    watch = Watch(node)
    ns = watch.client.raw_namespace("here", BLOCK)
    keys = [ns.key(b"%d" % i) for i in range(10)]
    ns.put(keys, [block(i, BLOCK) for i in range(10)])
    eventually(lambda: not watch.state()["totals"]["granted"], 5, "slots granted ahead to be given back")
    when_ready(node)
    state, counters, pools = seen(watch), watch.client.stats()["counters"], watch.client.stats()["pools"]
    indexes, open_before = watch.client.stats()["indexes"], descriptors(node.pid)
    for _ in range(20):
        assert when_ready(node)["put"] == "ok: in a free slot"
    after = watch.client.stats()
    assert (seen(watch), after["counters"], after["pools"]) == (state, counters, pools)
    assert after["indexes"] == indexes
    eventually(lambda: descriptors(node.pid) <= open_before, 5, "the connections of those who asked to be gone")
    assert ns.get(keys) == [block(i, BLOCK) for i in range(10)]
    watch.client.close()


def seen(watch: Watch) -> dict[str, Any]:
    """Without descriptors, of which whoever asks over HTTP has one for a moment."""
    return {name: value for name, value in watch.state().items() if name != "descriptors"}


def test_full_memory_is_ready_while_something_may_go(node: RunningDaemon) -> None:
    with Client(node.endpoint) as client:
        ns = client.raw_namespace("full", 128 << 10)  # one a segment
        keys = [ns.key(b"%d" % i) for i in range(64)]
        for i, key in enumerate(keys):
            ns.put([key], [block(i, 128 << 10)])

        def full() -> bool:
            client.health()
            return bool(when_ready(node)["put"].startswith("ok"))

        eventually(full)
        evicted = client.stats()["counters"]["evicted"]
        checks = [when_ready(node) for _ in range(5)]
        assert all(c["put"].startswith("ok") and c["get"].startswith("ok") for c in checks)
        assert client.stats()["counters"]["evicted"] == evicted, "looking has evicted something"


def test_memory_that_is_all_held_is_not_ready_and_says_so() -> None:
    # No eviction ahead: it would take the last block before it is pinned.
    with (
        running(server__http="127.0.0.1:0", host__size="8MiB", evict__high="1.0") as node,
        Client(node.endpoint) as client,
    ):
        ns = client.raw_namespace("pinned", BLOCK)
        keys = [ns.key(b"%d" % i) for i in range(128)]
        for i, key in enumerate(keys):
            assert ns.put([key], [block(i, BLOCK)]).stored == 1
            assert ns.pin([key], ttl_s=60) == 1
        said = not_ready(node, "put")
        assert said.startswith("ResourceExhausted: ")
        assert "pinned" in said
        assert readyz(node)[2]["get"].startswith("not tried")
        assert client.health().healthy, "it is healthy all the same"
        assert ask(node, "/healthz")[0] == 200
        ns.unpin(keys)
        assert when_ready(node)["put"].startswith("ok")


def test_memory_in_which_nothing_stays_is_not_ready_and_says_who_pins(node: RunningDaemon) -> None:
    """A put is stored there, and evicted before anybody can ask for it."""
    names = itertools.count()

    def pinned(count: int) -> int:
        """So many more, by a client that goes: what was granted ahead to it is free again, and its pins stay."""
        with Client(node.endpoint) as client:
            ns = client.raw_namespace("pinned", BLOCK)
            keys = [ns.key(b"%d" % i) for i in itertools.islice(names, count)]
            for key in keys:
                assert ns.put([key], [block(key, BLOCK)]).stored == 1
                ns.pin([key], ttl_s=60)
        return len(keys)

    pinned(110)
    eventually(lambda: pinned(1) and not readyz(node)[2]["memory"].startswith("ok"), 30, "memory to be full of pins")
    said = not_ready(node, "memory")
    assert said.startswith("what is stored is evicted at once: of 128 slots of 65536 bytes of tenant 'default', 12")
    assert "most pins are of namespace 1, 12" in said
    with Client(node.endpoint) as client:
        ns = client.raw_namespace("pinned", BLOCK)
        key = ns.key(b"a new one")
        assert ns.put([key], [block("new", BLOCK)]).stored == 1
        eventually(lambda: not ns.match([key]).blocks, 10, "it to be evicted, as was said")
        assert client.health().healthy, "it is healthy all the same"
        assert ns.unpin([ns.key(b"%d" % i) for i in range(next(names))]) >= 120
        assert when_ready(node)["memory"] == "ok"


FAULTY = """
import os, sys
from kvstore import loops
from kvstore.server import readiness
from kvstore.cli.entry import kvstored
from kvstore.server import calls
from kvstore.tiers.slab import Slab

directory = sys.argv.pop(1)

def when(name, do, otherwise):
    def either(*args, **named):
        return (do if os.path.exists(f"{directory}/{name}") else otherwise)(*args, **named)
    return either

def fail(*args, **named):
    raise RuntimeError("injected")

def no_memory(*args, **named):
    raise OSError("injected")

def elsewhere(self, segment, offset, length):
    return memoryview(bytearray(length))

begin = loops.Loop.__init__
loops.Loop.__init__ = lambda self, name, s, step: begin(self, name, s, when(f"fail {name}", fail, step))
Slab.bytes_at = when("lose bytes", elsewhere, Slab.bytes_at)
calls.health = when("fail health", fail, calls.health)
Slab.make = when("lose memory", no_memory, Slab.make)
readiness.TROUBLE_S = 1.0
kvstored()
"""


class FaultyDaemon(RunningDaemon):
    """The daemon itself, in which something goes wrong while a file of that name exists."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", FAULTY, str(self.directory), *super().command()[1:]]

    def fault(self, name: str) -> Path:
        file = self.directory / name
        file.touch()
        return file


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[FaultyDaemon]:
    daemon = FaultyDaemon(tmp_path, {"server.http": "127.0.0.1:0", "host.size": "8MiB"})
    try:
        yield daemon
    finally:
        daemon.kill()


def test_a_failing_loop_and_bytes_that_are_not_kept_are_named(faulty: FaultyDaemon) -> None:
    assert when_ready(faulty)
    file = faulty.fault("fail expire")
    assert not_ready(faulty, "health") == "background loop expire: RuntimeError: injected"
    with Client(faulty.endpoint) as client:
        assert client.health().problems == ["background loop expire: RuntimeError: injected"], "the same in health"
    file.unlink()
    assert when_ready(faulty)
    file = faulty.fault("lose bytes")
    assert not_ready(faulty, "get") == "a block does not have the bytes that were put"
    file.unlink()
    assert when_ready(faulty)


def test_one_internal_error_is_over_when_a_put_and_a_get_work_and_is_counted_for_good(faulty: FaultyDaemon) -> None:
    """And is not over while they do not."""
    when_ready(faulty)
    with Client(faulty.endpoint) as client:
        lost = faulty.fault("lose bytes")
        failing = faulty.fault("fail health")
        with pytest.raises(KVStoreError, match="internal error"):
            client._transport.health()
        failing.unlink()
        assert not_ready(faulty, "health") == "1 internal errors in calls; see the log"
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            assert not readyz(faulty)[1], "the bytes are lost"
            assert readyz(faulty)[2]["health"] != "ok"
        lost.unlink()
        when_ready(faulty)
        assert client.health().healthy
        assert client.stats()["daemon"]["internal_errors"] == 1
        assert b"\nkvstored_internal_errors_total 1" in ask(faulty, "/metrics")[2]
        faulty.says("a put and a get work: over")
        lost, failing = faulty.fault("lose bytes"), faulty.fault("fail health")
        with pytest.raises(KVStoreError, match="internal error"):
            client._transport.health()
        failing.unlink()
        assert not_ready(faulty, "health") == "1 internal errors in calls; see the log", "the next one is one again"
        lost.unlink()
        when_ready(faulty)
        assert b"\nkvstored_internal_errors_total 2" in ask(faulty, "/metrics")[2]


def test_memory_that_could_not_be_made_once_is_no_problem_for_good(faulty: FaultyDaemon) -> None:
    """Nobody may ask for it again, and puts find room without it."""
    with Client(faulty.endpoint) as client:
        lost, kept = faulty.fault("lose memory"), faulty.fault("lose bytes")  # with the latter it is over for no time
        large = client.raw_namespace("large", 512 << 10)  # four segments: they have to be made anew
        with contextlib.suppress(KVStoreError):
            large.put([large.key(b"x")], [block("x", 512 << 10)])
        assert not_ready(faulty, "health").startswith("no memory for a segment of ")
        lost.unlink()
        kept.unlink()
        when_ready(faulty)
        assert client.health().healthy


def test_an_event_loop_that_was_held_up_is_not_ready_until_it_turns_again(node: RunningDaemon) -> None:
    when_ready(node)
    node.pause()
    try:
        eventually(lambda: asleep(node), 5)
    finally:
        held = asked_while_stopped(node)
    assert not held["ready"]
    assert "late" in held["checks"]["event loop"]
    assert when_ready(node)["event loop"] == "ok"


def asleep(daemon: RunningDaemon) -> bool:
    return Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def asked_while_stopped(daemon: RunningDaemon) -> dict[str, Any]:
    """A question that waits in the daemon's socket while it is stopped for two seconds."""
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(json.loads(ask(daemon, "/readyz")[2])))
    asking.start()
    threading.Event().wait(1.8)
    daemon.resume()
    asking.join(20)
    return answers[0]


def test_a_daemon_that_stops_says_so_to_whoever_asks(node: RunningDaemon) -> None:
    """And serves nobody who asks afterwards."""
    when_ready(node)
    assert node.stop() == 0
    with pytest.raises(OSError):
        ask(node, "/readyz")


def test_pages_say_nothing_of_what_is_stored(node: RunningDaemon) -> None:
    with Client(node.endpoint, name="secret-client") as client:
        ns = client.raw_namespace("secret-namespace", BLOCK)
        ns.put([ns.key(b"secret-key")], [b"secret-bytes" * (BLOCK // 12) + b"...."])
        for page in ("/readyz", "/metrics", "/"):
            body = ask(node, page)[2]
            assert b"secret" not in body
            assert ns.key(b"secret-key").hex().encode()[:12] not in body
