"""Copies that are being enqueued, and what must outlive them, whatever exception comes between two lines.

Made before the copies are enqueued: its mark is of the stream then (`Marks.of`), so that it is never without one, and
may be an event once there is one behind them. Whoever has seen them end says so (`over`); in all other cases, also
where it only goes out of scope, `Afterwards` keeps the things until the mark has come.
"""

from kvstore_client.afterwards import Afterwards
from kvstore_client.marks import Mark


class UnderWay:
    """Of one call's copies on one stream."""

    __slots__ = ("_afterwards", "_things", "mark")

    def __init__(self, afterwards: Afterwards, mark: Mark, *things: object) -> None:
        self._afterwards = afterwards
        self.mark = mark
        self._things: tuple[object, ...] | None = things

    def over(self) -> None:
        """They have ended."""
        self._things = None
        self.mark.over()

    def leave(self) -> None:
        """Nobody waits for them."""
        things = self._things
        if things is not None:
            self._afterwards.keep(self.mark, *things)
            self._things = None  # behind it: kept twice is harmless, not kept is not

    def __del__(self) -> None:
        self.leave()
