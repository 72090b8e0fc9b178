"""What a process was granted of memory is nobody else's while a device may still be writing to it for that process."""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import cast

import pytest

from kvstore.core.gpu_jobs import AwaitQuiet
from kvstore.core.gpu_tier import GpuTier
from kvstore.core.holds import Session
from kvstore.server import devices, tickets
from kvstore.server.calls import IndexesPort, Node, SlabPort
from kvstore.server.device_tickets import DeviceCommit
from kvstored.v1 import kvstore_pb2 as pb
from kvstored_cuda.devices.handles import Generation
from tests.core.gpu_scene import Event, GpuNode
from tests.core.scene import chain


@dataclass
class Port:
    """The devices of the scene, whose workers are in the test's hands."""

    tier: GpuTier
    exporter: bytes = Generation.mine().to_bytes()

    def devices(self) -> list[pb.Device]:
        return []

    def handle(self, uuid: str, segment: int) -> None:
        return None

    def stats(self) -> list[pb.GpuStats]:
        return []

    def off(self) -> str:
        return ""

    def degraded(self) -> list[str]:
        return []

    def pump(self) -> None:
        """A test takes the jobs itself."""


@pytest.fixture
def scene() -> GpuNode:
    made = GpuNode(devices=2)
    for device in made.devices:  # so that there is memory to be granted
        made.stored_on(chain("first", 1), made.client(), device)
        made.run_all()
    return made


@pytest.fixture
def node(scene: GpuNode) -> Node:
    """The server's side of the scene."""
    return Node(
        store=scene.memory,
        slab=cast(SlabPort, None),  # no bytes are asked for
        indexes=cast(IndexesPort, None),
        epoch=1,
        version="test",
        problems=list,
        jobs_ready=lambda: None,
        memory_changed=asyncio.Future,
        gpu=Port(scene.tier),
    )


def granted_in_memory(scene: GpuNode, session: Session) -> int:
    (ref,) = scene.memory.reserve(session, scene.ns, 1, scene.now)
    return ref


def quarantined(scene: GpuNode) -> int:
    return scene.memory.pool(scene.ns).quarantined


def asked(scene: GpuNode, device: int = 0) -> list[AwaitQuiet]:
    return [job for job in scene.devices[device].take() if isinstance(job, AwaitQuiet)]


def test_it_is_kept_until_the_device_is_quiet(scene: GpuNode, node: Node) -> None:
    client = scene.client()
    scene.reserve(client, 1)
    ref = granted_in_memory(scene, client.session)
    client.alive = False
    node.device_clients.end_session(client.session, process_gone=True)
    assert quarantined(scene) == 1
    (job,) = asked(scene)
    scene.gpu.pool.quiet(job.number, "it cannot be told", scene.now)
    assert quarantined(scene) == 1, "an answer that is none"
    scene.now += 6.0
    (job,) = asked(scene)
    scene.gpu.pool.quiet(job.number, "", scene.now)
    assert quarantined(scene) == 0
    assert ref not in client.session.granted
    scene.memory.check()


def test_it_is_kept_also_where_the_process_has_a_session_of_its_own_for_devices_with_nothing_on_it(
    scene: GpuNode, node: Node
) -> None:
    for order in (0, 1):
        memory, devices = scene.client(), scene.client()
        devices.session.pid = memory.session.pid
        scene.gpu.pool.session_of(devices.session)
        granted_in_memory(scene, memory.session)
        memory.alive = devices.alive = False
        both = [memory.session, devices.session]
        for session in both if order else reversed(both):
            node.device_clients.end_session(session, process_gone=True)
        assert quarantined(scene) == 1
        (job,) = asked(scene)
        scene.gpu.end(job)
        assert quarantined(scene) == 0
    scene.memory.check()


def test_it_is_kept_until_the_last_of_several_devices_is_quiet_and_a_loss_says_nothing_of_that(
    scene: GpuNode, node: Node
) -> None:
    client = scene.client()
    for device in scene.devices:
        scene.reserve(client, 1, device)
    granted_in_memory(scene, client.session)
    client.alive = False
    node.device_clients.end_session(client.session, process_gone=True)
    (job,) = asked(scene)
    scene.gpu.end(job)
    assert quarantined(scene) == 1
    for number in scene.devices[1].pool.lose("an Xid"):
        node.device_clients.quiet(number)
    assert quarantined(scene) == 1, "the device was lost for the daemon, and its kernels may run"
    (why,) = node.device_clients.degraded()
    assert "device GPU-1 is out of use" in why
    scene.devices[1].come()
    (job,) = asked(scene, 1)
    scene.devices[1].end(job)
    assert quarantined(scene) == 0
    assert not node.device_clients.degraded()
    scene.memory.check()


def test_who_dies_while_a_device_is_lost_that_it_was_told_of_is_asked_about_when_it_is_back(
    scene: GpuNode, node: Node
) -> None:
    client = scene.client()
    reply = devices.devices(node, client.session)
    assert not reply.devices, "the port of this test names none"
    granted_in_memory(scene, client.session)
    for device in scene.devices:
        for number in device.pool.lose("a call that took too long"):
            node.device_clients.quiet(number)
    client.alive = False
    node.device_clients.end_session(client.session, process_gone=True)
    assert quarantined(scene) == 1
    for left, device in enumerate(scene.devices):
        assert quarantined(scene) == 1, f"freed when {left} of 2 devices were quiet"
        device.come()
        device.run()
    assert quarantined(scene) == 0
    scene.memory.check()


