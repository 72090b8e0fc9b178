"""Slots of commits that ended in no good way: they go back behind the copies, whatever came between.

A slot that stays granted is out of use until its session ends, and an engine runs for weeks. So after each test the
daemon's figures are as if nothing had been; and while a copy is queued nothing of it has gone back.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore_client import Client, DeadlineExceeded, admin
from kvstore_client.device_commits import DeviceCommit
from kvstore_client.device_session import DeviceSession
from kvstore_client.pool import Pool
from tests.conftest import eventually
from tests.gpu.client_engine import Served, keys_of
from tests.gpu.gpu_nodes import GpuNode

COUNT = 4
UNKNOWN_TICKET = 1 << 40
Engines = Callable[..., Served]
Nodes = Callable[..., GpuNode]


@pytest.fixture
def engine() -> Iterator[Engines]:
    """Engines in this process: `engine(node, timeout_s=2.0)`."""
    running: list[Served] = []

    def start(node: GpuNode, timeout_s: float = 20.0, **device: Any) -> Served:
        running.append(Served(node.endpoint, node.uuids[0], "nhd", "bf16", 64, timeout_s=timeout_s, device=device))
        one = running[-1]
        assert sum(one.put(1, [60], name="opens the segment")[:2]) == 1
        return one

    yield start
    for one in running:
        one.gate.set()
        one.close()


def session_of(one: Served) -> DeviceSession:
    """The client's session for devices."""
    session = one.client._transport.pools._session  # type: ignore[union-attr]
    assert session is not None
    return session


def count(node: GpuNode, name: str) -> int:
    return int(node.stats_of()["counters"][name])


def nothing_granted(node: GpuNode, one: Served) -> None:
    """Neither the daemon nor the client has a slot that nobody writes to."""
    figures = ("granted", "quarantined", "commits_pending")
    eventually(lambda: not any(node.stats_of()[figure] for figure in figures), what="no slot of the device in use")
    eventually(lambda: not [pool for pool in node.stats()["pools"] if pool["quarantined"]], what="no slot of memory")
    eventually(lambda: not any(session_of(one).holdings.granted.values()), what="the client to have no slot")
    eventually(lambda: not one.stats()["kept_for_copies"])


def put_and_get(one: Served, name: str) -> None:
    """By the device, with the very bytes."""
    before = one.stats()["devices"][one.device.uuid]["staged_blocks"]
    one.gate.set()
    assert one.put(COUNT, list(range(COUNT)), name=name) == [COUNT, 0, 0, ""]
    expected = [one.cache.block([i]).hex() for i in range(COUNT)]
    assert one.get(COUNT, list(range(32, 32 + COUNT)), name=name) == [COUNT, expected]
    assert one.stats()["devices"][one.device.uuid]["staged_blocks"] == before


def begin(one: Served, name: str) -> tuple[threading.Thread, list[Any]]:
    """A put whose copies wait for `let_go`, on a thread; its results come into the list."""
    one.gate = type(one.gate)()
    one.hold_stream()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(one.put(COUNT, list(range(COUNT)), name=name)))
    thread.start()
    return thread, results


def late_put(one: Served, name: str) -> None:
    """One that has returned, and whose copies wait for `let_go`."""
    one.gate = type(one.gate)()
    one.hold_stream()
    result = one.ns.put(keys_of(one.ns, COUNT, name), one.kv.blocks(list(range(COUNT)), stream=one.stream))
    assert (result.stored, result.rejected) == (0, COUNT)
    assert isinstance(result.error, DeadlineExceeded)


def still_granted(node: GpuNode, one: Served) -> None:
    """The client's thread, which tells what ends, has come round, and the slots under the copies are not told."""
    stream = one.device.stream()
    blocks = one.kv.blocks([50], stream=stream)
    assert one.ns.get_into(keys_of(one.ns, 1, "opens the segment"), blocks) == 1
    eventually(lambda: not node.stats_of()["leased"], what="the end of a hold to be told")
    assert node.stats_of()["granted"] == COUNT, "a slot is the daemon's that a kernel may write to"


def end_sessions(node: GpuNode) -> None:
    with Client(node.endpoint, name="admin") as client:
        for row in client.stats()["sessions"]:
            if row["client"] == "engine":
                admin.end_session(client, row["id"])


# -- events that the daemon cannot follow


