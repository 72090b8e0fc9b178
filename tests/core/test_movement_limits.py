"""What movement keeps stays bounded, and what waits for the SSD to be opened is not lost."""

from kvstore.core.link import OPENING
from kvstore.core.loads import DEADLINES_SPARE
from tests.core.scene import chain
from tests.core.ssd_scene import Node


def test_tickets_that_ended_long_before_their_deadline_are_not_kept_until_then() -> None:
    node = Node()
    keys = chain("a", 2)
    node.put(keys)
    node.run()
    node.evict_memory(2)
    for _ in range(4 * DEADLINES_SPARE):
        node.moving.loads.close(node.load(keys, seconds=600.0))
    assert len(node.moving.loads._deadlines) <= DEADLINES_SPARE + 2
    node.check()


def test_what_is_stored_while_the_ssd_is_being_opened_is_written_when_it_is_open() -> None:
    node = Node()
    node.moving.link.trouble = OPENING
    keys = chain("a", 3)
    node.put(keys)
    assert node.moving.link.counts.writes_dropped == 0
    node.moving.link.trouble = ""
    node.run()
    assert node.moving.link.counts.written == 3
    node.check()