def test_nothing_is_remembered_of_who_was_told_of_devices_and_ends_with_nothing(scene: GpuNode, node: Node) -> None:
    for ends in (node.device_clients.forget, lambda of: node.device_clients.end_session(of, process_gone=True)):
        memory, own = scene.client().session, scene.client().session
        own.pid = memory.pid
        node.device_clients.told(own)
        scene.gpu.pool.session_of(own)
        for session in (own, memory):
            assert scene.gpu.pool.knows(memory.pid, memory.born)
            ends(session)
        assert not scene.gpu.pool.knows(memory.pid, memory.born)
        for client in scene.clients:
            client.alive = client.alive and client.session.pid != memory.pid
        scene.run_all()
        scene.now += 6.0
        assert not asked(scene)
    scene.memory.check()


def test_a_device_out_of_use_is_none_that_who_is_told_of_it_uses(scene: GpuNode, node: Node) -> None:
    client = scene.client()
    for device in scene.devices:
        device.pool.lose("an Xid")
    node.device_clients.told(client.session)
    granted_in_memory(scene, client.session)
    node.device_clients.end_session(client.session, process_gone=True)
    assert quarantined(scene) == 0


def test_of_a_session_of_the_daemon_before_memory_is_kept_until_every_device_is_quiet(
    scene: GpuNode, node: Node
) -> None:
    client = scene.client()
    granted_in_memory(scene, client.session)
    scene.memory.end_session(client.session, process_gone=False)
    node.device_clients.adopted(client.session)
    client.alive = False
    node.device_clients.end_session(client.session, process_gone=True)
    for device in (0, 1):
        assert quarantined(scene) == 1
        (job,) = asked(scene, device)
        scene.devices[device].end(job)
    assert quarantined(scene) == 0
    scene.memory.check()


def test_of_a_session_of_the_daemon_before_memory_is_kept_where_no_device_can_be_opened(
    scene: GpuNode, node: Node
) -> None:
    client = scene.client()
    granted_in_memory(scene, client.session)
    pools, scene.tier.pools = scene.tier.pools, {}
    node.device_clients.adopted(client.session)
    client.alive = False
    node.device_clients.end_session(client.session, process_gone=True)
    assert quarantined(scene) == 1
    (why,) = node.device_clients.degraded()
    assert "there is no device" in why
    scene.tier.pools = pools
    for pool in pools.values():
        scene.tier.added(pool)
    for device in scene.devices:
        assert quarantined(scene) == 1
        device.run()
    assert quarantined(scene) == 0
    scene.memory.check()


def test_who_has_used_no_device_or_has_left_leaves_nothing_behind(scene: GpuNode, node: Node) -> None:
    client, left = scene.client(), scene.client()
    granted_in_memory(scene, client.session)
    node.device_clients.end_session(client.session, process_gone=True)
    assert quarantined(scene) == 0
    scene.gpu.pool.session_of(left.session)
    node.device_clients.forget(left.session)
    assert not asked(scene), "a process that lives is not asked about"
    assert left.session.id not in scene.memory.sessions


def test_a_socket_that_hangs_up_frees_nothing_of_a_process_that_lives(scene: GpuNode, node: Node) -> None:
    client = scene.client()
    scene.reserve(client, 1)
    granted_in_memory(scene, client.session)
    node.device_clients.end_session(client.session, process_gone=False)
    assert not asked(scene)
    assert quarantined(scene) == 1
    client.alive = False
    node.device_clients.end_session(client.session, process_gone=True)
    assert quarantined(scene) == 1
    (job,) = asked(scene)
    scene.gpu.end(job)
    assert quarantined(scene) == 0


def test_what_an_answer_granted_that_did_not_get_out_is_given_back(scene: GpuNode, node: Node) -> None:
    client, pool, keys = scene.client(), scene.gpu.pool, chain("a", 2)
    scene.stored_on(keys, client)
    scene.run_all()
    kept = pool.acquire(client.session, scene.ns, keys[:1], scene.now)
    request = pb.DeviceRequest(device=pool.uuid, generation=pool.generation)
    leased = pb.AcquireReply(slots=pool.acquire(client.session, scene.ns, keys, scene.now))
    granted = pb.ReserveReply(slots=scene.reserve(client, 2))
    for reply in (pb.DeviceReply(acquire=leased), pb.DeviceReply(reserve=granted)):
        devices.give_back(node, client.session, request, reply)
    here = pool.session_of(client.session)
    assert (dict(here.leased), dict(here.granted)) == ({kept[0]: 1}, {})
    pool.lose("an Xid")
    devices.give_back(node, client.session, request, pb.DeviceReply(acquire=leased))


def test_an_end_that_nobody_asks_for_in_time_leaves_no_slot_with_who_cannot_know_of_it(
    scene: GpuNode, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, pool, keys = scene.client(), scene.gpu.pool, chain("a", 1)
    scene.stored_on(keys, client)
    numbers, slots, mine = [], scene.reserve(client, 2), node.tickets.of_session(client.session)
    for slot in slots:
        event = Event(client.session.pid, {slot: keys[0]})
        scene.gpu.events.append(event)
        begin = partial(pool.commit, client.session, scene.ns, keys, [slot], [b""], [0], event, scene.now)
        numbers.append(mine.keep(DeviceCommit(pool, client.session, 1, begin)))
        scene.gpu.complete(event)
    scene.run_all()
    told = mine.find(numbers[0])
    assert told is not None
    assert list(told.reply().results) == [pb.EXISTS]
    monkeypatch.setattr(tickets, "KNOWN_S", 0.0)
    assert mine.find(numbers[0]) is mine.find(numbers[1]) is None
    assert pool.own(client.session, slots) == slots[:1], "only of the first it was told that it is its own still"
