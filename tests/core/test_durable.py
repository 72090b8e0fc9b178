"""A durable put answers for what is on the SSD when it is answered, not for what was there once."""

import pytest

from kvstore.core.durable import LEFT_AGAIN, Durable
from tests.core.scene import chain
from tests.core.ssd_scene import PAGE, Node


def packed_or_not(packed: bool, **settings: int) -> Node:
    """A node on whose SSD there is room for eight blocks."""
    room = {"packed_pages": 8} if packed else {"disk_pages": 8}
    node = Node(policy="hits:9", memory_pages=64, **room, **settings)  # type: ignore[arg-type]
    node.packed_bytes = PAGE if packed else 0
    return node


def wait(node: Node, keys: list[bytes]) -> tuple[Durable, list[str]]:
    said: list[str] = []
    return node.moving.writes.wait_durable(node.ns, keys, lambda waiter: said.append(waiter.why)), said


def ended(node: Node, waiter: Durable) -> None:
    node.moving.writes.forget_waiter(waiter)
    assert not waiter.safe
    node.check()


@pytest.mark.parametrize("packed", [False, True])
def test_more_than_the_ssd_has_room_for_is_not_durable(packed: bool) -> None:
    node, keys = packed_or_not(packed), chain("a", 12)
    node.put(keys)
    waiter, said = wait(node, keys)
    node.run()
    assert node.moving.run_on_disk(node.ns, keys) < len(keys)
    assert any(said), "blocks that are not on the SSD were said to be"
    ended(node, waiter)


@pytest.mark.parametrize("packed", [False, True])
def test_a_block_that_existed_on_the_ssd_and_is_evicted_from_it_meanwhile_is_not_durable(packed: bool) -> None:
    node, old, new = packed_or_not(packed), chain("old", 1), chain("new", 1)
    node.put(old)
    node.moving.writes.offer((node.ns.id, old[0]))
    node.run()
    node.put(new)
    waiter, said = wait(node, old + new)
    assert not said
    row = node.moving.link.disk_row((node.ns.id, old[0]))
    node.store.evict(row)
    node.run()
    assert said == [LEFT_AGAIN]
    ended(node, waiter)


def test_one_that_leaves_after_all_are_there_and_before_the_answer_is_known() -> None:
    node, keys = packed_or_not(False), chain("a", 2)
    node.put(keys)
    waiter, said = wait(node, keys)
    node.run()
    assert said == [""]
    node.moving.remove_from_disk(node.ns, keys[1:])
    assert waiter.why == LEFT_AGAIN
    ended(node, waiter)


def test_two_who_wait_for_a_block_are_both_told_and_one_who_was_answered_is_not() -> None:
    node, keys = packed_or_not(False), chain("a", 1)
    node.put(keys)
    waiters = [wait(node, keys)[0] for _ in range(3)]
    node.run()
    node.moving.writes.forget_waiter(waiters[0])
    node.moving.remove_from_disk(node.ns, keys)
    assert [waiter.why for waiter in waiters] == ["", LEFT_AGAIN, LEFT_AGAIN]
    for waiter in waiters:
        ended(node, waiter)