@pytest.mark.parametrize(
    ("fault", "limits"),
    [("open_event:fail=InvalidHandle", {}), ("open_event:delay=60", {"watching.OPEN_S": 0.2})],
    ids=["refused", "hangs"],
)
def test_slots_of_an_event_that_cannot_be_opened_go_back_behind_the_copies(
    start_gpu_node: Nodes, engine: Engines, fault: str, limits: dict[str, float]
) -> None:
    node = start_gpu_node(limits=limits)
    one = engine(node)
    node.faults(fault)
    putting, results = begin(one, "failed")
    eventually(lambda: count(node, "events_failed") == 1)
    still_granted(node, one)
    one.let_go()
    putting.join(60)
    assert results == [[COUNT, 0, 0, ""]], "by shared memory"
    nothing_granted(node, one)
    node.faults("")
    put_and_get(one, "after")
    nothing_granted(node, one)


def test_slots_of_a_failed_commit_that_nobody_waits_for_go_back_behind_the_copies(
    gpu_node: GpuNode, engine: Engines
) -> None:
    one = engine(gpu_node, timeout_s=2.0)
    gpu_node.faults("open_event:fail=InvalidHandle")
    late_put(one, "late")
    eventually(lambda: count(gpu_node, "events_failed") == 1)
    eventually(lambda: not session_of(one).holdings.unsettled, what="the client to know that it failed")
    still_granted(gpu_node, one)
    one.let_go()
    nothing_granted(gpu_node, one)
    gpu_node.faults("")
    put_and_get(one, "after")


def test_many_failed_commits_leave_the_pool_as_it_was(gpu_node: GpuNode, engine: Engines) -> None:
    """More of them than the session's share of the pool has slots."""
    one = engine(gpu_node)
    gpu_node.faults("open_event:fail=InvalidHandle")
    rounds = 2 * (16 << 20) // 4 // one.kv.block_bytes // 32
    for round_ in range(rounds):
        one.gate = type(one.gate)()
        one.hold_stream()
        threading.Timer(0.02, one.gate.set).start()  # so that the commit is by event
        one.put(32, list(range(32)), name=f"failed{round_}")
    assert count(gpu_node, "events_failed") > rounds // 2
    nothing_granted(gpu_node, one)


def test_slots_of_an_event_that_came_after_its_time_are_the_daemons_once(
    start_gpu_node: Nodes, engine: Engines
) -> None:
    node = start_gpu_node(limits={"gpu_commits.EVENT_S": 0.3})
    one = engine(node, timeout_s=2.0)
    late_put(one, "late")
    eventually(lambda: count(node, "events_late") == 1)
    eventually(lambda: not session_of(one).holdings.unsettled)
    still_granted(node, one)
    one.let_go()
    nothing_granted(node, one)
    put_and_get(one, "after")


def test_an_abort_that_comes_before_the_daemon_has_seen_the_event_is_sent_again(
    start_gpu_node: Nodes, engine: Engines
) -> None:
    node = start_gpu_node(limits={"gpu_commits.EVENT_S": 0.3})
    one = engine(node, timeout_s=2.0)
    late_put(one, "late")
    eventually(lambda: count(node, "events_late") == 1)
    node.faults("query:delay=60")
    eventually(lambda: not session_of(one).holdings.unsettled)
    one.let_go()
    eventually(lambda: not one.stats()["kept_for_copies"])
    eventually(lambda: session_of(one).holdings.ended, what="the daemon to refuse the slots, as it watches their event")
    before = session_of(one)
    node.faults("")
    nothing_granted(node, one)
    assert session_of(one) is before, "none of it cost the session"
    put_and_get(one, "after")


# -- what comes between


def test_a_session_that_is_taken_over_after_a_commit_has_failed_gives_its_slots_back(
    gpu_node: GpuNode, engine: Engines
) -> None:
    one = engine(gpu_node, timeout_s=2.0)
    gpu_node.faults("open_event:fail=InvalidHandle")
    late_put(one, "late")
    eventually(lambda: not session_of(one).holdings.unsettled)
    before = session_of(one)
    end_sessions(gpu_node)
    eventually(lambda: session_of(one) is not before and not session_of(one).dead, what="the next session")
    still_granted(gpu_node, one)
    one.let_go()
    nothing_granted(gpu_node, one)
    gpu_node.faults("")
    put_and_get(one, "after")


