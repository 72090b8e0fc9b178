"""Rule 4: holds outlive the daemon, where the slab does.

Each test has a client that touches a slot while the daemon is replaced and the next one fills the
slab as fast as it can: no wrong byte is served, and nothing that the client may touch is reused.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import Client, FailedPrecondition, Namespace
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block
from tests.rules.processes import RAW, Program, exact, fill, held, names, pool, sessions, start_raw, store

BLOCK = 16 << 10
HOWS = ["stopped", "killed"]

Start = Callable[..., Program]


@pytest.fixture
def daemon(start_daemon: Callable[..., RunningDaemon]) -> Iterator[RunningDaemon]:
    """4 MiB that outlive it: 256 slots of 16 KiB."""
    with tempfile.TemporaryDirectory(prefix="kvstored-test-", dir="/dev/shm") as place:
        yield start_daemon(host__size="4MiB", host__persist=str(Path(place) / "memory"))


@pytest.fixture
def ns(client: Client) -> Namespace:
    return client.raw_namespace("rule 4", BLOCK)


def of(client: Client, name: str) -> list[tuple[int, int, bool]]:
    """What each session of that name holds: slots to write to, leased ones, and whether it has ended."""
    return [(s["granted_slots"], s["leased_slots"], s["ended"]) for s in sessions(client, name)]


def replace(daemon: RunningDaemon, how: str, client: Client) -> None:
    """Another daemon in its place, to which the test's own client has attached again."""
    if how == "killed":
        daemon.kill()
    else:
        assert daemon.stop() == 0
    daemon.restart()
    eventually(lambda: client.health().reachable, 20, "the client to be back")


WRITES_ON = (
    RAW
    + """
for segment in sorted({slot >> 32 for slot in leased} - mapped.keys()):
    reply = wire.call(segments=pb.SegmentsRequest(ids=[segment])).segments
    mapped[segment] = Mapping(wire.descriptors[-1], reply.segments[0].size_bytes, writable=True)
looks = [mapped[slot >> 32].view((slot & 0xFFFFFFFF) * (16 << 10), 16 << 10) for slot in leased]
for place in places:
    place[: 8 << 10] = bytes([0xEE]) * (8 << 10)
say("half")
def attach():
    global wire
    wire = Wire(Path(sys.argv[1]), hello=False)
    resume = pb.Resume(nonce=hello.nonce, leased=leased, granted=slots)
    return wire.call(hello=pb.HelloRequest(protocol=PROTOCOL, client="raw", resume=resume)).hello
while True:
    word = hear()
    if word == "write":
        for place in places:
            place[:] = bytes([0xEE]) * (16 << 10)
        say("written")
    elif word == "look":
        say(*[int(bytes(view) == block(key, 16 << 10)) for view, key in zip(looks, keys)])
    elif word == "attach":
        answer = attach()
        say(int(answer.resumed), len(answer.granted))
    elif word == "commit":
        try:
            some = {"keys": [b"k" * 32], "slots": slots[:1], "parents": [b""], "depths": [0]}
            wire.call(commit=pb.CommitRequest(namespace_id=number, **some))
            say("stored")
        except FailedPrecondition as e:
            say(e)
    elif word == "give back":
        wire.call(abort=pb.AbortRequest(slots=slots))
        wire.call(release=pb.ReleaseRequest(slots=leased))
        say("given back")
"""
)


@pytest.mark.parametrize("how", HOWS)
def test_what_a_client_that_never_comes_back_may_touch_is_not_reused(
    daemon: RunningDaemon, client: Client, ns: Namespace, start_program: Start, how: str
) -> None:
    """It does not hear of the change, writes on into what it had reserved, and looks at what it had leased."""
    keys = store(ns, names("leased", 8))
    program, _ = start_raw(start_program, daemon, WRITES_ON, ns, keys)
    assert program.hear() == "half"
    assert ns.remove(keys[:2]) == 2, "of leased blocks: no key leads to them, and they stay where they are"
    replace(daemon, how, client)
    others = fill(client, ns, "others")
    assert program.ask("write") == "written"
    assert exact(ns, others) > 128
    assert program.ask("look").split() == ["1"] * 8
    assert of(client, "raw") == [(4, 8, True)]
    others = fill(client, ns, "and more")
    assert program.ask("write") == "written"
    assert exact(ns, others) > 128
    assert exact(ns, keys) == 6
    program.kill()
    eventually(lambda: held(client, BLOCK) == {}, 10, "its slots to be free once it is gone")
    assert pool(client, BLOCK)["doomed"] == 0


