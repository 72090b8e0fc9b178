"""A batch that exists is safe: everything else is a typed error, and nothing was written."""

from typing import Any

import numpy as np
import pytest

from kvstored.v1.errors import InvalidArgument
from kvstored_cuda.batches import SLOTS_MAX, Numbers, Way, check_batch
from kvstored_cuda.layouts import PagedLayout, SlotOrder
from kvstored_cuda.twins import TwinCopies
from tests.cuda.kernel_rig import Case, HostPlace, ShimCopies, World, plain_shim


def small_world(**changes: Any) -> World:
    sizes = {"L": 4, "B": 10, "K": 2, "N": 4, "H": 2}
    said: dict[str, Any] = {
        "element_bytes": 2,
        "axes": "BKNH",
        "sizes": sizes,
        "head_elements": (8, 8),
        "padding": dict.fromkeys("BKNH", 0),
        "shift": 0,
        "order": SlotOrder.CANONICAL,
        "pages_per_slot": 2,
        "pages": (0, 1, 2, 3),
        "other_pages": (4, 5, 6, 7),
        "layers": range(4),
        "slot_shift": 0,
        "multiprocessors": 1,
        "seed": 11,
    }
    return World(Case(**(said | changes)), HostPlace())


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a page behind the last": ({"pages": [0, 1, 2, 10]}, "page 10 is not one of this engine's, 0 to 9"),
    "a page before the first": ({"pages": [0, 1, -1, 2]}, "page -1"),
    "a page of 64 bits": ({"pages": [0, 1, 2, 1 << 62]}, "page 4611686018427387904"),
    "a page of more": ({"pages": [0, 1, 2, 1 << 70]}, "pages"),
    "a page too few": ({"pages": [0, 1, 2]}, "pages of shape (3,) are not 2 for each of 2 slots"),
    "a table the wrong way": ({"pages": np.array([[0, 1, 2, 3]])}, "pages of shape (1, 4)"),
    "pages that are not whole": ({"pages": [0.0, 1.0, 2.0, 3.0]}, "not a list of whole numbers"),
    "pages that are yes and no": ({"pages": [True, False, True, False]}, "not a list of whole numbers"),
    "pages that are words": ({"pages": ["0", "1", "2", "3"]}, "not a list of whole numbers"),
    "pages of three dimensions": ({"pages": np.zeros((2, 2, 1), int)}, "not a list of whole numbers"),
    "a ragged table": ({"pages": [[0, 1], [2]]}, "pages are not whole numbers"),
    "a slot of nothing": ({"slots": [0, 4096]}, "the address of a slot is 0"),
    "a slot below nothing": ({"slots": [-8, 4096]}, "the address of a slot is 0"),
    "a slot at the end": ({"slots": [4096, (1 << 63) - 64]}, "too large"),
    "a slot beyond 63 bits": ({"slots": np.array([4096, 1 << 63], np.uint64)}, "is over"),
    "a slot between elements": ({"slots": [4096, (1 << 20) + 1]}, "not aligned to elements of 2 bytes"),
    "slots of the wrong size": ({"slot_bytes": 1023}, "a slot of 1023 bytes is not one of this layout"),
    "slots of no size": ({"slot_bytes": None}, "a slot of None bytes"),
    "layers behind the last": ({"layers": range(2, 5)}, "layers=range(2, 5)"),
    "layers before the first": ({"layers": range(-1, 2)}, "layers=range(-1, 2)"),
    "no layers": ({"layers": range(2, 2)}, "layers=range(2, 2)"),
    "every second layer": ({"layers": range(0, 4, 2)}, "layers=range(0, 4, 2)"),
    "one layer as a number": ({"layers": 2}, "layers=2"),
}


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("what", WRONG)
def test_a_call_that_cannot_be_is_refused_and_writes_nothing(what: str, way: Way) -> None:
    world = small_world()
    before = world.content()
    changes, message = WRONG[what]
    asked = {"pages": [0, 1, 2, 3], "slots": world.slots, "slot_bytes": world.layout.slot_bytes} | changes
    pages, slots = asked.pop("pages"), asked.pop("slots")
    for copies in (TwinCopies(world.layout), ShimCopies(world.layout, plain_shim())):
        with pytest.raises(InvalidArgument) as refused:
            getattr(copies, way)(pages, slots, **asked)
        assert message in str(refused.value)
    assert world.content() == before


