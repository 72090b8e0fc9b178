"""The session for memory of devices: a connection beside the one for shared memory, so that no device costs that one.

What is asked here may take a driver's time on either side, and a call that gets no answer in time ends its session: a
read of shared memory must neither wait for it nor lose its session by it.

`holdings` is what this process has through it; the client's thread (pools.py) tells the daemon here what has ended.
"""

import logging
from collections.abc import Sequence
from typing import Any

from kvstore_client.device_commits import DeviceCommit
from kvstore_client.holdings import DeviceHold, Holdings, Key, Terms
from kvstore_client.session import Session
from kvstore_client.stream import close_all
from kvstore_client.transport import Identity
from kvstore_client.waiting import locked, seconds_left
from kvstored.v1 import PROTOCOL, errors
from kvstored.v1 import kvstore_pb2 as pb
from kvstored_cuda.devices.handles import Generation, Handle, HandleKind

log = logging.getLogger("kvstore_client")


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

    def is_now(self, key: Key) -> bool:
        """Whether that is the memory that the device has, as far as this session was told."""
        found = self.devices.get(key[0])
        return found is not None and found.generation == key[1] and not found.trouble

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
            made.sent = True
            try:
                reply = self._asked(key, timeout_s, commit=request).commit
                made.answered(list(reply.results), reply.ticket)
            except BaseException:
                made.unknown()
                raise
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
        again: list[Terms] = []
        try:
            with locked(self.lock, timeout_s):  # first: what is taken and not told would be forgotten
                for terms in held.take_ended():
                    held.unpin(terms)
                    again += [] if self._tell_end(terms, timeout_s) else [terms]
        finally:
            held.ended.extend(again)

    def _tell_end(self, terms: Terms, timeout_s: float) -> bool:
        """With the lock held: whether the daemon has been told. Raises only where the session has ended."""
        held = self.holdings
        if not terms.written:
            slots = held.settle(terms)
            return not slots or self._return(terms, slots, timeout_s)
        try:
            left = held.granted_by(terms)
            return not left or self._return(terms, left, timeout_s)
        except errors.KVStoreError:
            held.ended.append(terms)  # the next session tells it
            raise

    def _return(self, terms: Terms, slots: list[int], timeout_s: float) -> bool:
        """Release or Abort; False where the daemon watches a commit of these slots still, and is to be asked again.

        It takes all of a message or nothing. So what it refuses is named one by one: some may be its own already, as
        of a commit whose answer never came.
        """
        try:
            if terms.written:
                self._asked(terms.key, timeout_s, abort=pb.AbortRequest(slots=slots))
            else:
                self._asked(terms.key, timeout_s, release=pb.ReleaseRequest(slots=slots))
        except errors.KVStoreError as e:
            if self.dead:
                raise
            if isinstance(e, errors.InvalidArgument) and len(slots) > 1:
                one_by_one = [self._return(terms, [slot], timeout_s) for slot in slots]
                return all(one_by_one)
            gone = isinstance(e, errors.InvalidArgument | errors.Unavailable) or not self.is_now(terms.key)
            if terms.written and not gone:
                log.debug("slots of device %s are given back later: %s", terms.key[0], e)
                return False
            log.debug("slots of device %s were not given back, and are the daemon's: %s", terms.key[0], e)
        if terms.written:
            self.holdings.no_longer(terms, slots)
        return True

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
