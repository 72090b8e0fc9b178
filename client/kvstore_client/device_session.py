"""The session for memory of devices: a connection beside the one for shared memory, so that no device costs that one.

What is asked here may take a driver's time on either side, and a call that gets no answer in time ends its session: a
read of shared memory must neither wait for it nor lose its session by it.

`Holdings` is what this process has of one life of the daemon: slots leased and granted, segments open. It passes from a
session that ended to the next, which names what is still used (Resume); with a daemon that knows nothing of it, it is
left behind. Ends of holds are appended to `ended`, by finalizers too, and told by the client's thread.

A segment is pinned by every hold of slots in it, until nothing runs any more that was to be waited for with that hold:
whoever has the slots by then, a kernel that is queued needs them mapped.
"""

import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from kvstore_client.afterwards import Afterwards
from kvstore_client.marks import Mark, Uses
from kvstore_client.session import Session
from kvstore_client.stream import close_all
from kvstore_client.transport import Identity
from kvstore_client.waiting import locked, seconds_left
from kvstored.v1 import PROTOCOL, errors
from kvstored.v1 import kvstore_pb2 as pb
from kvstored_cuda.devices.device import Mapping
from kvstored_cuda.devices.errors import DeviceTimeout
from kvstored_cuda.devices.handles import Generation, Handle, HandleKind

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
            self.holdings.afterwards.keep_behind(self.uses.record, self.hold())
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
        """What is ours still, as the answer to a Resume says it; what holds have of the rest is nothing."""
        kept = {(of.device, of.generation): set(of.granted) for of in said}
        with self.lock:
            for key in [key for key in self.leased if key not in kept]:
                del self.leased[key]
            for key, granted in self.granted.items():
                for slot in [slot for slot in granted if slot not in kept.get(key, ())]:
                    del granted[slot]

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


class DeviceCommit:
    """A Commit that was sent, until its end is known: `results` then, one for each slot; empty where none was stored.

    From when it is sent the slots are the daemon's, but those that the results say EXISTS or REJECTED of: they are the
    hold's again.
    """

    def __init__(self, session: "DeviceSession", hold: DeviceHold, slots: list[int]) -> None:
        self.session, self._terms = session, hold.terms
        self._slots = slots
        self.ticket = 0
        self.over = False
        self.results: list[int] = []
        self.why = ""

    def answered(self, results: Sequence[int], ticket: int) -> None:
        """What the daemon said to it: the end, or a ticket to ask for that."""
        self.ticket = ticket
        if not ticket:
            self._end(results)

    def ask(self, wait_s: float, timeout_s: float) -> bool:
        """Whether it is over; the daemon waits so long for that. Raises like any call: then it is not known."""
        if not self.over:
            question = pb.TicketRequest(ticket=self.ticket, wait_ms=int(wait_s * 1000))
            reply = self.session.call(pb.Request(ticket=question), timeout_s).ticket
            if reply.state != pb.TICKET_RUNNING:
                self.why = reply.why
                self._end(list(reply.results) if reply.state == pb.TICKET_DONE else [])
        return self.over

    def _end(self, results: Sequence[int]) -> None:
        self.over, self.results = True, list(results)
        left = [slot for slot, result in zip(self._slots, results, strict=False) if result != pb.STORED]
        self._terms.holdings.no_longer(self._terms, set(self._slots) - set(left))
        self._terms.slots.extend(left)

    def unknown(self) -> None:
        """Nobody can be asked: the slots go back with the hold, if they are ours."""
        if not self.over:
            self.over = True
            self._terms.slots.extend(self._slots)
        self.end_hold()

    def end_hold(self) -> None:
        """When it is over: what is the hold's again goes back with it, or now if it has ended before."""
        if self._terms.gone:
            self._terms.told()


