"""Views of slots: right for as long as anything made from them lives, and given back exactly then."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvstore_client import Client, FailedPrecondition, Namespace, Unavailable
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block
from tests.rules.processes import Program, exact, fill, names, pool, session, store

BLOCK = 16 << 10


@pytest.fixture
def daemon(start_daemon: Callable[..., RunningDaemon]) -> RunningDaemon:
    """4 MiB: 256 slots of 16 KiB."""
    return start_daemon(host__size="4MiB")


@pytest.fixture
def user(daemon: RunningDaemon) -> Client:
    """The client under test; `client` is another one."""
    return Client(daemon.endpoint, name="user")


@pytest.fixture
def ns(user: Client) -> Namespace:
    return user.raw_namespace("views", BLOCK)


def leased(client: Client) -> int:
    """Asked through the client whose leases they are: what it told the daemon before goes ahead."""
    return pool(client, BLOCK)["leased"]


def test_an_array_outlives_its_lease_and_its_client_while_others_fill_the_memory(
    client: Client, user: Client, ns: Namespace
) -> None:
    keys = store(ns, names("kept", 6))
    with ns.acquire(keys) as lease:
        arrays = [lease.numpy(i, np.uint64) for i in range(6)]
        half = arrays[2][100:200]
    user.close()
    others = client.raw_namespace("views", BLOCK)
    fill(client, others, "others")
    assert leased(client) == 6
    for key, array in zip(keys, arrays, strict=True):
        assert array.tobytes() == block(key, BLOCK)
    del arrays, array, lease
    gc.collect()
    fill(client, others, "more")
    assert leased(client) >= 1, "a part of one of them is alive"
    assert half.tobytes() == block(keys[2], BLOCK)[800:1600]
    del half
    gc.collect()
    eventually(lambda: session(client, "user") is None, 5, "the socket to go with the last view")
    assert leased(client) == 0


def test_a_lease_ends_exactly_when_its_last_user_is_gone(client: Client, user: Client, ns: Namespace) -> None:
    keys = store(ns, names("held", 4))
    lease = ns.acquire(keys[:1])
    again = ns.acquire(keys[:1])
    view = lease.views[0]
    assert leased(user) == 1
    lease.release()
    assert leased(user) == 1
    view.release()
    del lease
    gc.collect()
    assert leased(user) == 1, "held twice"
    array = again.numpy(0)
    again.release()
    alias = array
    del array, again, view
    gc.collect()
    assert leased(user) == 1
    assert alias.tobytes() == block(keys[0], BLOCK)
    del alias
    gc.collect()
    assert leased(user) == 0
    user.close()


def test_a_lease_without_a_user_ends_when_it_is_dropped(client: Client, user: Client, ns: Namespace) -> None:
    keys = store(ns, names("dropped", 4))
    lease = ns.acquire(keys[:1])
    assert leased(user) == 1
    del lease
    gc.collect()
    assert leased(user) == 0
    with ns.acquire(keys[:1]) as lease:
        assert leased(user) == 1
    assert leased(user) == 0
    with pytest.raises(FailedPrecondition, match="released"):
        _ = lease.views
    user.close()


def test_an_exception_in_a_with_block_lets_go_of_the_lease_but_not_of_what_was_kept(
    client: Client, user: Client, ns: Namespace
) -> None:
    keys = store(ns, names("raised", 2))
    kept = []

    def fail() -> None:
        with ns.acquire(keys[:1]) as lease:
            kept.append(lease.numpy(0))
            raise RuntimeError("the engine failed")

    with pytest.raises(RuntimeError, match="engine"):
        fail()
    gc.collect()
    assert leased(user) == 1
    assert kept[0].tobytes() == block(keys[0], BLOCK)
    kept.clear()
    gc.collect()
    assert leased(user) == 0
    user.close()


def test_a_removed_block_stays_readable_under_its_lease_and_its_slot_follows(
    client: Client, user: Client, ns: Namespace
) -> None:
    keys = store(ns, names("removed", 3))
    lease = ns.acquire(keys[:1])
    array = lease.numpy(0)
    assert ns.remove(keys[:1]) == 1
    assert ns.match(keys[:1]).blocks == 0
    fill(client, client.raw_namespace("views", BLOCK), "others")
    assert array.tobytes() == block(keys[0], BLOCK)
    assert pool(user, BLOCK)["doomed"] == 1
    del array, lease
    gc.collect()
    assert pool(user, BLOCK)["doomed"] == 0
    user.close()


def test_leased_bytes_cannot_be_written(user: Client, ns: Namespace) -> None:
    keys = store(ns, names("read only", 1))
    with ns.acquire(keys) as lease:
        with pytest.raises(TypeError, match="read-only"):
            lease.views[0][0] = 1
        with pytest.raises(ValueError, match="read-only"):
            lease.numpy(0)[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            lease.numpy(0).flags.writeable = True
    user.close()


def test_tensors_of_leased_and_reserved_slots_are_zero_copy_and_hold_their_slots(
    client: Client, user: Client, ns: Namespace
) -> None:
    torch = pytest.importorskip("torch")
    keys = store(ns, names("tensor", 1))
    with ns.acquire(keys) as lease:
        tensor = lease.torch(0, torch.int16)
        assert tensor.data_ptr() == lease.numpy(0).ctypes.data
        part = tensor.view(128, 64)[3]
        del tensor
    gc.collect()
    assert leased(user) == 1
    assert bytes(part.numpy().tobytes()) == block(keys[0], BLOCK)[3 * 128 : 4 * 128]
    del part
    gc.collect()
    assert leased(user) == 0
    key = ns.key(b"from a tensor")
    with ns.reserve(1) as slots:
        torch.frombuffer(slots.views[0], dtype=torch.uint8).copy_(
            torch.frombuffer(bytearray(block(key, BLOCK)), dtype=torch.uint8)
        )
        assert slots.commit([key]).stored == 1
    assert exact(ns, [key]) == 1
    user.close()


def granted(client: Client) -> int:
    return pool(client, BLOCK)["granted"]


def granted_to(client: Client) -> int:
    """The same, without what others hold."""
    held = session(client, "user")
    assert held is not None
    return int(held["granted_slots"])


def test_leaving_a_reservation_without_commit_gives_the_slots_back(client: Client, user: Client, ns: Namespace) -> None:
    with ns.reserve(4) as slots:
        assert granted(user) == 4
        slots.views[0][:5] = b"bytes"
    assert granted(user) == 0
    with pytest.raises(FailedPrecondition, match="committed or aborted"):
        _ = slots.views
    with pytest.raises(FailedPrecondition, match="committed or aborted"):
        slots.commit([ns.key(b"late")])
    user.close()


def test_an_array_alive_at_abort_keeps_its_slot_and_no_other(client: Client, user: Client, ns: Namespace) -> None:
    kept = []

    def fail() -> None:
        with ns.reserve(4) as slots:
            kept.append(np.frombuffer(slots.views[1], np.uint8))
            raise RuntimeError("a stream is still writing")

    with pytest.raises(RuntimeError, match="stream"):
        fail()
    gc.collect()
    assert granted(user) == 1
    others = fill(client, client.raw_namespace("views", BLOCK), "others")
    kept[0][:] = 0xEE
    assert exact(ns, others) > 128
    assert granted_to(user) == 1
    kept.clear()
    gc.collect()
    assert granted_to(user) == 0
    user.close()


def test_slots_of_blocks_that_exist_already_go_back_when_their_arrays_are_gone(
    client: Client, user: Client, ns: Namespace
) -> None:
    other = client.raw_namespace("views", BLOCK)
    keys = store(other, names("first", 2))
    with ns.reserve(3) as slots:
        arrays = [np.frombuffer(view, np.uint8) for view in slots.views]
        for array in arrays:
            array[:] = 0x55
        done = slots.commit([*keys, ns.key(b"new")])
        assert (done.stored, done.existing, done.rejected) == (1, 2, 0)
        assert granted_to(user) == 2
    assert granted_to(user) == 2, "arrays of both are alive"
    arrays[0][:] = 0x66
    assert exact(ns, keys) == 2, "the first writer's bytes"
    del array, arrays[0]
    gc.collect()
    assert granted_to(user) == 1
    arrays.clear()
    gc.collect()
    assert granted_to(user) == 0
    user.close()


def test_slots_without_a_key_go_back_with_the_commit(client: Client, user: Client, ns: Namespace) -> None:
    keys = [ns.key(name) for name in names("some", 2)]
    with ns.reserve(5) as slots:
        for view, key in zip(slots.views, keys, strict=False):
            view[:] = block(key, BLOCK)
        assert slots.commit(keys).stored == 2
        assert granted(user) == 0
    assert exact(ns, keys) == 2
    user.close()


def test_an_array_kept_after_its_commit_does_not_end_the_block(client: Client, user: Client, ns: Namespace) -> None:
    key = ns.key(b"kept")
    with ns.reserve(1) as slots:
        array = np.frombuffer(slots.views[0], np.uint8)
        array[:] = np.frombuffer(block(key, BLOCK), np.uint8)
        assert slots.commit([key]).stored == 1
    del array, slots
    gc.collect()
    assert granted(user) == 0
    assert exact(ns, [key]) == 1
    assert client.stats()["daemon"]["problems"] == []
    user.close()


def test_views_made_in_many_threads_all_go_back(client: Client, user: Client, ns: Namespace) -> None:
    keys = store(ns, names("threads", 32))

    def use(i: int) -> int:
        wrong = 0
        for j in range(50):
            with ns.acquire([keys[(i + j) % 32]]) as lease:
                wrong += lease.numpy(0).tobytes() != block(keys[(i + j) % 32], BLOCK)
        return wrong

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(use, range(6))) == 0
    gc.collect()
    assert leased(user) == 0
    user.close()


def test_views_dropped_by_many_threads_after_close_all_go_back(client: Client, user: Client, ns: Namespace) -> None:
    """Nobody else speaks on that socket any more: what one finalizer could not tell, another must."""
    keys = store(ns, names("threads", 32))
    views = [[ns.acquire([key]).numpy(0) for key in keys] for _ in range(8)]
    user.close()
    assert leased(client) == 32

    def drop(mine: list[Any]) -> None:
        while mine:
            mine.pop()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(drop, views))
    eventually(lambda: session(client, "user") is None, 5, "the session to end with the last view")
    assert leased(client) == 0


def test_a_view_that_ends_while_another_is_told_of_is_told_of_too(
    client: Client, user: Client, ns: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its finalizer runs in the middle of a message, when it can send none itself."""
    keys = store(ns, names("two", 2))
    views = [ns.acquire([key]).numpy(0) for key in keys]
    own = user._transport._session  # type: ignore[attr-defined]
    user.close()
    send = own._send

    def send_and_drop(frames: bytes) -> None:
        send(frames)
        views.clear()

    monkeypatch.setattr(own, "_send", send_and_drop)
    del views[0]
    assert views == []
    eventually(lambda: session(client, "user") is None, 5, "the session to end with the last view")


