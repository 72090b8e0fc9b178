"""Segment files that are to be removed and could not be: tried again, with growing pauses.

The core has given such a segment up. Its file takes room until it is gone, and is measured with
the rest; a start removes what is left then.
"""

FIRST_S, LONGEST_S = 5.0, 60.0
"""Pauses between attempts."""

AT_ONCE = 64
"""Files tried in one attempt."""


class Drops:
    """Of one open directory."""

    def __init__(self) -> None:
        self._again: dict[int, str] = {}
        """Segment -> why it is still there; "" if it may be, since making it has failed."""
        self._under_way: set[int] = set()
        self._pause_s = FIRST_S
        self._at = 0.0

    def failed(self, segment: int, why: str, now: float) -> bool:
        """It is still there, as far as is known, or (`why` is "") may be; True if that is there is news."""
        is_new = bool(why) and not self._again.get(segment)
        self._under_way.discard(segment)
        if not self._again:
            self._pause_s = FIRST_S
        if not self._under_way:
            self._at = now + self._pause_s
        self._again[segment] = why or self._again.get(segment, "")
        return is_new

    def ended(self, segment: int) -> bool:
        """It is gone; True if it was the last that was told of."""
        self._under_way.discard(segment)
        return bool(self._again.pop(segment, "")) and not self.trouble

    def due(self, now: float) -> list[int]:
        """Those to be tried now."""
        if not self._again or self._under_way or now < self._at:
            return []
        some = list(self._again)[:AT_ONCE]
        self._under_way.update(some)
        self._pause_s = min(2 * self._pause_s, LONGEST_S)
        for segment in some:  # the others are next
            self._again[segment] = self._again.pop(segment)
        return some

    def forget(self) -> None:
        """The directory is not there any more."""
        self._again.clear()
        self._under_way.clear()

    @property
    def trouble(self) -> str:
        """What is to be told; "" where all are gone."""
        told = [why for why in self._again.values() if why]
        return f"{len(told)} segment files cannot be removed: {told[-1]}" if told else ""