def test_a_client_that_is_stopped_over_two_daemons_keeps_what_it_holds(
    daemon: RunningDaemon, client: Client, ns: Namespace, start_program: Start
) -> None:
    """A process that was stopped for an hour may write the moment it goes on."""
    keys = store(ns, names("leased", 4))
    program, _ = start_raw(start_program, daemon, WRITES_ON, ns, keys)
    assert program.hear() == "half"
    program.stop()
    for how in ("killed", "stopped", "killed"):
        replace(daemon, how, client)
        fill(client, ns, how)
        assert of(client, "raw") == [(4, 4, True)]
    others = fill(client, ns, "others")
    program.say("write")
    program.go_on()
    assert program.hear() == "written"
    assert exact(ns, others) > 128
    assert program.ask("look").split() == ["1"] * 4
    daemon.kill()
    program.kill()
    daemon.restart()
    eventually(lambda: client.health().reachable, 20, "the client to be back")
    assert of(client, "raw") == [], "who is gone by the time of the start holds nothing"
    assert held(client, BLOCK) == {}


@pytest.mark.parametrize("how", HOWS)
def test_a_half_written_reservation_is_refused_at_commit_and_goes_back_when_it_is_given_back(
    daemon: RunningDaemon, client: Client, ns: Namespace, start_program: Start, how: str
) -> None:
    keys = store(ns, names("leased", 8))
    program, _ = start_raw(start_program, daemon, WRITES_ON, ns, keys)
    assert program.hear() == "half"
    replace(daemon, how, client)
    assert program.ask("attach") == "1 4"
    fill(client, ns, "others")
    assert of(client, "raw") == [(4, 8, False)]
    assert "was reserved of a daemon before this one" in program.ask("commit")
    assert program.ask("look").split() == ["1"] * 8
    replace(daemon, how, client)
    assert of(client, "raw") == [(4, 8, True)], "once more, by the name of the first session"
    assert program.ask("attach") == "1 4"
    assert "was reserved of a daemon before this one" in program.ask("commit")
    assert program.ask("give back") == "given back"
    eventually(lambda: held(client, BLOCK) == {}, 10, "all of it to be free")


def test_the_sdk_keeps_its_views_and_gives_back_what_it_had_reserved(
    daemon: RunningDaemon, client: Client, ns: Namespace
) -> None:
    with Client(daemon.endpoint, name="engine") as engine:
        mine = engine.raw_namespace("rule 4", BLOCK)
        keys = store(mine, names("held", 4))
        lease, slots = mine.acquire(keys), mine.reserve(2)
        views = lease.views
        slots.views[0][:] = bytes([0xEE]) * BLOCK
        replace(daemon, "killed", client)
        eventually(lambda: engine.health().reachable, 20, "the engine to be back")
        others = fill(client, ns, "others")
        slots.views[1][:] = bytes([0xEE]) * BLOCK
        assert of(client, "engine") == [(2, 4, False)]
        assert exact(ns, others) > 128
        assert [bytes(view) for view in views] == [block(key, BLOCK) for key in keys]
        with pytest.raises(FailedPrecondition, match="reserved of a daemon before this one"):
            slots.commit([mine.key(b"half")])
        (found,) = sessions(client, "engine")
        assert found["leased_slots"] == 4
        del lease, views, slots
        eventually(lambda: held(client, BLOCK) == {}, 10, "all of it to be free")
        assert mine.put([mine.key(b"half")], block(mine.key(b"half"), BLOCK)).stored == 1


