"""What a kernel that is queued still needs: mapped segments, its slots, and a lease that has lost its last object.

Each test stops a stream, has the client let go of what that stream uses, and looks at what is kept.
"""

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvstore_client import Client, InvalidArgument, admin
from kvstore_client.afterwards import Afterwards
from kvstore_client.device_session import DeviceSession
from kvstore_client.marks import PER_THREAD, Mark
from kvstore_client.pool import Pool
from kvstored_cuda.devices.device import Direction
from kvstored_cuda.devices.host_device import HostDevice
from tests.conftest import eventually
from tests.gpu.client_engine import Engines, Served, keys_of
from tests.gpu.gpu_nodes import GpuNode

COUNT = 4
LATE_S = 1.5
"""A put whose stream stands still gives up after that; what is not late has the time on a slow machine, too."""


def to(node: GpuNode) -> str:
    return f"gpu:{node.uuids[0]}"


def late_put(one: Served, name: str = "late") -> None:
    """One whose copies are still queued when it has returned."""
    one.hold_stream()
    result = one.put(COUNT, list(range(COUNT)), name=name)
    assert result[:3] == [0, 0, COUNT], result
    assert not one.stream.query()


def session_of(one: Served) -> DeviceSession:
    """The client's session for devices."""
    session = one.client._transport.pools._session  # type: ignore[union-attr]
    assert session is not None
    return session


def watched(one: Served) -> threading.Event:
    """Set when the client begins to close a segment."""
    began = threading.Event()
    unmap = one.device._give_back

    def give_back(address: int, what: str) -> None:
        began.set()
        unmap(address, what)

    one.device._give_back = give_back  # type: ignore[method-assign]
    return began


# -- segments


@pytest.mark.parametrize("end", ["the daemon dies", "the client is closed"])
def test_a_segment_is_mapped_as_long_as_a_queued_kernel_writes_to_it(
    gpu_node: GpuNode, engine: Engines, end: str
) -> None:
    one = engine(gpu_node, timeout_s=LATE_S)
    assert one.put(1, [0])[0] == 1
    began = watched(one)
    late_put(one)
    if end == "the daemon dies":
        gpu_node.kill()
    else:
        eventually(lambda: gpu_node.stats_of()["commits_pending"] == 1)
        one.client.close()
    assert not began.wait(3.0), "a segment is closed under a kernel"
    one.let_go()
    eventually(lambda: one.device.use().opened == 0, what="the segments to be closed behind the kernel")


def test_a_failed_commit_leaves_its_segment_mapped_until_its_kernel_has_run(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node, timeout_s=LATE_S)
    assert one.put(1, [0])[0] == 1
    began = watched(one)
    late_put(one)
    eventually(lambda: gpu_node.stats_of()["commits_pending"] == 1)
    holdings = session_of(one).holdings
    eventually(lambda: holdings.unsettled)
    for commit in holdings.take_unsettled():
        commit.answered([], 0)  # as the daemon says of one whose event has not come within 30 s
        commit.end_hold()
    one.client.close()
    assert not began.wait(2.0), "a segment is closed under a kernel"
    one.let_go()
    eventually(lambda: one.device.use().opened == 0)


def test_of_a_segment_that_could_not_be_closed_the_daemon_is_not_told(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node, faults="close:fail=DeviceError")
    assert one.put(1, [0])[0] == 1
    session = session_of(one)
    one.client.close()
    eventually(lambda: session.holdings.given_up)
    assert not session.holdings.closed
    assert not session.holdings.closing
    eventually(lambda: session.settled)
    assert session.dead, "hung up without a word: the daemon keeps the segment until this process has ended"


def test_a_segment_that_could_not_be_closed_in_time_is_closed_later(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node, faults="close:fail=DeviceTimeout,times=1")
    assert one.put(1, [0])[0] == 1
    session = session_of(one)
    one.client.close()
    eventually(lambda: one.device.use().nothing, what="nothing to be held of the device")
    assert not session.holdings.given_up
    eventually(lambda: not [row for row in gpu_node.stats()["sessions"] if row["client"] == "engine"])


# -- leases


def read_behind(one: Served, lease_address: int, stream: Any) -> Any:
    """Enqueues a copy of a block, behind the gate; where it goes."""
    target = one.device.allocate(one.kv.block_bytes)
    one.device.copy(target.address, lease_address, one.kv.block_bytes, Direction.DEVICE_TO_DEVICE, stream)
    return target


