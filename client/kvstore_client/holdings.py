"""What this process has of memory on devices, of one life of the daemon: slots leased and granted, segments open.

It passes from a session that ended to the next, which names what is still used (Resume); with a daemon that knows
nothing of it, it is left behind. Ends of holds are appended to `ended`, by finalizers too, and told by the client's
thread (device_session.py).

A slot to write to is this process's until a commit has stored it, and goes back when its copies have ended: also where
a commit of it failed, or nobody knows how it ended. Then it may be the daemon's already, which refuses it.

A segment is pinned by every hold of slots in it, until nothing runs any more that was to be waited for with that hold:
whoever has the slots by then, a kernel that is queued needs them mapped.
"""

import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from kvstore_client.afterwards import Afterwards
from kvstore_client.marks import Mark, Uses
from kvstored.v1 import kvstore_pb2 as pb
from kvstored_cuda.devices.device import Mapping
from kvstored_cuda.devices.errors import DeviceTimeout

if TYPE_CHECKING:
    from kvstore_client.device_commits import DeviceCommit

log = logging.getLogger("kvstore_client")

Key = tuple[str, int]
"""A device's UUID and the generation of its memory."""


class DeviceHold:
    """Keeps slots: leased ones until the last who refers to it is gone, those to write to until they are stored."""

    __slots__ = ("__weakref__", "terms")

    def __init__(self, terms: "Terms") -> None:
        self.terms = terms

    @property
    def slots(self) -> list[int]:
        """Those that go back with it."""
        return self.terms.slots

    def release_after(self, mark: Mark | None) -> None:
        """The daemon hears of its end not before that has come (None: at once)."""
        self.terms.after = mark

    def release_behind(self, uses: Uses) -> None:
        """The daemon hears of its end not before what is on those streams when nothing refers to it any more."""
        self.terms.uses = uses


class Terms:
    """What becomes of a hold's slots. Apart from it, since its finalizer must not refer to it."""

    def __init__(self, holdings: "Holdings", key: Key, slots: list[int], *, written: bool) -> None:
        self.holdings, self.key, self.slots, self.written = holdings, key, slots, written
        self.after: Mark | None = None
        self.uses: Uses | None = None
        self.gone = False
        """Nobody refers to the hold, and what was to be waited for has come."""
        self.pins: set[int] = set()
        holdings.pin(self)

    def end(self) -> None:
        """The last who used the slots is gone. Runs in finalizers, so it appends, no more."""
        if self.uses is not None:
            self.uses.name_current()
            self.holdings.afterwards.keep_behind(self.uses, self.hold())
            self.uses = self.after = None  # not before: who is interrupted here keeps the slots
        elif self.after is not None:
            self.holdings.afterwards.keep(self.after, self.hold())
            self.after = None
        else:
            self.gone = True
            self.told()

    def told(self) -> None:
        """The client's thread looks at it, unpins, and tells of slots that go back."""
        self.holdings.ended.append(self)
        if self.slots:
            self.holdings.wake()

    def hold(self) -> DeviceHold:
        """An object whose end ends the hold."""
        hold = DeviceHold(self)
        weakref.finalize(hold, self.end).atexit = False
        return hold


