"""Slots that this process is writing to, and whose they are: a put's, or those under views of a reservation.

A slot goes back to the daemon by who wrote to it and by nobody else, and not after it was stored or granted
ahead: the same number may be in the hands of another thread by then, and what is aborted under it the daemon
grants to others. So each slot has an owner, the very list of slots that its put goes by; it is asked for
again when the slot goes back, with the session's lock held.
"""

from collections.abc import Iterable, Iterator

Owner = list[int]
"""Of slots: a list is compared by identity, whatever is in it by then."""


class Writing:
    """Of one session; guarded by its lock."""

    def __init__(self) -> None:
        self._owners: dict[int, Owner] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def __iter__(self) -> Iterator[int]:
        return iter(self._owners)

    def copy(self) -> "Writing":
        """The same slots and owners, for the session that takes over."""
        made = Writing()
        made._owners = dict(self._owners)
        return made

    def take(self, slots: Iterable[int], owner: Owner) -> None:
        """These are that one's from now on, and in its list."""
        for slot in slots:
            self._owners[slot] = owner
            owner.append(slot)

    def pass_on(self, owner: Owner) -> None:
        """Slots in this list, which another one has had, are its own."""
        for slot in owner:
            self._owners[slot] = owner

    def keep(self, slots: Iterable[int]) -> None:
        """All others are nobody's."""
        self._owners = {slot: self._owners[slot] for slot in slots if slot in self._owners}

    def drop(self, slots: Iterable[int]) -> None:
        """These are written to no more: stored, or somebody else's."""
        for slot in slots:
            self._owners.pop(slot, None)

    def of(self, owner: Owner, slots: Iterable[int]) -> list[int]:
        """Those of these slots that are still that one's."""
        return [slot for slot in slots if self._owners.get(slot) is owner]