def test_a_tensor_that_outlives_its_lease_keeps_the_block_for_what_the_named_stream_still_reads(
    gpu_node: GpuNode, engine: Engines
) -> None:
    one = engine(gpu_node)
    assert one.put(1, [0])[0] == 1
    lease = one.ns.acquire(keys_of(one.ns, 1), to=to(gpu_node))
    array, address = np.from_dlpack(lease.dlpack(0)), lease.addresses[0]
    lease.release(one.stream)
    one.hold_stream()
    target = read_behind(one, address, one.stream)
    del array, lease
    eventually(lambda: one.stats()["kept_for_copies"] == 1)
    one.ns.remove(keys_of(one.ns, 1))
    assert one.put(1, [5], name="other") is not None
    assert gpu_node.stats_of()["leased"] == 1
    one.let_go()
    one.stream.synchronize(10)
    assert one.device.array(target.address, one.kv.block_bytes).tobytes() == one.cache.block([0])
    eventually(lambda: not gpu_node.stats_of()["leased"])


@pytest.mark.parametrize("named", [True, False], ids=["a named stream", "the default stream"])
def test_a_lease_that_is_dropped_without_release_ends_behind_its_streams(
    gpu_node: GpuNode, engine: Engines, named: bool
) -> None:
    one = engine(gpu_node)
    assert one.put(1, [0])[0] == 1
    stream = one.stream if named else one.device.wrap_stream(0)
    lease = one.ns.acquire(keys_of(one.ns, 1), to=to(gpu_node))
    if named:
        lease.used_on(stream)
    stream.enqueue(one.gate.wait)
    target = read_behind(one, lease.addresses[0], stream)
    del lease
    eventually(lambda: one.stats()["kept_for_copies"] == 1)
    with Client(gpu_node.endpoint) as other:
        assert other.stats()["gpus"][0]["leased"] == 1
    one.let_go()
    stream.synchronize(10)
    assert one.device.array(target.address, one.kv.block_bytes).tobytes() == one.cache.block([0])
    eventually(lambda: not gpu_node.stats_of()["leased"])


def test_the_default_stream_of_a_thread_is_refused_and_the_lease_stays(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node)
    assert one.put(1, [0])[0] == 1
    lease = one.ns.acquire(keys_of(one.ns, 1), to=to(gpu_node))
    for name in (lease.release, lease.used_on):
        with pytest.raises(InvalidArgument, match="each thread"):
            name(PER_THREAD)
    assert len(lease.addresses) == 1
    lease.release()
    eventually(lambda: not gpu_node.stats_of()["leased"])


# -- commits whose session is lost


def settled(session: DeviceSession) -> bool:
    return session.settled


def end_sessions(node: GpuNode) -> None:
    with Client(node.endpoint, name="admin") as client:
        for row in client.stats()["sessions"]:
            if row["client"] == "engine":
                admin.end_session(client, row["id"])


def test_a_session_that_is_lost_with_a_commit_pending_loses_no_slot(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node, timeout_s=LATE_S)
    assert one.put(1, [0])[0] == 1
    for round_ in range(2):
        one.gate = type(one.gate)()
        late_put(one, f"late{round_}")
        eventually(lambda: gpu_node.stats_of()["commits_pending"] == 1)
        before = session_of(one)
        end_sessions(gpu_node)
        eventually(partial(settled, before), what="the next session")
        one.let_go()
        eventually(lambda: not one.stats()["kept_for_copies"])
        eventually(lambda: gpu_node.stats_of()["granted"] == gpu_node.stats_of()["quarantined"] == 0)
    eventually(lambda: one.put(COUNT, list(range(COUNT)), name="after")[0] == COUNT)


def test_a_commit_that_is_given_up_after_its_session_was_replaced_is_settled(
    gpu_node: GpuNode, engine: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine(gpu_node, timeout_s=LATE_S)
    assert one.put(1, [0])[0] == 1
    later = Pool.later

    def slow(pool: Pool, commit: Any) -> None:
        """As a thread that gets no turn until the next session is there."""
        end_sessions(gpu_node)
        eventually(lambda: pool.session.settled, what="the next session")
        later(pool, commit)

    monkeypatch.setattr(Pool, "later", slow)
    late_put(one)
    holdings = session_of(one).holdings
    eventually(lambda: not holdings.unsettled)
    assert gpu_node.stats_of()["granted"] == COUNT, "named in the Resume, since a kernel may write there"
    one.let_go()
    eventually(lambda: gpu_node.stats_of()["granted"] == gpu_node.stats_of()["quarantined"] == 0)
    assert not any(holdings.granted.values())


def test_an_error_that_nobody_foresaw_ends_no_thread_and_gives_nothing_back(caplog: pytest.LogCaptureFixture) -> None:
    """Found on reading: it ended the thread, and whatever was kept after it was kept for ever."""

    class Odd(Mark):
        tries = 0

        def query(self) -> bool:
            self.tries += 1
            if self.tries < 3:
                raise RuntimeError("not of a device")
            return True

    kept = Afterwards()
    stream = HostDevice("HOST-odd", 1 << 20).stream()
    odd = Odd(stream)
    kept.keep(odd, object())
    assert kept.wait_empty(10)
    assert odd.tries >= 3
    assert caplog.text.count("cannot be looked at") == 1
    kept.keep(Mark(stream), object())
    assert kept.wait_empty(10)
    kept.close()
