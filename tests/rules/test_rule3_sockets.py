"""Rule 3: the end of a socket is not the end of a process, and a fork is not the client."""

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstore_client.index
import kvstore_client.session
import tests.conftest
from kvstore_client import Client, FailedPrecondition, Namespace
from kvstored.mapping import Mapping
from kvstored.v1 import PROTOCOL
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block
from tests.rules.processes import (
    RAW,
    Program,
    exact,
    fill,
    held,
    names,
    pool,
    session,
    sessions,
    start_raw,
    store,
    wait_for_loop,
)
from tests.wire import Wire

BLOCK = 16 << 10

Start = Callable[..., Program]


@pytest.fixture
def daemon(start_daemon: Callable[..., RunningDaemon]) -> RunningDaemon:
    """4 MiB: 256 slots of 16 KiB."""
    return start_daemon(host__size="4MiB")


@pytest.fixture
def ns(client: Client) -> Namespace:
    return client.raw_namespace("rule 3", BLOCK)


# -- a process that closes its socket and lives on

CLOSER = (
    RAW
    + """
hear()
wire.close()
say("closed")
while hear() == "write":
    for place in places:
        place[:] = b"\\xee" * (16 << 10)
    say("written")
"""
)


def test_slots_of_a_process_that_closed_its_socket_are_not_reused_while_it_lives(
    daemon: RunningDaemon, client: Client, ns: Namespace, start_program: Start
) -> None:
    keys = store(ns, names("leased", 2))
    closer, _ = start_raw(start_program, daemon, CLOSER, ns, keys)
    eventually(lambda: held(client, BLOCK) == {"granted": 4, "leased": 2}, 5, "only the closer to hold slots")
    assert closer.ask("close") == "closed"
    eventually(lambda: held(client, BLOCK) == {"quarantined": 4, "leased": 2}, 5, "the quarantine")
    ended = session(client, "raw")
    assert ended is not None
    assert ended["ended"]
    others = fill(client, ns, "others")
    wait_for_loop(client, "expire", 3)
    assert closer.ask("write") == "written"
    assert pool(client, BLOCK)["quarantined"] == 4
    assert exact(ns, others) > 128
    assert exact(ns, keys) == 2, "leased blocks of an ended session stay too"
    closer.say("end")
    assert closer.finish() == 0
    eventually(lambda: session(client, "raw") is None, 5, "the session to be forgotten with its process")
    assert "quarantined" not in held(client, BLOCK)
    assert "leased" not in held(client, BLOCK)


def test_an_ended_session_holds_its_share_of_the_limits(
    daemon: RunningDaemon, client: Client, ns: Namespace, start_program: Start
) -> None:
    """What is quarantined is not there: it counts as held until the process is gone."""
    closer, _ = start_raw(start_program, daemon, CLOSER, ns, [])
    closer.ask("close")
    eventually(lambda: held(client, BLOCK).get("quarantined") == 4, 5, "the quarantine")
    found = session(client, "raw")
    assert found is not None
    assert found["held_bytes"] == 4 * BLOCK
    closer.kill()
    eventually(lambda: session(client, "raw") is None, 5, "the session to be forgotten")


SHUTTER = """
import socket
client = Client(sys.argv[1], name="shutter")
ns = client.raw_namespace("rule 3", 16 << 10)
keys = [ns.key(b"shut %d" % i) for i in range(4)]
ns.put(keys[:2], [block(key, 16 << 10) for key in keys[:2]])
lease = ns.acquire(keys[:2])
views = lease.views
slots = ns.reserve(2)
say("holding")
hear()
for number in os.listdir("/proc/self/fd"):
    try:
        if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
            socket.socket(fileno=os.dup(int(number))).shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
for view, key in zip(slots.views, keys[2:]):
    view[:] = block(key, 16 << 10)
say("shut")
hear()
say("stored", slots.commit(keys, start=2).stored)
hear()
say([bytes(view) == block(key, 16 << 10) for view, key in zip(views, keys)])
del slots
say(ns.put(keys, [block(key, 16 << 10) for key in keys]).stored)
hear()
lease.release()
views.clear()
del view
say("released")
hear()
"""


