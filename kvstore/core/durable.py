"""Who waits until blocks are on the SSD, and which of these reached it and must still be there when he is answered.

A block that is written makes room for the next one. Where the blocks of one caller need more than
the SSD has, the policy takes the first of them for the last, and each of them was "written": so
what is there already is watched until the answer, and one that leaves meanwhile is not durable.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvstore.core.link import Block

LEFT_AGAIN = (
    "a block left the SSD again before all were there: they need more room than it has for them (ssd.size), "
    "or it was removed"
)


@dataclass(eq=False, slots=True)
class Durable:
    """A caller that waits until blocks are on the SSD. `ended` is called once; he is to be forgotten afterwards."""

    ended: Callable[["Durable"], None]
    left: set[Block] = field(default_factory=set)
    why: str = ""
    """Why not all of them are; "" where all are. Until he is forgotten: they may leave it again."""
    safe: set[Block] = field(default_factory=set)
    """Blocks that are there."""


class Watched:
    """Blocks on the SSD whose callers have not been answered."""

    def __init__(self) -> None:
        self._of: dict[Block, list[Durable]] = {}

    def add(self, waiter: Durable, block: Block) -> None:
        """It is there, for him."""
        if block not in waiter.safe:
            waiter.safe.add(block)
            self._of.setdefault(block, []).append(waiter)

    def left_disk(self, block: Block) -> None:
        """A block leaves the SSD, for whatever reason."""
        for waiter in self._of.pop(block, ()):
            waiter.safe.discard(block)
            waiter.why = waiter.why or LEFT_AGAIN

    def forget(self, waiter: Durable) -> None:
        """He has been answered."""
        for block in waiter.safe:
            waiters = self._of[block]
            waiters.remove(waiter)
            if not waiters:
                del self._of[block]
        waiter.safe.clear()

    def reached(self, block: Block, waiters: Iterable[Durable], why: str) -> None:
        """What these waited for is there; or (`why`) will not be."""
        for waiter in waiters:
            waiter.left.discard(block)
            waiter.why = waiter.why or why
            if not why:
                self.add(waiter, block)
            if not waiter.left:
                waiter.ended(waiter)
