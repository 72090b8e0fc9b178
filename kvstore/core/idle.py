"""How long conversations are usually away between two turns, and which are away for longer.

A conversation that is idle for longer than those of its kind usually were when they came back
is not likely to be back soon: its blocks are written to the SSD before memory runs short, when
there is time for it (writeback.py). A kind is how many turns a conversation has had and how much
its last request generated: both tell how its user goes on.

Gaps are counted in log-spaced buckets, two an octave from 250 ms, a histogram a kind; counts
halve every HALVE_AT gaps of a kind, so that what is usual follows the day. A kind of which
little is known goes by all kinds together; before anything is known nothing is idle.
"""

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass

from kvstore.core.conversations import KNOWN_MAX, NOBODY

USUAL_SHARE = 0.9
"""Of those who came back, so many were away for less than what counts as usual."""

GAPS_MIN = 32
"""Gaps of a kind from which on its own histogram is believed."""

HALVE_AT = 4096

TURN_S = 1.0
"""Sightings closer together than this are one turn: a request stores and touches in several messages."""

BOUNDS_S = [0.25 * 2 ** (i / 2) for i in range(44)]
"""Upper bounds of the buckets: up to about eight days; one more is above them all."""

TURNS = [1, 2, 4]
"""Upper bounds of classes of turns: 1, 2, 3 to 4, 5 and more."""

TOKENS = [32, 256]
"""The same of tokens generated: short answers, usual ones, long ones."""

KINDS = (len(TURNS) + 1) * (len(TOKENS) + 1)
ALL = KINDS
"""The histogram of all kinds together."""


@dataclass(slots=True)
class Seen:
    """A conversation that is known."""

    at: float
    turns: int = 1
    tokens: int = 0

    @property
    def kind(self) -> int:
        return bisect_left(TURNS, self.turns) * (len(TOKENS) + 1) + bisect_left(TOKENS, self.tokens)


class Gaps:
    """A histogram of gaps that forgets slowly."""

    def __init__(self) -> None:
        self.counts = [0.0] * (len(BOUNDS_S) + 1)
        self.total = 0.0

    def add(self, gap_s: float) -> None:
        self.counts[bisect_left(BOUNDS_S, gap_s)] += 1
        self.total += 1
        if self.total >= HALVE_AT:
            self.counts = [count / 2 for count in self.counts]
            self.total /= 2

    def usual_s(self) -> float:
        """The bound below which USUAL_SHARE of the gaps are."""
        left = self.total * USUAL_SHARE
        for bound, count in zip(BOUNDS_S, self.counts, strict=False):
            left -= count
            if left <= 0:
                return bound
        return float("inf")


class IdleConversations:
    """What is usual, learned from the hints that come with puts and touches."""

    def __init__(self, known_max: int = KNOWN_MAX) -> None:
        self._known: OrderedDict[int, Seen] = OrderedDict()
        """By number, the one seen longest ago first."""
        self._known_max = known_max
        self._gaps = [Gaps() for _ in range(KINDS + 1)]

    def seen(self, number: int, tokens_generated: int, now: float) -> None:
        """A conversation is being served."""
        if number == NOBODY:
            return
        found = self._known.get(number)
        if found is None:
            if len(self._known) >= self._known_max:
                self._known.popitem(last=False)
            self._known[number] = Seen(now, tokens=tokens_generated)
            return
        gap_s = now - found.at
        if gap_s >= TURN_S:
            self._gaps[found.kind].add(gap_s)
            self._gaps[ALL].add(gap_s)
            found.turns += 1
            found.tokens = tokens_generated
        else:
            found.tokens = max(found.tokens, tokens_generated)
        found.at = now
        self._known.move_to_end(number)

    def usual_s(self, kind: int) -> float:
        """How long conversations of a kind are usually away; infinity where nothing is known."""
        for gaps in (self._gaps[kind], self._gaps[ALL]):
            if gaps.total >= GAPS_MIN:
                return gaps.usual_s()
        return float("inf")

    def is_idle(self, number: int, now: float) -> bool:
        """Whether a conversation is away for longer than is usual for its kind. One that is not known is not idle."""
        found = self._known.get(number)
        return found is not None and now - found.at > self.usual_s(found.kind)