FAR = 1 << 50
"""An address beside which nothing is: a batch is numbers, nobody looks there."""


def batch(world: World, way: Way, pages: Numbers, slots: Numbers) -> None:
    check_batch(world.layout, way, pages, slots, slot_bytes=world.layout.slot_bytes)


def test_what_is_written_is_written_once_and_what_is_read_any_number_of_times() -> None:
    world = small_world()
    slot, other = FAR, FAR + (1 << 20)
    size = world.layout.slot_bytes
    batch(world, Way.GATHER, [0, 0, 0, 0], [slot, other])
    batch(world, Way.SCATTER, [0, 1, 2, 3], [slot, slot])
    with pytest.raises(InvalidArgument, match="page 2 is to be written twice"):
        batch(world, Way.SCATTER, [2, 1, 0, 2], [slot, other])
    for near in (slot, slot + size - 2, slot - size + 2):
        with pytest.raises(InvalidArgument, match="two slots to be written overlap"):
            batch(world, Way.GATHER, [0, 1, 2, 3], [slot, near])


@pytest.mark.parametrize("way", list(Way))
def test_no_slot_lies_in_the_engines_own_memory(way: Way) -> None:
    world = small_world()
    size = world.layout.slot_bytes
    for base, part in ((b, n) for bases in world.layout.bases for n, b in enumerate(bases)):
        end = base + world.layout.part_reach(part)
        for slot in (base, end - 2, base - size + 2):
            with pytest.raises(InvalidArgument, match="in the engine's own memory"):
                batch(world, way, [0, 1], [slot])
    low, high = world.layout.spans[0][0], world.layout.spans[-1][1]
    batch(world, way, [0, 1, 2, 3], [FAR, low - size])
    batch(world, way, [0, 1, 2, 3], [FAR, high])


def test_a_way_is_not_its_name() -> None:
    """What is checked depends on it."""
    with pytest.raises(InvalidArgument, match="way='gather' is not one of"):
        batch(small_world(), "gather", [0, 1], [FAR])  # type: ignore[arg-type]


def test_a_batch_has_a_limit() -> None:
    world = small_world()
    size = world.layout.slot_bytes
    slots = FAR + np.arange(SLOTS_MAX + 1) * size
    pages = np.zeros(2 * (SLOTS_MAX + 1), np.int32)
    batch(world, Way.GATHER, pages[:-2], slots[:-1])
    with pytest.raises(InvalidArgument, match="65537 slots are over 65536"):
        batch(world, Way.GATHER, pages, slots)


def test_no_slots_are_no_work() -> None:
    layout: PagedLayout = small_world().layout
    for copies in (TwinCopies(layout), ShimCopies(layout, plain_shim())):
        assert copies.gather([], [], slot_bytes=layout.slot_bytes) == 0
        assert copies.scatter(np.zeros((0, 2), np.int32), (), slot_bytes=layout.slot_bytes) == 0


@pytest.mark.parametrize("pages", [[3, 1], (3, 1), [[3, 1]], *(np.array([3, 1], t) for t in ("i4", "i8", "u4", "u8"))])
def test_numbers_come_as_lists_or_arrays(pages: Numbers) -> None:
    world = small_world()
    made = check_batch(world.layout, Way.GATHER, pages, [world.slots[0]], slot_bytes=world.layout.slot_bytes)
    assert made.pages.tolist() == [[3, 1]]
    assert made.copied_bytes == world.layout.slot_bytes


def test_a_batch_does_not_change_with_its_arguments() -> None:
    world = small_world()
    pages = np.array([[3, 1]])
    made = check_batch(world.layout, Way.GATHER, pages, [world.slots[0]], slot_bytes=world.layout.slot_bytes)
    pages[:] = 99
    assert made.pages.tolist() == [[3, 1]]