def test_a_client_whose_connection_breaks_attaches_again_with_all_it_holds(
    daemon: RunningDaemon, client: Client, ns: Namespace, start_program: Start
) -> None:
    shutter = start_program(SHUTTER, daemon.endpoint)
    assert shutter.hear() == "holding"
    before = session(client, "shutter")
    assert before is not None
    assert shutter.ask("shut") == "shut"
    eventually(lambda: (session_again(client, "shutter", before["id"]) or {}).get("leased_slots") == 2, 10, "a resume")
    again = session_again(client, "shutter", before["id"])
    assert again is not None
    assert again["granted_slots"] == 2
    others = fill(client, ns, "others")
    assert "quarantined" not in held(client, BLOCK)
    assert shutter.ask("commit") == "stored 2"
    assert exact(ns, [ns.key(b"shut %d" % i) for i in range(4)]) == 4
    assert shutter.ask("check") == "[True, True]"
    assert shutter.hear() == "0", "all of them are there"
    assert exact(ns, others) > 128
    assert shutter.ask("release") == "released"
    eventually(lambda: (session(client, "shutter") or {})["leased_slots"] == 0, 5, "the leases to end")
    shutter.say("end")
    assert shutter.finish() == 0


def session_again(client: Client, name: str, before: int) -> dict[str, Any] | None:
    """The session of that name that is not the one from before."""
    found = [s for s in sessions(client, name) if s["id"] != before]
    return found[0] if found else None


# -- forks

FORKER = """
import gc, multiprocessing, threading
client = Client(sys.argv[1], name="parent")
how = sys.argv[2]
ns = client.raw_namespace("rule 3", 16 << 10)
keys = [ns.key(b"fork %d" % i) for i in range(10)]
ns.put(keys[:4], [block(key, 16 << 10) for key in keys[:4]])
lease = ns.acquire(keys[:2])
views = lease.views
slots = ns.reserve(2)
out = np.empty(16 << 10, np.uint8)

def in_the_child():
    refused = 0
    calls = [
        lambda: ns.match(keys), lambda: ns.get_into(keys[:1], out), lambda: ns.get(keys[:1]),
        lambda: ns.put(keys[4:5], out), lambda: ns.acquire(keys), lambda: ns.reserve(1), lambda: ns.remove(keys),
        lambda: ns.pin(keys, ttl_s=1), lambda: ns.unpin(keys), lambda: ns.clear(), lambda: client.stats(),
        lambda: client.health(), lambda: client.raw_namespace("other", 4096),
        lambda: slots.commit(keys[:6], start=4),
    ]
    for call in calls:
        try:
            call()
            say("answered", call.__code__.co_firstlineno)
        except FailedPrecondition as e:
            assert "fork" in str(e) or "committed" in str(e), e
            refused += 1
    memory = open("/proc/self/maps").read()
    assert "/memfd:kvstored" not in memory, "the child has the slab mapped"
    sockets = sum(os.readlink(f"/proc/self/fd/{n}").startswith("socket:") for n in os.listdir("/proc/self/fd") if
                  os.path.exists(f"/proc/self/fd/{n}"))
    assert sockets == 0, "the child has its parent's socket"
    client.close()
    with Client(sys.argv[1], name="child") as own:
        mine = own.raw_namespace("rule 3", 16 << 10)
        right = [mine.get([key]) == [block(key, 16 << 10)] for key in keys[:4]]
        mine.put(keys[8:9], block(keys[8], 16 << 10))
    say("child", refused, len(calls), right.count(True))

if how == "multiprocessing":
    process = multiprocessing.get_context("fork").Process(target=in_the_child)
    process.start()
    process.join(60)
    say("status", process.exitcode)
else:
    pid = os.fork()
    if not pid:
        in_the_child()
        if how == "_exit":
            os._exit(0)
        if how == "forgets":
            del client, ns, lease, views, slots, out
            gc.collect()
        raise SystemExit(0)
    say("status", os.waitpid(pid, 0)[1])
hear()
for view, key in zip(slots.views, keys[4:6]):
    view[:] = block(key, 16 << 10)
say(slots.commit(keys[:6], start=4).stored)
say([bytes(view) == block(key, 16 << 10) for view, key in zip(views, keys)])
say(ns.get_into(keys[8:9], out), client.health().healthy)
hear()
"""


