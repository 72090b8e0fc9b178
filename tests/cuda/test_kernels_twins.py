"""The twin against its own words: loops over the indexes, one byte at a time, as layouts.py describes a slot."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings

from kvstored_cuda.layouts import PagedLayout, SlotOrder
from kvstored_cuda.twins import TwinCopies, memory_at
from tests.cuda.kernel_claims import said
from tests.cuda.kernel_rig import Case, HostPlace, World, cases

BYTES_MAX = 20_000
"""Of one case here; a larger one is drawn smaller by leaving out slots."""


def bytes_of(layout: PagedLayout, pages: tuple[int, ...], layers: range) -> Iterator[tuple[int, int, int]]:
    """Slot, place in it, and address in the engine, of every byte that a call moves."""
    per_slot, tokens = layout.pages_per_slot, layout.page_tokens
    for index, page in enumerate(pages):
        slot, nth = divmod(index, per_slot)
        for layer in layers:
            before = 0
            for number, part in enumerate(layout.parts):
                own = tokens * part.heads * part.head_bytes
                for token in range(tokens):
                    for head in range(part.heads):
                        for byte in range(part.head_bytes):
                            address = layout.bases[layer][number] + page * part.page_stride + byte
                            address += token * part.token_stride if tokens > 1 else 0
                            address += head * part.head_stride if part.heads > 1 else 0
                            row = (token * part.heads + head) * part.head_bytes + byte
                            if layout.order is SlotOrder.CANONICAL:
                                yield slot, layer * layout.layer_bytes + before * per_slot + nth * own + row, address
                                continue
                            if tokens > 1 and part.heads > 1 and part.head_stride > part.token_stride:
                                row = (head * tokens + token) * part.head_bytes + byte
                            page_at = layer * layout.layer_bytes + nth * layout.page_bytes
                            yield slot, page_at + before + row, address
                before += own


@settings(deadline=None, max_examples=60)
@given(case=cases(numbers=3))
def test_the_twin_does_what_is_said_of_a_slot(case: Case) -> None:
    world = World(case, HostPlace())
    layout, twin = world.layout, TwinCopies(world.layout)
    if case.num_slots * layout.slot_bytes > BYTES_MAX:
        case = case_with(case, slots=max(BYTES_MAX // layout.slot_bytes, 1))
    slots, others = world.slots[: case.num_slots], world.other_slots[: case.num_slots]
    begun = world.content()
    asked = said(case, layout)

    twin.gather(case.pages, slots, **asked)
    held = [memory_at(slot, layout.slot_bytes) for slot in slots]
    gathered = 0
    for slot, place, address in bytes_of(layout, case.pages, case.layers):
        assert held[slot][place] == memory_at(address, 1)[0]
        gathered += 1
    assert gathered == len(slots) * len(case.layers) * layout.layer_bytes

    given_bytes = [memory_at(slot, layout.slot_bytes) for slot in others]
    twin.scatter(case.other_pages, others, **asked)
    for slot, place, address in bytes_of(layout, case.other_pages, case.layers):
        assert memory_at(address, 1)[0] == given_bytes[slot][place]

    written = {at for slot, place, _ in bytes_of(layout, case.pages, case.layers) for at in (slots[slot] + place,)}
    written |= {address for _, _, address in bytes_of(layout, case.other_pages, case.layers)}
    for (_, start, size), before in zip(world.pieces, begun, strict=True):
        after = memory_at(start, size)
        changed = [start + i for i in range(size) if before[i] != after[i]]
        assert written.issuperset(changed), "nothing else changes"


def case_with(case: Case, slots: int) -> Case:
    """The same with its first slots only."""
    values = vars(case) | {
        name: getattr(case, name)[: slots * case.pages_per_slot] for name in ("pages", "other_pages")
    }
    return Case(**values)


@pytest.mark.parametrize("order", list(SlotOrder))
def test_every_byte_of_a_slot_is_one_of_the_engine(order: SlotOrder) -> None:
    """Shown for all cases above by the count; here by the places, for one with everything in it."""
    sizes = {"L": 2, "B": 5, "K": 2, "N": 3, "H": 2}
    pads = {"L": 1, "B": 0, "K": 3, "N": 1, "H": 0}
    case = Case(2, "LBKHN", sizes, (4, 4), pads, 1, order, 2, (0, 1, 4, 2), (3, 2, 1, 0), range(2), 1, 2, 7)
    layout = World(case, HostPlace()).layout
    places = sorted((slot, place) for slot, place, _ in bytes_of(layout, case.pages, case.layers))
    assert places == [(slot, place) for slot in range(2) for place in range(layout.slot_bytes)]
