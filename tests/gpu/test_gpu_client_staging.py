"""The staging buffer of a client: what becomes of its events and its memory when copies are many, late, or lost."""

import os

import pytest

from kvstore_client.local import LocalTransport
from kvstore_client.pools import Pools
from tests.conftest import eventually
from tests.gpu.client_engine import Engines, Served, keys_of
from tests.gpu.gpu_nodes import GpuNode

COUNT = 4
STAGED = "open:fail=IpcRefused;register:fail=PageLockRefused"
NOT_EVEN_A_BUFFER = f"{STAGED};host_allocate:fail=PageLockRefused"


def put_and_get(one: Served, name: str = "k") -> None:
    assert one.put(COUNT, list(range(COUNT)), name=name) == [COUNT, 0, 0, ""]
    expected = [one.cache.block([i]).hex() for i in range(COUNT)]
    assert one.get(COUNT, list(range(32, 32 + COUNT)), name=name) == [COUNT, expected]


def pools_of(one: Served) -> Pools:
    transport = one.client._transport
    assert isinstance(transport, LocalTransport)
    return transport.pools


def staged(one: Served) -> int:
    return int(one.stats()["devices"][one.device.uuid]["staged_blocks"])


def memory(one: Served) -> tuple[int, int]:
    """Bytes page-locked and allocated on the device by this process."""
    use = one.device.use()
    return use.page_locked_bytes, use.allocated_bytes


@pytest.mark.parametrize("faults", [STAGED, NOT_EVEN_A_BUFFER], ids=["page-locked", "not page-locked"])
def test_many_staged_calls_use_the_same_few_events(gpu_node: GpuNode, engine: Engines, faults: str) -> None:
    one = engine(gpu_node, faults=faults)
    put_and_get(one, "first")
    eventually(lambda: not one.stats()["kept_for_copies"])
    before = one.device.use().events
    for i in range(20):
        put_and_get(one, f"k{i}-")
    assert staged(one) == 21 * 2 * COUNT
    eventually(lambda: not one.stats()["kept_for_copies"])
    assert one.device.use().events <= before + 2


@pytest.mark.parametrize("faults", [STAGED, NOT_EVEN_A_BUFFER], ids=["page-locked", "not page-locked"])
def test_a_buffer_of_a_lost_device_is_given_up_by_close(gpu_node: GpuNode, engine: Engines, faults: str) -> None:
    one = engine(gpu_node, faults=faults)
    put_and_get(one)
    staging = pools_of(one).staging(one.device)
    one.device.lose("on purpose")
    one.close()
    assert not staging._halves
    eventually(lambda: not pools_of(one)._of_device)


def test_a_buffer_given_up_for_a_late_copy_is_freed_when_the_copy_has_ended(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node, timeout_s=1.5, faults=f"{NOT_EVEN_A_BUFFER};copy:delay=60,times=1")
    assert one.put(COUNT, list(range(COUNT)))[0] == 0
    held = memory(one)
    assert held != (0, 0)
    assert one.stats()["kept_for_copies"], "the copy is under way, and may still be enqueued"
    one.device.plan.release()
    eventually(lambda: memory(one) == (0, 0), what="the buffer to be freed")
    put_and_get(one, "later")


def test_a_page_locked_buffer_needs_no_call_that_could_be_late(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node, faults=f"{STAGED};copy:fail=DeviceTimeout")
    put_and_get(one)
    assert staged(one) == 2 * COUNT


def test_blocks_on_their_way_are_answered_though_later_ones_had_no_turn(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node, timeout_s=1.0, faults="register:fail=PageLockRefused")
    assert one.put(COUNT, list(range(COUNT))) == [COUNT, 0, 0, ""]
    there, more = keys_of(one.ns, COUNT), keys_of(one.ns, COUNT, "memory")
    assert one.ns.put(more, [os.urandom(one.kv.block_bytes)] * COUNT).stored == COUNT
    staging = pools_of(one).staging(one.device)
    expected = [one.cache.block([i]) for i in range(COUNT)]
    with staging._turn:  # another call's
        copied = one.ns.get_into(there + more, one.kv.blocks(range(32, 32 + 2 * COUNT), stream=one.stream))
    one.stream.synchronize(10)
    assert copied == COUNT
    assert [one.cache.block([32 + i]) for i in range(COUNT)] == expected