@pytest.mark.parametrize("how", ["_exit", "exit", "forgets", "multiprocessing"])
def test_a_forked_child_has_no_part_in_the_session_and_does_not_disturb_it(
    daemon: RunningDaemon, client: Client, ns: Namespace, start_program: Start, how: str
) -> None:
    forker = start_program(FORKER, daemon.endpoint, how)
    assert forker.hear() == "child 14 14 4"
    assert forker.hear() == "status 0"
    parent = session(client, "parent")
    assert parent is not None
    assert not parent["ended"]
    assert parent["pid"] == forker.pid
    assert parent["leased_slots"] == 2
    assert parent["granted_slots"] >= 2
    eventually(lambda: session(client, "child") is None, 5, "the child's own session to end")
    fill(client, ns, "others")
    key = ns.key(b"fork 8")
    ns.put([key], block(key, BLOCK))
    assert forker.ask("go on") == "2"
    assert forker.hear() == "[True, True]"
    assert forker.hear() == "1 True"
    assert client.stats()["counters"]["protocol_errors"] == 0
    forker.say("end")
    assert forker.finish() == 0
    eventually(lambda: session(client, "parent") is None, 5, "the session to end with the parent")


def test_a_parent_that_dies_before_its_forked_child_is_dead_for_the_daemon(
    daemon: RunningDaemon, client: Client, ns: Namespace, start_program: Start
) -> None:
    """The child inherits neither mapping nor socket, so nothing of the parent lives on."""
    store(ns, names("any", 1))
    parent = start_program(
        """
client = Client(sys.argv[1], name="parent")
ns = client.raw_namespace("rule 3", 16 << 10)
slots = ns.reserve(3)
pid = os.fork()
if not pid:
    say("child")
    hear()
    os._exit(0)
os.waitpid(pid, 0)
""",
        daemon.endpoint,
    )
    assert parent.hear() == "child"
    found = session(client, "parent")
    assert found is not None
    assert found["granted_slots"] == 3
    parent.process.kill()
    parent.process.wait(20)
    eventually(lambda: session(client, "parent") is None, 5, "the session to end with the parent")
    parent.say("end")