@pytest.mark.parametrize("fault", ["", "open_event:fail=InvalidHandle"], ids=["followed", "failed"])
def test_slots_of_a_commit_whose_answer_never_came_go_back_behind_the_copies(
    gpu_node: GpuNode, engine: Engines, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    one = engine(gpu_node, timeout_s=2.0)
    gpu_node.faults(fault)
    commit, before = Pool.commit, session_of(one)

    def unanswered(pool: Pool, *arguments: Any) -> Any:
        gpu_node.pause()
        return commit(pool, *arguments)

    monkeypatch.setattr(Pool, "commit", unanswered)
    putting, results = begin(one, "unanswered")
    try:
        eventually(lambda: before.dead, what="the session to end without an answer")
    finally:
        gpu_node.resume()
    monkeypatch.undo()
    putting.join(60)
    assert results[0][0] == 0
    eventually(lambda: session_of(one) is not before and not session_of(one).dead, what="the next session")
    eventually(lambda: one.client.health().reachable)
    still_granted(gpu_node, one)
    one.let_go()
    nothing_granted(gpu_node, one)
    gpu_node.faults("")
    eventually(lambda: one.put(COUNT, list(range(COUNT)), name="unanswered")[2] == 0)
    put_and_get(one, "after")


@pytest.mark.parametrize("fault", ["", "open_event:fail=InvalidHandle"], ids=["stored", "failed"])
def test_of_a_commit_that_the_daemon_has_forgotten_what_is_not_stored_goes_back(
    gpu_node: GpuNode, engine: Engines, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    one = engine(gpu_node, timeout_s=2.0)
    gpu_node.faults(fault)
    answered, seen = DeviceCommit.answered, list[DeviceCommit]()

    def forgotten(commit: DeviceCommit, results: Any, ticket: int) -> None:
        """As of one that is asked for a minute too late."""
        seen.append(commit)
        answered(commit, results, ticket and UNKNOWN_TICKET)

    monkeypatch.setattr(DeviceCommit, "answered", forgotten)
    late_put(one, "late")
    monkeypatch.undo()
    eventually(lambda: seen[0].over)
    assert "not know" in seen[0].why
    still_granted(gpu_node, one)
    one.let_go()
    nothing_granted(gpu_node, one)
    assert len(one.ns.match(keys_of(one.ns, COUNT, "late")).tiers) == (0 if fault else COUNT)
    gpu_node.faults("")
    put_and_get(one, "after")


def test_a_put_that_is_interrupted_behind_its_commit_leaves_no_slot(
    gpu_node: GpuNode, engine: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine(gpu_node)
    gpu_node.faults("open_event:fail=InvalidHandle")
    commit = Pool.commit

    def interrupted(pool: Pool, *arguments: Any) -> Any:
        commit(pool, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Pool, "commit", interrupted)
    one.hold_stream()
    with pytest.raises(KeyboardInterrupt):
        one.put(COUNT, list(range(COUNT)), name="interrupted")
    monkeypatch.undo()
    still_granted(gpu_node, one)
    one.let_go()
    nothing_granted(gpu_node, one)


def test_slots_of_blocks_that_another_was_first_with_go_back(gpu_node: GpuNode, engine: Engines) -> None:
    one, other = engine(gpu_node), engine(gpu_node)
    putting, results = begin(one, "both")
    eventually(lambda: gpu_node.stats_of()["commits_pending"] == 1)
    assert other.put(COUNT, list(range(COUNT)), name="both") == [COUNT, 0, 0, ""]
    one.let_go()
    putting.join(60)
    assert results == [[0, COUNT, 0, ""]]
    nothing_granted(gpu_node, one)
    nothing_granted(gpu_node, other)


def test_slots_of_memory_that_was_lost_are_nobodys(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node, timeout_s=2.0)
    late_put(one, "late")
    gpu_node.lose()
    gpu_node.come()
    before = session_of(one).holdings
    one.let_go()
    nothing_granted(gpu_node, one)
    assert session_of(one).holdings is before
    assert not before.ended
    eventually(lambda: one.stats()["pools"].get(gpu_node.uuids[0]) == "")
    put_and_get(one, "after")


def test_a_client_that_is_closed_after_a_failed_commit_leaves_the_daemon_nothing(
    gpu_node: GpuNode, engine: Engines
) -> None:
    one = engine(gpu_node, timeout_s=2.0)
    gpu_node.faults("open_event:fail=InvalidHandle")
    late_put(one, "late")
    one.client.close()
    one.let_go()
    eventually(lambda: one.device.use().opened == 0, what="the segments to be closed")
    eventually(lambda: not [row for row in gpu_node.stats()["sessions"] if row["client"] == "engine"])
    assert gpu_node.stats_of()["granted"] == gpu_node.stats_of()["quarantined"] == 0