READS = """
import threading
copyto, reached = np.copyto, threading.Event()
def slow(target, source, *more):
    if waiting:
        waiting.clear()
        copyto(target[: 4 << 10], source[: 4 << 10])
        say("copying")
        hear()
    copyto(target, source, *more)
waiting = []
np.copyto = slow
client = Client(f"unix://{sys.argv[1]}", name="reader", timeout_s=20)
ns = client.raw_namespace("rule 4", 16 << 10)
keys = [bytes.fromhex(key) for key in sys.argv[2:]]
out = np.empty((len(keys), 16 << 10), np.uint8)
assert ns.get_into(keys, list(out)) == len(keys)
while True:
    waiting.append(1)
    say("ready")
    hear()
    n = ns.get_into(keys, list(out))
    say(n, *[int(out[i].tobytes() == block(keys[i], 16 << 10)) for i in range(n)])
"""


@pytest.mark.parametrize("how", HOWS)
def test_a_copy_that_was_under_way_counts_only_if_it_is_right(
    daemon: RunningDaemon, client: Client, ns: Namespace, start_program: Start, how: str
) -> None:
    """No hold keeps what a reader copies: it must see that the daemon was replaced, before its memory is."""
    keys = store(ns, names("read", 3))
    reader = start_program(READS, daemon.socket, *[key.hex() for key in keys])
    assert reader.hear() == "ready"
    assert reader.ask("go") == "copying"
    replace(daemon, how, client)
    fill(client, ns, "others")
    assert exact(ns, keys) == 0, "what it copies from is something else by now"
    answer = reader.ask("on").split()
    assert answer == ["0"], f"a copy over the end of a daemon counted: {answer}"


PUTS = """
import threading
copyto = np.copyto
waiting = []
def slow(target, source, *more):
    if waiting:
        waiting.clear()
        copyto(target[: 4 << 10], source[: 4 << 10])
        say("copying")
        hear()
    copyto(target, source, *more)
np.copyto = slow
client = Client(f"unix://{sys.argv[1]}", name="writer", timeout_s=5)
ns = client.raw_namespace("rule 4", 16 << 10)
keys = [ns.key(b"put %d" % i) for i in range(4)]
waiting.append(1)
result = ns.put(keys, [block(key, 16 << 10) for key in keys])
say(result.stored, result.rejected, type(result.error).__name__)
hear()
result = ns.put(keys, [block(key, 16 << 10) for key in keys])
say(result.stored + result.existing, result.rejected, result.error)
hear()
"""


def test_a_put_that_was_under_way_writes_into_nobody_s_slot_and_can_be_done_again(
    daemon: RunningDaemon, client: Client, ns: Namespace, start_program: Start
) -> None:
    writer = start_program(PUTS, daemon.socket)
    assert writer.hear() == "copying"
    replace(daemon, "killed", client)
    others = fill(client, ns, "others")
    writer.say("on")
    stored, rejected, error = writer.hear().split()
    assert (stored, rejected) == ("0", "4")
    assert error in ("Unavailable", "FailedPrecondition")
    assert exact(ns, others) > 128
    eventually(lambda: held(client, BLOCK) == {}, 10, "its slots to go back")
    eventually(lambda: sessions(client, "writer"), 10, "it to attach again")
    assert writer.ask("again") == "4 0 None"
    assert exact(ns, [ns.key(b"put %d" % i) for i in range(4)]) == 4


def test_another_process_does_not_take_over_what_was_held_of_the_daemon_before(
    daemon: RunningDaemon, client: Client, ns: Namespace, start_program: Start
) -> None:
    from kvstored.v1 import PROTOCOL
    from kvstored.v1 import kvstore_pb2 as pb
    from tests.wire import Wire

    keys = store(ns, names("leased", 2))
    program, (nonce, granted, leased) = start_raw(start_program, daemon, WRITES_ON, ns, keys)
    assert program.hear() == "half"
    replace(daemon, "killed", client)
    with Wire(daemon.socket, hello=False) as thief:
        resume = pb.Resume(nonce=nonce, leased=leased, granted=granted)
        assert not thief.call(hello=pb.HelloRequest(protocol=PROTOCOL, client="thief", resume=resume)).hello.resumed
    assert of(client, "raw") == [(4, 2, True)]
    assert program.ask("attach") == "1 4"
    assert np.array_equal([1, 1], [int(word) for word in program.ask("look").split()])