def test_programs_that_a_client_starts_do_not_inherit_the_memory(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between receiving a descriptor and closing it another thread may start one."""
    inheritable: list[bool] = []

    class Watched(Mapping):
        def __init__(self, descriptor: int, size_bytes: int, *, writable: bool) -> None:
            inheritable.append(os.get_inheritable(descriptor))
            super().__init__(descriptor, size_bytes, writable=writable)

    monkeypatch.setattr(kvstore_client.session, "Mapping", Watched)
    monkeypatch.setattr(kvstore_client.index, "Mapping", Watched)
    with Client(daemon.endpoint) as client:
        store(client.raw_namespace("rule 3", BLOCK), names("any", 1))
    assert len(inheritable) >= 2
    assert not any(inheritable)


# -- a socket in other hands


PASSES_ON = (
    RAW
    + """
import socket
courier = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
courier.connect("\\0" + hear())
socket.send_fds(courier, [b"!"], [wire._socket.fileno()])
wire._socket.close()
say("passed on")
hear()
"""
)


def test_a_session_ends_with_the_process_that_opened_it_whoever_has_its_socket(
    daemon: RunningDaemon, client: Client, ns: Namespace, start_program: Start
) -> None:
    opener, _ = start_raw(start_program, daemon, PASSES_ON, ns, [])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0kvstored-test-{os.getpid()}")
        listener.listen(1)
        listener.settimeout(20)
        opener.say(f"kvstored-test-{os.getpid()}")
        courier, _ = listener.accept()
        with courier:
            _, (descriptor,), _, _ = socket.recv_fds(courier, 1, 1)
    assert opener.hear() == "passed on"
    with Wire(daemon.socket, hello=False) as wire:
        wire._socket.close()
        wire._socket = socket.socket(fileno=descriptor)
        wire._socket.settimeout(10)
        found = [s for s in wire.call(stats=pb.StatsRequest()).stats.sessions if s.client == "raw"]
        assert [s.pid for s in found] == [opener.pid], "the session is that of who opened it"
        assert found[0].granted_slots == 4
        opener.kill()
        assert wire.receive() is None, "the daemon hangs up when the opener is gone"
    eventually(lambda: session(client, "raw") is None, 5, "the session to end")
    assert held(client, BLOCK) == {}


# -- processes that cannot be watched

NO_PIDFD = f"""#!{sys.executable}
import os
import kvstore.server.peer as peer
from kvstore.cli.entry import kvstored

def no_pidfd(pid, flags=0):
    raise OSError(1, "Operation not permitted")

peer.SO_PEERPIDFD = 9999  # an option that no kernel has
os.pidfd_open = no_pidfd
kvstored()
"""


@pytest.fixture
def blind_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningDaemon]:
    """A daemon on a system where it cannot watch the processes of its clients."""
    program = tmp_path / "kvstored"
    program.write_text(NO_PIDFD)
    program.chmod(0o700)
    monkeypatch.setattr(tests.conftest, "KVSTORED", program)
    with tempfile.TemporaryDirectory(prefix="kvstored-test-") as directory:
        daemon = RunningDaemon(Path(directory), {"server.grpc": "127.0.0.1:0", "host.size": "4MiB"})
        try:
            yield daemon
        finally:
            daemon.kill()


def test_a_process_that_cannot_be_watched_may_only_read(blind_daemon: RunningDaemon) -> None:
    with (
        Client(blind_daemon.grpc_endpoint, name="writer") as writer,
        Client(blind_daemon.endpoint, name="reader") as reader,
    ):
        ns, mine = (c.raw_namespace("rule 3", BLOCK) for c in (writer, reader))
        keys = store(ns, names("streamed", 8))
        assert mine.match(keys[:1]).blocks == 1
        assert exact(mine, keys) == 8
        for call in (
            lambda: mine.put([mine.key(b"new")], bytes(BLOCK)),
            lambda: mine.acquire(keys[:1]),
            lambda: mine.reserve(1),
        ):
            with pytest.raises(FailedPrecondition, match="read-only"):
                call()
        found = session(reader, "reader")
        assert found is not None
        assert found["read_only"]
        assert found["held_bytes"] == 0
        with Wire(blind_daemon.socket, hello=False) as wire:
            hello = wire.call(hello=pb.HelloRequest(protocol=PROTOCOL)).hello
            assert hello.read_only
            assert "no pidfd" in hello.read_only_reason
            segments = range(1, 8)
            wire.call(segments=pb.SegmentsRequest(ids=segments))
            assert wire.descriptors
            for descriptor in wire.descriptors:
                assert os.get_blocking(descriptor) in (True, False)
                with pytest.raises(OSError, match="Bad file descriptor"):
                    os.pwrite(descriptor, b"x", 0)
        fill(writer, ns, "others")
        assert exact(mine, keys) < 8


def test_a_reader_that_cannot_be_watched_is_forgotten_when_it_leaves(blind_daemon: RunningDaemon) -> None:
    with Client(blind_daemon.endpoint, name="watch") as watch:
        for _ in range(3):
            with Client(blind_daemon.endpoint, name="reader") as reader:
                reader.raw_namespace("rule 3", BLOCK)
        eventually(lambda: not sessions(watch, "reader"), 10, "all of them to be forgotten")
