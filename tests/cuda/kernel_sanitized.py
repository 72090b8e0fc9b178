"""A process of its own, with the sanitizers' libraries loaded first: cases at random, each piece of memory exact.

`python -m tests.cuda.kernel_sanitized LIBRARY EXAMPLES`, or `LIBRARY beyond`, which writes one byte behind a slot.
"""

import ctypes
import sys

from hypothesis import given, settings

from kvstored_cuda.batches import Way
from tests.cuda.kernel_claims import agrees_with_the_twin
from tests.cuda.kernel_rig import Case, HostPlace, ShimCopies, World, cases


def main(library_path: str, what: str) -> None:
    library = ctypes.CDLL(library_path)
    if what == "beyond":
        beyond(library)
        return

    @settings(deadline=None, max_examples=int(what), database=None)
    @given(case=cases())
    def sound(case: Case) -> None:
        agrees_with_the_twin(case, World(case, HostPlace(), guard=0), lambda layout: ShimCopies(layout, library))

    # A claim that fails raises; a sanitizer ends the process.
    sound()
    print("sound")


def beyond(library: ctypes.CDLL) -> None:
    """The same kernels, told of a slot one element too far: what the sanitizer must see."""
    from kvstored_cuda.batches import check_batch
    from kvstored_cuda.layouts import SlotOrder
    from kvstored_cuda.plans import launches

    sizes = {"L": 1, "B": 4, "K": 1, "N": 2, "H": 2}
    case = Case(
        1, "BNH", sizes, (16,), dict.fromkeys("BNH", 0), 0, SlotOrder.CANONICAL, 1, (1,), (2,), range(1), 0, 1, 3
    )
    world = World(case, HostPlace(), guard=0)
    copies = ShimCopies(world.layout, library)
    batch = check_batch(world.layout, Way.GATHER, [1], [world.slots[0] + 1], slot_bytes=world.layout.slot_bytes)
    for launch in launches(batch, copies.table, copies.table.ctypes.data, 1):
        copies.run(launch)
    print("not seen")


if __name__ == "__main__":
    main(*sys.argv[1:])
