"""What must be true of copies, whatever makes them: the kernels on a GPU, the kernels on the CPU, the twin."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvstored_cuda.layouts import PagedLayout, SlotOrder
from kvstored_cuda.plans import LARGE_ENTRIES, SMALL_ENTRIES, WIDTHS, kernel_name
from kvstored_cuda.twins import TwinCopies
from tests.cuda.kernel_rig import Case, HostPlace, World

Made = Callable[[PagedLayout], Any]
"""Makes what is tested: Copies, of which some take no stream."""

Wait = Callable[[], None]


def said(case: Case, layout: PagedLayout) -> dict[str, Any]:
    return {"slot_bytes": layout.slot_bytes, "layers": case.layers, "multiprocessors": case.multiprocessors}


def agrees_with_the_twin(case: Case, world: World, made: Made, wait: Wait = lambda: None, **more: Any) -> None:
    """Gather, scatter into other pages, gather those: bit for bit what the twin leaves, guards and all else included.

    And what was gathered at first is what is gathered from the other pages.
    """
    oracle = World(case, HostPlace(), guard=world.guard)
    tested, twin = made(world.layout), TwinCopies(oracle.layout)
    asked = said(case, world.layout)

    assert world.content() == oracle.content(), "two worlds of one seed begin alike"
    tested.gather(case.pages, world.slots, **asked, **more)
    twin.gather(case.pages, oracle.slots, **asked)
    wait()
    assert world.content() == oracle.content()

    tested.scatter(case.other_pages, world.slots, **asked, **more)
    twin.scatter(case.other_pages, oracle.slots, **asked)
    wait()
    assert world.content() == oracle.content()

    tested.gather(case.other_pages, world.other_slots, **asked, **more)
    twin.gather(case.other_pages, oracle.other_slots, **asked)
    wait()
    assert world.content() == oracle.content()

    first, second = world.slot_content(world.slots), world.slot_content(world.other_slots)
    low, high = (layer * world.layout.layer_bytes for layer in (case.layers.start, case.layers.stop))
    for before, after in zip(first, second, strict=True):
        assert np.array_equal(before[low:high], after[low:high])


HEAD_BYTES = {16: 48, 8: 24, 4: 12, 2: 6, 1: 5}
"""For each width of a copy a head that allows no wider one."""


def every_kernel() -> Iterator[tuple[Case, str, str]]:
    """A case for every kernel of the source, and the names of the two that it needs."""
    for entries, slots in ((SMALL_ENTRIES, 3), (LARGE_ENTRIES, 300)):
        for width in WIDTHS:
            random = np.random.default_rng(width)
            pages, others = (tuple(map(int, random.permutation(400)[:slots])) for _ in range(2))
            case = Case(
                element_bytes=1,
                axes="BKHN",
                sizes={"L": 2, "B": 400, "K": 2, "N": 2, "H": 2},
                head_elements=(HEAD_BYTES[width],) * 2,
                padding={"B": 0, "K": 0, "H": width, "N": 0},
                shift=0,
                order=SlotOrder.CANONICAL,
                pages_per_slot=1,
                pages=pages,
                other_pages=others,
                layers=range(2),
                slot_shift=0,
                multiprocessors=2,
                seed=width,
            )
            yield case, kernel_name("gather", width, entries), kernel_name("scatter", width, entries)
