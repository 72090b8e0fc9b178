"""Records that are to be deleted from the SSD, in which order with what is written, and who waits for it.

A block leaves the SSD's store at once, its record a little later: until its deletion is reported
the record may be back after a kill. Whoever removed a block on purpose waits for that
(`wait_removed`); what the policy evicts, nobody waits for.

A waiter waits for deletions that were asked for before it and for no later ones, so that it ends
however much goes meanwhile: one of many blocks knows how many of each namespace they are, and the
number of the last.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvstore.core.link import Link
from kvstore.core.moves import ForgetRecords, Name

FORGET_MAX = 256
"""Records deleted together."""

HANDED_OUT_MAX = 4096
"""Records whose deletion is asked for in one turn: some milliseconds. The next turn comes with the reports of these."""


@dataclass(eq=False, slots=True)
class Deletion:
    """Somebody who waits until records are deleted on the disk. `ended` is called once."""

    ended: Callable[["Deletion"], None]
    left: int = 0
    """Records that are not deleted yet."""
    why: str = ""
    """Why they will not be for now; "" where all are."""
    names: set[Name] = field(default_factory=set)
    """Those of `left` that it waits for by name."""
    spaces: frozenset[int] = frozenset()
    """Of the SSD's namespaces in which it waits for all that were to be deleted when it began."""
    last: int = 0
    """The number of the last of these."""


