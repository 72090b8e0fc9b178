"""How many tokens of a prompt the store has: what every rank has of every group. Decides; does no I/O.

A group needs, to go on after `tokens`:

    full     every block before
    window   the blocks that reach into the window before, `window - 1` tokens
    state    the one block that ends there: it has the state after all tokens before

What of this is there is asked of `present(rank, group, first, end)`: how many of these blocks, leading
ones, the store has, and whether some must come from the SSD.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

TRIES_MAX = 64
"""Ends of a prefix that are tried, longest first, where a window or a state is missing at the first."""

Present = Callable[[int, int, int, int], tuple[int, bool]]


class Need(NamedTuple):
    """What one group needs: `window` tokens, 0 is all of them; or a state."""

    block_tokens: int
    window: int = 0
    state: bool = False

    @property
    def whole(self) -> bool:
        """Every block before is needed."""
        return not (self.window or self.state)

    def first(self, end: int) -> int:
        """Of the blocks before `end`, the first that is needed to go on there."""
        if self.state:
            return max(end - 1, 0)
        if not self.window:
            return 0
        reach = -(-(self.window - 1) // self.block_tokens)
        return max(end - reach, 0)


class Hit(NamedTuple):
    """Tokens that can be loaded, counted from the start of the prompt; whether some come from the SSD."""

    tokens: int
    slow: bool


MISS = Hit(0, slow=False)


def longest(needs: Sequence[Need], ranks: int, have: int, most: int, step: int, present: Present) -> Hit:
    """The longest prefix of `most` tokens that goes further than `have`, which the engine has; a multiple of `step`."""
    tokens, slow = most // step * step, False
    for group, need in enumerate(needs):
        if not need.whole:
            continue
        for rank in range(ranks):
            first = have // need.block_tokens
            found, below = present(rank, group, first, tokens // need.block_tokens)
            tokens = min(tokens, (first + found) * need.block_tokens // step * step)
            slow |= below
            if tokens <= have:
                return MISS
    partial = [(group, need) for group, need in enumerate(needs) if not need.whole]
    for _ in range(TRIES_MAX):
        if tokens <= have:
            break
        complete, below = _complete(partial, ranks, tokens, present)
        if complete:
            return Hit(tokens, slow or below)
        tokens -= step
    return MISS


def _complete(partial: Sequence[tuple[int, Need]], ranks: int, tokens: int, present: Present) -> tuple[bool, bool]:
    slow = False
    for group, need in partial:
        end, rest = divmod(tokens, need.block_tokens)
        if rest:
            return False, slow
        first = need.first(end)
        for rank in range(ranks):
            found, below = present(rank, group, first, end)
            slow |= below
            if found < end - first:
                return False, slow
    return True, slow