class DeviceSession(Session):
    """As Session, without index and mappings. `holdings` is what this process has through it."""

    def __init__(self, arguments: tuple[str, str, str, float, bool], holdings: Holdings) -> None:
        path, client, tenant, timeout_s, _ = arguments
        self.holdings = holdings
        self.devices: dict[str, pb.Device] = {}
        """As it was last told, by UUID."""
        self.exporter: Generation | None = None
        self.told_at = 0.0
        super().__init__(path, client, tenant, timeout_s, False)

    def open(self, before: Session | None, until: float) -> None:
        """Says Hello, and takes over what `before` has; else what that had is left behind."""
        client, tenant, _ = self._identity
        hello = pb.HelloRequest(protocol=PROTOCOL, client=client, tenant=tenant)
        if not isinstance(before, DeviceSession):
            self.hello = self.call(pb.Request(hello=hello), seconds_left(until)).hello
            return
        with locked(before.lock, seconds_left(until)):
            held = before.holdings
            held.left_alone()
            hello.resume.nonce = before.hello.nonce
            hello.resume.devices.extend(held.uses())
            self.hello = self.call(pb.Request(hello=hello), seconds_left(until)).hello
            if self.hello.resumed:
                self.holdings, before._forward = held, self
                held.carried(self.hello.devices)
            else:
                before._abandoned = True

    def ask_devices(self, timeout_s: float, now: float) -> None:
        """What devices there are, as of `now`; of generations that are over nothing is held any more."""
        reply = self.call(pb.Request(devices=pb.DevicesRequest()), timeout_s).devices
        self.devices = {device.uuid: device for device in reply.devices}
        self.exporter = Generation.from_bytes(reply.exporter) if reply.exporter else None
        self.told_at = now

    def number_of(self, ns: Identity, timeout_s: float) -> int:
        """The namespace's, opened at first use."""
        found = self.namespaces.get(ns.digest)
        if found is None:
            found = self.call(pb.Request(open_namespace=ns.opening()), timeout_s).open_namespace
            self.namespaces[ns.digest] = found
        return found.namespace_id

    def ask(self, key: Key, timeout_s: float, **op: Any) -> pb.DeviceReply:
        """One DeviceRequest and its answer; raises like any call."""
        with locked(self.lock, timeout_s):
            return self._asked(key, timeout_s, **op)

    def _asked(self, key: Key, timeout_s: float, **op: Any) -> pb.DeviceReply:
        """The same with the lock held: what the answer gives is noted before anybody else has the session."""
        request = pb.DeviceRequest(device=key[0], generation=key[1], **op)
        return self._exchange(pb.Request(device=request), timeout_s)[0].device

    def lease(self, key: Key, request: pb.AcquireRequest, timeout_s: float) -> tuple[list[int], DeviceHold | None]:
        """Acquire, and what keeps the slots."""
        with locked(self.lock, timeout_s):
            slots = list(self._asked(key, timeout_s, acquire=request).acquire.slots)
            return slots, self.holdings.lease(key, slots) if slots else None

    def grant(self, key: Key, request: pb.ReserveRequest, timeout_s: float) -> DeviceHold:
        """Reserve; the hold gives the slots back that no commit takes."""
        with locked(self.lock, timeout_s):
            return self.holdings.grant(key, list(self._asked(key, timeout_s, reserve=request).reserve.slots))

    def commit_to(self, key: Key, request: pb.DeviceCommitRequest, hold: DeviceHold, timeout_s: float) -> DeviceCommit:
        """Commit of slots of a hold. Raises like any call: what the daemon refuses stays the hold's."""
        made = DeviceCommit(self, hold, list(request.commit.slots))
        with locked(self.lock, timeout_s):
            sent = set(request.commit.slots)
            hold.slots[:] = [slot for slot in hold.slots if slot not in sent]
            try:
                reply = self._asked(key, timeout_s, commit=request).commit
            except BaseException:
                made.unknown()
                raise
            made.answered(list(reply.results), reply.ticket)
        return made

    def handles(self, key: Key, segments: Sequence[int], timeout_s: float) -> dict[int, Handle]:
        """Of segments, those that the daemon still has. Who opens them closes their descriptors."""
        request = pb.DeviceRequest(device=key[0], generation=key[1], segments=pb.SegmentsRequest(ids=segments))
        reply, descriptors = self._call_for_descriptors(pb.Request(device=request), timeout_s)
        found = {}
        try:
            for segment in reply.device.segments.segments:
                handle = Handle.from_bytes(segment.handle)
                if handle.kind == HandleKind.DESCRIPTOR and descriptors:  # without one it is refused when it is opened
                    handle = Handle.from_bytes(segment.handle, descriptors.pop(0))
                found[segment.id] = handle
        except BaseException:
            close_all([handle.descriptor for handle in found.values() if handle.descriptor >= 0])
            raise
        finally:
            close_all(descriptors)
        return found

    def _reply(self, number: int, descriptors: list[int] | None = None) -> pb.Reply:
        reply = super()._reply(number, descriptors)
        for one in reply.detach_devices:
            self.holdings.wanted_back.update(((one.device, one.generation), segment) for segment in one.segments)
        return reply

    def tell_ended(self, timeout_s: float) -> None:
        """Releases and aborts what has ended. Raises like any call.

        Leases that were not told a Resume does not name; slots that were written to it does.
        """
        held = self.holdings
        for commit in held.take_unsettled():
            if commit.session is not self or self.dead:
                commit.unknown()  # who could say how it ended is gone
                continue
            try:
                over = commit.ask(0, timeout_s)
            except errors.KVStoreError as e:
                log.debug("the end of a commit is not known yet: %s", e)
                over = False
            if over:
                commit.end_hold()
            else:
                held.unsettled.append(commit)
        if not held.ended:
            return
        with locked(self.lock, timeout_s):  # first: what is taken and not told would be forgotten
            for terms in held.take_ended():
                held.unpin(terms)
                slots = held.granted_by(terms) if terms.written else held.settle(terms)
                if slots:
                    self._tell_end(terms, slots, timeout_s)

    def _tell_end(self, terms: Terms, slots: list[int], timeout_s: float) -> None:
        """With the lock held. Raises only where the session has ended."""
        try:
            if terms.written:
                self._asked(terms.key, timeout_s, abort=pb.AbortRequest(slots=slots))
            else:
                self._asked(terms.key, timeout_s, release=pb.ReleaseRequest(slots=slots))
        except errors.KVStoreError as e:
            if self.dead:
                self.holdings.ended.extend([terms] if terms.written else [])  # the next session tells it
                raise
            log.debug("slots of device %s were not given back, as of memory that is gone: %s", terms.key[0], e)
        if terms.written:
            self.holdings.no_longer(terms, slots)

    def tell_closed(self, timeout_s: float) -> None:
        """Which segments this process has closed. Raises like any call, and tells it the next time."""
        held = self.holdings
        by_key: dict[Key, list[int]] = {}
        while held.closed:
            key, segment = held.closed.popleft()
            by_key.setdefault(key, []).append(segment)
        while by_key:
            key, segments = by_key.popitem()
            try:
                self.ask(key, timeout_s, closed=pb.DeviceClosedRequest(segments=segments))
            except errors.FailedPrecondition as e:
                log.debug("segments of device %s are closed: %s", key[0], e)
            except BaseException:
                by_key[key] = segments
                held.closed.extend((one, segment) for one, some in by_key.items() for segment in some)
                raise

    def _leave_if_free(self) -> None:
        if not self.holdings.nothing:
            return
        if not self.holdings.given_up:
            super()._leave_if_free()
        elif self._leaving:  # to say that nothing is mapped any more would not be true
            self._abandoned = True
            self.die("it was left; what could not be closed is the daemon's again when this process has ended")


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
