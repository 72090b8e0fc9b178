"""A copy between memory and a device, and in which order those that have ended count: parents before children.

Copies end in any order. A child that comes to a tier before its parent is an orphan there, and
orphans go first: the next copy that needs room would take what has just come. So a copy that has
ended waits, in its slots, while that of its parent is under way.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvstore.core.block import HINTED, NONE
from kvstore.core.gpu_jobs import CopyDown, CopyUp
from kvstore.core.holds import Namespace
from kvstore.core.link import Block
from kvstore.core.store import Store

TTL_S_MIN = 0.001
"""Of a block whose life ended while it was on its way."""


@dataclass(eq=False, slots=True)
class Copying:
    """One block on its way from one tier to another, or waiting for its turn."""

    block: Block
    namespace: Namespace
    """As memory has it."""
    size_bytes: int
    held: int | None = None
    """The slot that it is held in while it waits, if it is."""
    job: CopyUp | CopyDown | None = None
    """None while it waits for its turn."""
    parent: bytes = b""
    depth: int = 0
    until: float = 0.0
    hits: int = 0
    conversation: int = 0
    cancelled: bool = False
    """The block was removed: what is copied is nothing."""
    error: str = ""
    """How the copy ended."""
    behind: "Copying | None" = None
    """It has ended, and waits for that one."""
    tickets: list[int] = field(default_factory=list)
    """Numbers of those who want it."""

    def describe(self, store: Store, row: int) -> None:
        """Takes down what its source says of the block, when the copy is begun."""
        table = store.table
        parent = table.parent[row]
        self.parent = (table.key[parent] or b"") if parent != NONE else b""
        self.depth = table.depth[row]
        self.hits = table.hits[row]
        self.conversation = table.conversation[row]
        self.until = store.tree.until.get(row * 4 + HINTED, 0.0)

    def ttl_s(self, now: float) -> float:
        """What is left of its life; 0 where it has no end."""
        return max(self.until - now, TTL_S_MIN) if self.until else 0.0


class ParentsFirst:
    """Between the ends of copies in one direction and what is made of them."""

    def __init__(self, coming: Mapping[Block, Copying], place: Callable[[Copying, float], None]) -> None:
        """`coming`: copies by block that wait or are under way, none that are cancelled."""
        self._coming = coming
        self._place = place
        self._behind: dict[Copying, list[Copying]] = {}
        """A copy that has not been placed -> those that wait for it."""

    def ended(self, copying: Copying, now: float) -> None:
        """Places it at once, or after the nearest ancestor that is still being copied."""
        ready = [copying]
        while ready:
            first = ready.pop()
            first.behind = None if first.error or first.cancelled else self._awaited(first)
            if first.behind is not None:
                self._behind.setdefault(first.behind, []).append(first)
                continue
            self._place(first, now)
            ready += self._behind.pop(first, ())

    def take_all(self) -> list[Copying]:
        """Takes out all that wait: what they wait for is given up."""
        waiting = [copying for behind in self._behind.values() for copying in behind]
        self._behind.clear()
        return waiting

    def waiting(self) -> list[Copying]:
        """Copies that have ended and have not been placed."""
        return [copying for behind in self._behind.values() for copying in behind]

    def _awaited(self, copying: Copying) -> Copying | None:
        """The copy to wait for. A circle, however one came about, is not waited for."""
        parent = self._coming.get((copying.block[0], copying.parent)) if copying.parent else None
        if parent is None or parent.job is None:
            return None
        at: Copying | None = parent
        while at is not None:
            if at is copying:
                return None
            at = at.behind
        return parent
