"""Memory of devices as one client uses it: the session for it, segments that are open, what is page-locked.

`Pools` keeps one DeviceSession at a time, tends it by a thread, and ends everything at close. A call captures a `Pool`
(pool.py): one device, one session, one generation.

Rules
  - A segment is opened at first use and closed when the daemon wants it back, when the daemon is gone, or at close,
    and never while a slot in it is used, or a kernel is queued that uses one. Closing may block for long, and nobody
    waits for it.
  - Whatever goes wrong with a device costs the call its blocks there, no more: callers go on with shared memory.
  - While the daemon is away nobody waits to connect to it here: the session for shared memory has to be back first.
"""

import logging
import os
import threading
import time
import weakref
from functools import partial
from typing import Any

from kvstore_client import devices
from kvstore_client.afterwards import Afterwards
from kvstore_client.device_session import DeviceSession
from kvstore_client.holdings import Holdings, close_segment
from kvstore_client.keeper import Keeper
from kvstore_client.marks import Marks
from kvstore_client.pool import Pool
from kvstore_client.session import Session
from kvstore_client.slab_locks import SlabLocks
from kvstore_client.staging import Staging
from kvstore_client.waiting import Wake, acquired, seconds_left
from kvstored.v1.errors import FailedPrecondition, KVStoreError, Unavailable
from kvstored_cuda.devices.device import Device
from kvstored_cuda.devices.errors import (
    DeviceError,
    IpcRefused,
)

log = logging.getLogger("kvstore_client")

TEND_S = 1.0
RETRY_S = 1.0
"""Between two attempts to open the session for devices."""

REFUSED_S = 60.0
"""Before a device is tried again whose memory this process may not open."""

NONE_S = 30.0
"""Before a daemon without memory on devices is asked again."""

NONE = "kvstored has no memory on devices: gpu.size is 0, or `kvstore-cli stats` says why there is none"

NOBODY = (FileNotFoundError, ConnectionRefusedError)
"""Causes of a session that cannot be opened since nobody listens."""

FAREWELL_S = 600.0
"""How long a closed client's thread looks after what is still used; what is held then ends with this process."""