class Holdings:
    """Guarded by `lock`, but for `ended` and `closed`."""

    def __init__(self, afterwards: Afterwards, wake: Callable[[], None]) -> None:
        self.afterwards, self.wake = afterwards, wake
        self.lock = threading.RLock()
        self.leased: dict[Key, Counter[int]] = {}
        self.granted: dict[Key, dict[int, Terms]] = {}
        """By slot, since a slot that was stored may be granted again while its first hold has not been settled."""
        self.ended: deque[Terms] = deque()
        self.unsettled: deque[DeviceCommit] = deque()
        """Commits that nobody waits for."""
        self.pinned: dict[Key, Counter[int]] = {}
        """How many holds need a segment mapped."""
        self.opened: dict[Key, dict[int, Mapping]] = {}
        self.opening: set[tuple[Key, int]] = set()
        """Calls that have not returned; so is `closing`."""
        self.closing: set[tuple[Key, int]] = set()
        self.closed: deque[tuple[Key, int]] = deque()
        """To be told."""
        self.wanted_back: set[tuple[Key, int]] = set()
        """Segments that the daemon asked for."""
        self.given_up: set[tuple[Key, int]] = set()
        """Segments that could not be closed: mapped as long as this process lives, for all that is known."""

    def pin(self, terms: Terms) -> None:
        """Its segments stay mapped until `unpin`."""
        with self.lock:
            terms.pins = {slot >> 32 for slot in terms.slots}
            self.pinned.setdefault(terms.key, Counter()).update(terms.pins)

    def unpin(self, terms: Terms) -> None:
        """Of what has ended; again: nothing."""
        with self.lock:
            pins, terms.pins = terms.pins, set()
            pinned = self.pinned.get(terms.key, Counter())
            pinned.subtract(pins)
            for segment in pins:
                if pinned[segment] <= 0:
                    del pinned[segment]

    def lease(self, key: Key, slots: list[int]) -> DeviceHold:
        """A hold of leased slots."""
        with self.lock:
            self.leased.setdefault(key, Counter()).update(slots)
        return Terms(self, key, slots, written=False).hold()

    def grant(self, key: Key, slots: list[int]) -> DeviceHold:
        """A hold of slots to write to."""
        terms = Terms(self, key, slots, written=True)
        with self.lock:
            self.granted.setdefault(key, {}).update(dict.fromkeys(slots, terms))
        return terms.hold()

    def take_ended(self) -> Iterator[Terms]:
        """Whatever has ended, each once, however many ask."""
        while True:
            try:
                yield self.ended.popleft()
            except IndexError:
                return

    def take_unsettled(self) -> list["DeviceCommit"]:
        """All of them, to be asked or put back."""
        return [self.unsettled.popleft() for _ in range(len(self.unsettled))]

    def left_alone(self) -> None:
        """There is no session to tell: leases that end are only forgotten, and a Resume does not name them.

        It names slots that were written to, and the next session gives them back: the daemon must not take them for
        slots that a kernel may still write to.
        """
        for commit in self.take_unsettled():
            commit.unknown()
        to_abort = []
        for terms in self.take_ended():
            self.unpin(terms)
            if not terms.written:
                self.settle(terms)
            elif self.granted_by(terms):
                to_abort.append(terms)
        self.ended.extend(to_abort)

    def granted_by(self, terms: Terms) -> list[int]:
        """Slots that go back with these terms."""
        with self.lock:
            granted = self.granted.get(terms.key, {})
            return [slot for slot in dict.fromkeys(terms.slots) if granted.get(slot) is terms]

    def settle(self, terms: Terms) -> list[int]:
        """Forgets leases that have ended; the slots that the daemon is to hear of."""
        with self.lock:
            leased = self.leased.get(terms.key, Counter())
            slots = [slot for slot in terms.slots if leased[slot] > 0]
            leased.subtract(slots)
            for slot in slots:
                if leased[slot] <= 0:
                    del leased[slot]
            return slots

    def no_longer(self, terms: Terms, slots: Iterable[int]) -> list[int]:
        """These slots are not granted by these terms any more; answers those that were."""
        with self.lock:
            granted = self.granted.get(terms.key, {})
            mine = [slot for slot in slots if granted.get(slot) is terms]
            for slot in mine:
                del granted[slot]
        return mine

    def uses(self) -> list[pb.DeviceUses]:
        """All of it, as a Resume names it."""
        with self.lock:
            return [
                pb.DeviceUses(
                    device=key[0],
                    generation=key[1],
                    leased=self.leased.get(key, Counter()).elements(),
                    granted=self.granted.get(key, {}),
                )
                for key in dict.fromkeys([*self.leased, *self.granted])
                if self.leased.get(key) or self.granted.get(key)
            ]

    def carried(self, said: Iterable[pb.DeviceUses]) -> None:
        """What the answer to a Resume says is taken over; of memory that it does not name nothing is held any more.

        A slot to write to that is not among it was stored by a commit whose answer never came, or is of a commit that
        failed, which the daemon keeps until it is given back. It cannot be told here which: so all are given back when
        their copies have ended, and what is not this process's is refused.
        """
        kept = {(of.device, of.generation) for of in said}
        with self.lock:
            for key in [key for key in self.leased if key not in kept]:
                del self.leased[key]
            for key in [key for key in self.granted if key not in kept]:
                del self.granted[key]

    @property
    def nothing(self) -> bool:
        """Whether nothing is held or open."""
        with self.lock:
            return self.unused and not (any(self.leased.values()) or any(self.granted.values()) or self.ended)

    @property
    def unused(self) -> bool:
        """Whether this process can touch nothing of it any more, whatever the daemon has heard of that."""
        with self.lock:
            return not (any(self.pinned.values()) or any(self.opened.values()) or self.opening or self.closing)

    def segments_in_use(self, key: Key) -> set[int]:
        """Those with slots that somebody uses, or that something queued may touch."""
        with self.lock:
            return set(self.pinned.get(key, ()))


def close_segment(holdings: Holdings, key: Key, segment: int, mapping: Mapping) -> None:
    """Closes what nobody uses any more; may block for long. `closed` has it then, if it is closed.

    Else the daemon would free what may still be mapped: after DeviceTimeout it is tried again, or it is given up.
    """
    place, then = (key, segment), holdings.given_up.add
    try:
        mapping.close()
        then = holdings.closed.append
    except DeviceTimeout as e:
        log.warning("a segment of device %s is not closed yet, and is tried again: %s", key[0], e)
        then = partial(_open_again, holdings, mapping)
    except Exception as e:  # noqa: BLE001  whatever a driver's binding raises, it is no success
        log.warning("a segment of device %s is given up, not closed: %s: %s", key[0], type(e).__name__, e)
    finally:
        with holdings.lock:
            then(place)
            holdings.closing.discard(place)
    holdings.wake()


def _open_again(holdings: Holdings, mapping: Mapping, place: tuple[Key, int]) -> None:
    holdings.opened.setdefault(place[0], {})[place[1]] = mapping
    holdings.wanted_back.add(place)