CYCLE = """
import gc
client = Client(sys.argv[1], name="cycle")
ns = client.raw_namespace("views", 16 << 10)
keys = [ns.key(b"cycle %d" % i) for i in range(8)]
ns.put(keys, [block(key, 16 << 10) for key in keys])
class Engine:
    pass
engine = Engine()
engine.self, engine.views = engine, ns.acquire(keys).views
array = np.frombuffer(engine.views[3], np.uint8)
client.close()
del engine
say("closed")
hear()
gc.collect()
say(array.tobytes() == block(keys[3], 16 << 10))
hear()
del array
say("gone")
hear()
"""


def test_views_in_cycles_of_a_closed_client_go_back_when_they_are_collected(
    client: Client, daemon: RunningDaemon, start_program: Callable[..., Program]
) -> None:
    program = start_program(CYCLE, daemon.endpoint)
    assert program.hear() == "closed"
    assert leased(client) == 8
    assert program.ask("collect") == "True"
    assert 1 <= leased(client) <= 8
    assert program.ask("drop") == "gone"
    eventually(lambda: session(client, "cycle") is None, 5, "the session to end with its last view")
    assert leased(client) == 0
    program.say("end")
    assert program.finish() == 0


def test_the_daemon_is_told_by_number_not_by_object(ns: Namespace, user: Client) -> None:
    """A view refers to its hold, and the hold to nothing that could keep the client alive."""
    keys = store(ns, names("weak", 1))
    lease = ns.acquire(keys)
    array = lease.numpy(0)
    ref = weakref.ref(lease)
    del lease
    gc.collect()
    assert ref() is None
    assert array.tobytes() == block(keys[0], BLOCK)
    user.close()


def test_views_that_are_first_made_when_the_daemon_is_gone_are_right(
    daemon: RunningDaemon, client: Client, user: Client, ns: Namespace
) -> None:
    """By a client that had mapped nothing: what is held for it stays readable, whoever has gone."""
    own = client.raw_namespace("views", BLOCK)
    keys = store(own, names("late", 6))
    lease = ns.acquire(keys)
    assert len(lease) == 6
    daemon.kill()
    assert [bytes(view) for view in lease.views] == [block(key, BLOCK) for key in keys]
    lease.release()
    lease.release()
    with pytest.raises(FailedPrecondition, match="released"):
        _ = lease.views


def test_what_is_committed_while_the_daemon_is_away_is_unavailable_and_given_up(
    daemon: RunningDaemon, ns: Namespace
) -> None:
    keys = [ns.key(name) for name in names("away", 2)]
    slots = ns.reserve(2)
    slots.views[0][:] = bytes(BLOCK)
    daemon.kill()
    with pytest.raises(Unavailable):
        slots.commit(keys)
    with pytest.raises(FailedPrecondition, match="committed or aborted"):
        slots.commit(keys)
    slots.abort()
    with ns.acquire(keys) as lease:
        assert len(lease) == 0