class Pools:
    """Of one client. Thread-safe."""

    def __init__(self, keeper: Keeper) -> None:
        self._pid = os.getpid()
        self._arguments = keeper.arguments
        self._timeout_s = keeper.arguments[3]
        self._keeper = weakref.ref(keeper)
        self.afterwards = Afterwards()
        self._wake = Wake()
        self._connecting = threading.RLock()
        self._session: DeviceSession | None = None
        self._main: weakref.ref[Session] | None = None
        """The session for shared memory, when it was last looked whether there are devices."""
        self._left: list[Holdings] = []
        """Of daemons that are gone."""
        self._none_until = 0.0
        self._down, self._retry_at, self._tried = "", 0.0, 0
        self._refused: dict[str, tuple[str, float]] = {}
        self._of_device: dict[str, tuple[Device, Marks, SlabLocks, Staging]] = {}
        self._making = threading.Lock()
        self._followed = (0, 0)
        """The session for shared memory, and how much of it was mapped, when `_follow` last looked."""
        self._closed = False
        threading.Thread(target=self._tend, name="kvstore-devices", daemon=True).start()

    # -- what calls ask

    def pool(self, uuid: str, until: float) -> Pool:
        """The daemon's memory on a device. Raises what is in the way, in words that say what to do."""
        device = devices.find(uuid)
        refused, again_at = self._refused.get(uuid, ("", 0.0))
        if refused and time.monotonic() < again_at:
            raise IpcRefused(refused)
        session = self._live(until)
        found = session.devices.get(uuid)
        if found is None or session.exporter is None:
            there = ", ".join(session.devices) or "none (gpu.size, and `kvstore-cli stats`, say why)"
            raise FailedPrecondition(f"kvstored has no memory on device {uuid}; it has memory on: {there}")
        if found.trouble:
            raise Unavailable(f"device {uuid} is out of use: {found.trouble}")
        return Pool(self, session, device, found)

    def usable(self, uuid: str, until: float) -> Pool | None:
        """The same for those who can do without."""
        try:
            return self.pool(uuid, until)
        except KVStoreError as e:
            log.debug("device %s: %s", uuid, e)
            return None

    @property
    def known_to_work(self) -> bool:
        """Whether blocks on the daemon's devices can be read here, as far as is known; asks nobody."""
        session = self._session
        if session is None or session.dead:
            return False
        return any(not one.trouble and one.uuid not in self._refused for one in session.devices.values())

    def watches(self, uuid: str, session: Session) -> bool:
        """Whether the daemon of a session has this device in use.

        Only then it keeps memory that was granted to this process, should that end, until none of its kernels
        runs there: else no kernel may write to shared memory.
        """
        own = self._session
        if own is None or own.dead or own.hello.epoch != session.hello.epoch:
            return False
        device = own.devices.get(uuid)
        return device is not None and not device.trouble

    def refuse(self, uuid: str, error: DeviceError) -> None:
        """Nothing of that device can be opened by this process."""
        why = str(devices.explained(error))
        if self._refused.get(uuid, ("", 0.0))[0] != why:
            log.warning("memory of device %s cannot be used here, and copies go through shared memory: %s", uuid, why)
        self._refused[uuid] = (why, time.monotonic() + REFUSED_S)

    def marks(self, device: Device) -> Marks:
        return self._things(device)[1]

    def locks(self, device: Device) -> SlabLocks:
        """What of shared memory the device may copy itself; what has just been mapped is on its way to be."""
        keeper = self._keeper()
        main = keeper.session if keeper is not None else None
        if main is not None and self._followed != (id(main), len(main.mappings)):
            self._follow()
        return self._things(device)[2]

    def staging(self, device: Device) -> Staging:
        return self._things(device)[3]

    def _things(self, device: Device) -> tuple[Device, Marks, SlabLocks, Staging]:
        found = self._of_device.get(device.uuid)
        if found is None or found[0] is not device:
            with self._making:
                isolated = devices.isolated()
                asker = self.afterwards.asker(device.uuid)
                found = (
                    device,
                    Marks(device, isolated, asker),
                    SlabLocks(device, isolated),
                    Staging(device, isolated, self.afterwards, asker),
                )
                found = self._of_device.setdefault(device.uuid, found)
            self._follow()
        return found

    def wake(self) -> None:
        """Has the thread look soon."""
        self._wake.set()

    def state(self) -> dict[str, Any]:
        """For people: what this process does with devices."""
        session = self._session
        held = session.holdings if session is not None else None
        isolated = devices.isolated().state()
        return {
            "pools": {
                uuid: one.trouble or self._refused.get(uuid, ("", 0.0))[0]
                for uuid, one in (session.devices if session is not None else {}).items()
            },
            "segments_open": sum(map(len, held.opened.values())) if held is not None else 0,
            "kept_for_copies": len(self.afterwards),
            "devices": {
                uuid: {
                    **locks.state(),
                    "staged_blocks": staging.used,
                    "events_refused": marks.refused,
                    "queries_hanging": marks.asker.hanging,
                }
                for uuid, (_, marks, locks, staging) in list(self._of_device.items())
            },
            "native_calls_running": isolated.running,
            "native_calls_abandoned": dict(isolated.abandoned),
        }

    # -- the session

    def _live(self, until: float) -> DeviceSession:
        session = self._session
        if session is not None and not session.hung_up():
            return session
        main = self._main_session()
        if not acquired(self._connecting, seconds_left(until)):
            raise Unavailable("another thread is still connecting for devices")
        try:
            session = self._session
            if session is not None and not session.hung_up():
                return session
            if self._main is not None and self._main() is main and time.monotonic() < self._none_until:
                raise FailedPrecondition(NONE)
            if time.monotonic() < self._retry_at and self._tried == id(main):
                raise Unavailable(self._down or "the session for devices has just ended")
            try:
                return self._attach(until, main)
            except KVStoreError as e:
                self._failed(e, main)
                raise
        finally:
            self._connecting.release()

    def _failed(self, error: KVStoreError, main: Session | None) -> None:
        """Not tried again for a while, unless there is another session for shared memory by then."""
        self._down, self._retry_at, self._tried = str(error), time.monotonic() + RETRY_S, id(main)

    def _main_session(self) -> Session:
        keeper = self._keeper()
        if keeper is None or self._closed:
            raise FailedPrecondition("the client is closed")
        session = keeper.now()
        if session is None or session.hung_up():
            raise Unavailable(keeper.down or "the daemon is away")
        if session.hello.read_only:
            why = session.hello.read_only_reason or "this client was made read-only"
            raise FailedPrecondition(f"memory of devices is for sessions that may write: {why}")
        return session

    def _attach(self, until: float, main: Session | None) -> DeviceSession:
        """A new session in the place of a dead one. Within `_connecting`."""
        before = self._session
        fresh = DeviceSession(self._arguments, Holdings(self.afterwards, self._wake.set))
        try:
            fresh.open(before, until)
            fresh.ask_devices(seconds_left(until), time.monotonic())
        except KVStoreError as e:
            fresh.die(str(e))
            if fresh.hello.resumed:
                self._session = fresh  # it has what `before` had
            raise
        if before is not None and before.holdings is not fresh.holdings:
            self._left.append(before.holdings)
        self._main, self._down = weakref.ref(main) if main is not None else None, ""
        if not fresh.devices and fresh.holdings.nothing:
            self._session, self._none_until = None, time.monotonic() + NONE_S
            fresh.leave()
            raise FailedPrecondition(NONE)
        self._session = fresh
        return fresh

    # -- the thread

    def _tend(self) -> None:
        until = 0.0
        while True:
            self._wake.wait(TEND_S)
            try:
                self._tick()
                if self._closed:
                    until = until or time.monotonic() + FAREWELL_S
                    if self._finished():
                        return
            except Exception:
                log.exception("the thread that tends devices of a kvstored client failed; it goes on")
            if until and time.monotonic() >= until:
                log.warning("devices of a closed client are still used; what is held ends with this process")
                return

    def _tick(self) -> None:
        self.afterwards.look()
        session = self._session
        if session is not None and (session.forked or session.dead or session.hung_up()):
            session = self._again(session)
        if session is not None:
            try:
                session.tell_ended(self._timeout_s)
                if time.monotonic() - session.told_at >= TEND_S:
                    session.ask_devices(self._timeout_s, time.monotonic())
                session.tell_closed(self._timeout_s)
            except KVStoreError as e:
                log.debug("devices: %s", e)
            self._close_unused(session.holdings, session)
        for held in list(self._left):
            held.left_alone()
            self._close_unused(held, None)
            if held.unused:
                self._left.remove(held)
        self._follow()

    def _again(self, session: DeviceSession) -> DeviceSession | None:
        """A session that has ended: what it has open goes, unless somebody uses it; that is taken over by the next.

        There is a next one also where nothing is held, for the daemon may have given something with an answer that came
        too late, and keeps that until it hears that nobody uses it.
        """
        if session.forked:
            return None
        session.holdings.left_alone()
        self._close_unused(session.holdings, None)
        if session.settled or not acquired(self._connecting, self._timeout_s):
            return None
        main: Session | None = None
        try:
            if self._session is not session:
                return self._session
            if not self._closed:
                main = self._main_session()
            if time.monotonic() < self._retry_at and self._tried == id(main):
                return None
            return self._attach(time.monotonic() + self._timeout_s, main)
        except KVStoreError as e:
            log.debug("no session for devices: %s", e)
            self._failed(e, main)
            if self._closed and session.holdings.unused and isinstance(e.__cause__, NOBODY):
                self._session = None  # with that daemon its memory is gone
            return None
        finally:
            self._connecting.release()

    def _close_unused(self, held: Holdings, session: DeviceSession | None) -> None:
        """Closes segments that are not used: of a session that lives those that the daemon wants back, else all."""
        with held.lock:
            for key in list(held.opened):
                everything = session is None or self._closed or not session.is_now(key)
                used = held.segments_in_use(key)
                for segment in list(held.opened[key]):
                    if segment in used or not (everything or (key, segment) in held.wanted_back):
                        continue
                    mapping = held.opened[key].pop(segment)
                    held.closing.add((key, segment))
                    close = partial(close_segment, held, key, segment, mapping)
                    devices.isolated().dispose("closing a segment", close, owner=key[0])
                if not held.opened[key]:
                    del held.opened[key]
            for key, segment in list(held.wanted_back):
                if segment in held.opened.get(key, {}) or (key, segment) in held.opening:
                    continue
                held.wanted_back.discard((key, segment))
                if (key, segment) not in held.closing:  # else it is told when it is closed
                    held.closed.append((key, segment))
                    self._wake.set()

    def _follow(self) -> None:
        """Page-locks what the session for shared memory has mapped by now."""
        keeper = self._keeper()
        main = keeper.session if keeper is not None and not self._closed else None
        if main is not None and (main.dead or main.hello.read_only):  # who may only read holds nothing, so it stages
            main = None
        mappings = list(main.mappings.values()) if main is not None else []
        self._followed = (id(main), len(mappings))
        for _, _, locks, _ in list(self._of_device.values()):
            locks.follow(mappings)

    # -- the end

    def close(self) -> None:
        """Waits for copies under way, no longer than a call may take, and gives all back; the rest goes on behind."""
        if self._closed or os.getpid() != self._pid:  # a forked child has neither the threads nor a part in it
            return
        until = time.monotonic() + self._timeout_s
        self.afterwards.wait_empty(self._timeout_s)
        self._closed = True
        pause = threading.Event()
        while not self._over and time.monotonic() < until:
            self._wake.set()
            pause.wait(min(0.005, seconds_left(until)))

    def abandon(self) -> None:
        """The client is gone: the thread sees everything off. Safe in finalizers."""
        self._closed = True
        self._wake.set()

    @property
    def _over(self) -> bool:
        """Whether nothing is left to be done."""
        session = self._session
        return (session is None or session.settled) and not (self._left or self._of_device or len(self.afterwards))

    def _finished(self) -> bool:
        """Takes a step towards the end; whether it is reached."""
        session = self._session
        if session is not None:
            if session.holdings.nothing and not session.settled:
                session.leave()
            if session.settled:
                self._session = None
        if not len(self.afterwards):
            for uuid, (_, marks, locks, staging) in list(self._of_device.items()):
                staging.close()
                marks.close()
                if locks.close():
                    del self._of_device[uuid]
        if self._over:
            self.afterwards.close()
        return self._over