class Forgetting:
    """Of one SSD."""

    def __init__(self, link: Link, free: Callable[[Name], None], coming: Callable[[], Collection[Name]]) -> None:
        """`free`: nothing under way deletes that record any more, so it may be written anew.

        `coming`: records that are being written, and will have to be deleted.
        """
        self._link = link
        self._free = free
        self._coming = coming
        self.former: dict[int, Name] = {}
        """Extent -> whose record may still speak of it."""
        self.names: dict[Name, tuple[int, int]] = {}
        """Records whose deletion was not reported yet -> their extent, and the number of this deletion."""
        self._in_space: dict[int, int] = {}
        """How many of `names` each namespace has, of those that are not on the disk."""
        self._last = 0
        self._to_forget: dict[Name, None] = {}
        self._batches: dict[int, tuple[Name, ...]] = {}
        self._replacing: set[Name] = set()
        """Records that a write under way deletes, too."""
        self._replaced: set[Name] = set()
        """Of those: their deletion has been reported, and waits for that write."""
        self._by_name: dict[Name, list[Deletion]] = {}
        self._by_space: list[Deletion] = []

    def __contains__(self, name: Name) -> bool:
        return name in self.names

    def is_there(self, name: Name) -> bool:
        """Whether that record is to be deleted, and may be found by a start that comes now."""
        return name in self.names and name not in self._replaced

    @property
    def nothing(self) -> bool:
        """Every record that was to be deleted is."""
        return not (self._to_forget or self._batches)

    # -- what goes

    def left(self, name: Name, extent: int) -> None:
        """A block has left the SSD's store: its record is to be deleted before, or with, the next write there."""
        assert name not in self.names, "a record that is to be deleted was written anew"
        self._last += 1
        self.former[extent] = name
        self.names[name] = extent, self._last
        self._in_space[name[0]] = self._in_space.get(name[0], 0) + 1
        self._to_forget[name] = None

    def hand_out(self) -> None:
        """Records to be deleted, as jobs."""
        some = list(islice(self._to_forget, HANDED_OUT_MAX)) if self._to_forget else []
        if len(some) == len(self._to_forget):
            self._to_forget.clear()  # a dict that was emptied name by name is walked as if it were full
        for name in some:
            self._to_forget.pop(name, None)
        for at in range(0, len(some), FORGET_MAX):
            names = tuple(some[at : at + FORGET_MAX])
            number = self._link.number()
            self._batches[number] = names
            self._link.moves.append(ForgetRecords(number, names))

    def reported(self, number: int, error: str) -> None:
        """The report of a ForgetRecords."""
        names = self._batches.pop(number, ())
        if error:
            self._to_forget.update(dict.fromkeys(names))
            self._link.go_out_of_use(f"deleting records: {error}")
            return
        for name in names:
            self._deleted(name)
            if name in self._replacing:
                self._replaced.add(name)
            else:
                self._over(name)

    def write_begins(self, extent: int) -> Name | None:
        """A write to that extent deletes the record that may still speak of it, too."""
        name = self.former.get(extent)
        if name is not None:
            self._replacing.add(name)
        return name

    def write_ended(self, name: Name) -> None:
        """That write was reported."""
        self._replacing.remove(name)
        if name in self._replaced:
            self._replaced.remove(name)
            self._over(name)

    def _over(self, name: Name) -> None:
        extent, _ = self.names.pop(name)
        if self.former.get(extent) == name:
            del self.former[extent]
        self._free(name)

    # -- who waits

    def wait_removed(
        self, namespaces: Collection[int] | None, keys: Sequence[bytes] | None, ended: Callable[[Deletion], None]
    ) -> Deletion:
        """Until what has been removed has no record any more, as far as is known what is on the SSD.

        Of memory's namespaces (None: of all) these keys, or (None) whatever was removed so far.
        `ended` may be called before this returns.
        """
        spaces, coming, waiter = self._spaces(namespaces), self._coming(), Deletion(ended)
        if keys is not None:
            names = ((space, key) for space in spaces for key in keys)
            self._wait_by_name(waiter, (name for name in names if name in coming or self.is_there(name)))
        else:
            waiter.spaces, waiter.last = frozenset(spaces), self._last
            waiter.left = sum(self._in_space.get(space, 0) for space in spaces)
            if waiter.left:
                self._by_space.append(waiter)
            self._wait_by_name(waiter, (name for name in coming if name[0] in spaces))
        if not waiter.left:
            ended(waiter)
        return waiter

    def not_deleted(self, namespaces: Collection[int] | None, keys: Sequence[bytes] | None) -> list[Name]:
        """What `wait_removed` would wait for, by name: a walk over all that is to be deleted."""
        spaces, coming = self._spaces(namespaces), self._coming()
        if keys is not None:
            names = ((space, key) for space in spaces for key in keys)
            return [name for name in names if name in coming or self.is_there(name)]
        found = [name for name in self.names if name[0] in spaces and self.is_there(name)]
        return [*found, *(name for name in coming if name[0] in spaces)]

    def _spaces(self, namespaces: Collection[int] | None) -> set[int]:
        joined = self._link.joined
        if namespaces is None:
            return set(joined.memory_of)
        return {joined.disk_of[number].id for number in namespaces if number in joined.disk_of}

    def _wait_by_name(self, waiter: Deletion, names: Iterable[Name]) -> None:
        for name in names:
            if name not in waiter.names:
                waiter.names.add(name)
                waiter.left += 1
                self._by_name.setdefault(name, []).append(waiter)

    def _deleted(self, name: Name) -> None:
        """Its record is deleted on the disk."""
        number, space = self.names[name][1], name[0]
        self._in_space[space] -= 1
        if not self._in_space[space]:
            del self._in_space[space]
        ended = []
        for waiter in self._by_name.pop(name, ()):
            waiter.names.remove(name)
            waiter.left -= 1
            ended.append(waiter)
        for waiter in self._by_space:
            if space in waiter.spaces and number <= waiter.last:
                waiter.left -= 1
                ended.append(waiter)
        for waiter in dict.fromkeys(ended):
            if not waiter.left:
                self._end(waiter)

    def _end(self, waiter: Deletion) -> None:
        self.stop(waiter)
        waiter.ended(waiter)

    def stop(self, waiter: Deletion) -> None:
        """It does not wait any more; `left` stays as it is."""
        if waiter in self._by_space:
            self._by_space.remove(waiter)
        for name in waiter.names:
            waiters = self._by_name[name]
            waiters.remove(waiter)
            if not waiters:
                del self._by_name[name]
        waiter.names.clear()

    def give_up_waiting(self, why: str) -> None:
        """Nothing is deleted for now: whoever waits is told."""
        waiters = [*self._by_space, *(waiter for waiters in self._by_name.values() for waiter in waiters)]
        for waiter in dict.fromkeys(waiters):
            waiter.why = why
            self._end(waiter)

    def lose_step(self, names_max: int) -> list[Name]:
        """The records are gone with the directory they were in: so many of those that were to be deleted from it.

        All are known when `names` and `former` are empty.
        """
        self.give_up_waiting("its directory is not there any more")
        self._batches.clear()
        names = [self.names.popitem()[0] for _ in range(min(names_max, len(self.names)))]
        for name in names:
            self._to_forget.pop(name, None)
        for _ in range(min(names_max, len(self.former))):
            self.former.popitem()
        if not self.names:
            assert not self._to_forget, "a record is to be deleted and is not among those that are"
            self._in_space.clear()
        return names
