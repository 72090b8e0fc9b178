"""A process that attaches again takes over everything, on every device and in memory, or nothing and may try again."""

import pytest

from kvstore.core import leaving
from kvstore.core.holds import Session
from kvstored.v1.errors import FailedPrecondition, InvalidArgument, Unavailable
from tests.core.gpu_scene import Client, GpuNode
from tests.core.scene import chain

LEASED, GRANTED = 2, 1


@pytest.fixture
def node() -> GpuNode:
    """With two devices that have memory."""
    made = GpuNode(devices=2)
    for device in made.devices:
        made.stored_on(chain("first", 1), made.client(), device)
        made.run_all()
    return made


@pytest.fixture
def client(node: GpuNode) -> Client:
    """It has blocks leased and a slot granted on both devices, and has hung up."""
    client, keys = node.client(), chain("a", LEASED)
    for device in node.devices:
        node.stored_on(keys, client, device)
        device.run()
        device.pool.acquire(client.session, node.ns, keys, node.now)
        node.reserve(client, GRANTED, device)
    node.hang_up(client)
    return client


def uses(node: GpuNode, client: Client) -> dict[str, tuple[list[int], list[int]]]:
    """All that it has."""
    found = {}
    for device in node.devices:
        session = device.pool.session_here(client.session)
        assert session is not None
        found[device.pool.uuid] = (list(session.leased), list(session.granted))
    return found


def heir_of(node: GpuNode, client: Client) -> Session:
    was = client.session
    return node.memory.open_session(
        was.tenant, was.client, node.now, local=True, read_only=False, pid=was.pid, nonce=was.nonce + 1000
    )


def test_what_one_device_refuses_is_taken_over_of_none_and_the_next_attempt_takes_all(
    node: GpuNode, client: Client
) -> None:
    right = uses(node, client)
    last = node.devices[1].pool.uuid
    wrong = {**right, last: ([*right[last][0], 7 << 32], right[last][1])}
    heir = heir_of(node, client)
    with pytest.raises(InvalidArgument, match="did not hold slot"):
        node.tier.resume(client.session, heir, wrong)
    assert uses(node, client) == right, "something was taken over of a device"
    node.tier.resume(client.session, heir, right)
    for device in node.devices:
        session = device.pool.session_here(heir)
        assert session is not None
        assert (list(session.leased), list(session.granted)) == right[device.pool.uuid]
        assert device.pool.session_here(client.session) is None
        device.pool.store.check()


def test_what_memory_would_refuse_is_known_before_any_device_changes(node: GpuNode, client: Client) -> None:
    right, heir = uses(node, client), heir_of(node, client)
    with pytest.raises(InvalidArgument, match="did not hold slot"):
        leaving.check_resume(node.memory, client.session, heir, [3 << 32], [])
    leaving.check_resume(node.memory, client.session, heir, [], [])
    leaving.check_resume(node.memory, client.session, heir, [], [])
    assert uses(node, client) == right
    assert client.session.id in node.memory.sessions


def test_a_device_that_is_lost_refuses_what_is_named_of_it_and_the_others_keep_theirs(
    node: GpuNode, client: Client
) -> None:
    right, heir = uses(node, client), heir_of(node, client)
    first, lost = node.devices
    lost.lose()
    with pytest.raises(Unavailable, match="out of use"):
        node.tier.resume(client.session, heir, right)
    here = first.pool.session_here(client.session)
    assert here is not None
    assert list(here.leased) == right[first.pool.uuid][0]
    node.tier.resume(client.session, heir, {first.pool.uuid: right[first.pool.uuid]})
    taken = first.pool.session_here(heir)
    assert taken is not None
    assert list(taken.granted) == right[first.pool.uuid][1]


def test_a_session_that_never_was_on_a_device_has_nothing_to_be_taken_over_there(node: GpuNode, client: Client) -> None:
    other = node.client()
    node.hang_up(other)
    with pytest.raises(FailedPrecondition, match="had nothing on device"):
        node.tier.resume(other.session, heir_of(node, other), uses(node, client))


def test_slots_in_a_commit_that_waits_are_granted_again_only_where_they_are_named(node: GpuNode) -> None:
    client, keys = node.client(), chain("b", 2)
    pool = node.gpu.pool
    named, unnamed = node.reserve(client, 2)
    event = node.put_on(keys, client, refs=[named, unnamed])
    assert pool.own(client.session, [named, unnamed]) == [], "they are in a commit"
    node.hang_up(client)
    heir = heir_of(node, client)
    node.tier.resume(client.session, heir, {pool.uuid: ([], [named])})
    assert pool.own(heir, [named, unnamed]) == [named]
    node.gpu.complete(event)
    assert pool.held_bytes(heir) == 2 * pool.store.pool_at(named).slot_bytes, "who knows when the other is written to"
