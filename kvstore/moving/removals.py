"""Removals that the SSD cannot be told of at present, kept in a file so that they outlive the daemon.

While it is out of use, is being opened or does not answer, what a client removes would be back
after a kill. So it is written down here before it is answered (tiers/removal_file.py), is applied
to the records that the next start finds, and the file goes when they are deleted on the disk.

    server/removing --note--> file <--known, mark-- moving, which reads the records
"""

import asyncio
import errno
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore.core.forgetting import Deletion
from kvstore.core.movement import Movement
from kvstore.core.moves import Name
from kvstore.logs import logger
from kvstore.moving.lone_thread import LoneThread
from kvstore.tiers.removal_file import ANYWHERE, ENTRY_KEYS_MAX, EVERYBODY, FILE_BYTES_MAX, Entry, RemovalFile, pack

log = logger("kvstored.removals")

FILE_NAME = "removals"
NOTE_S = 0.5
"""For an entry to be on the disk of server.state_dir: an answer waits for it."""

MARK_S = 10.0
"""For the file to be read, or a mark to be on the disk: the SSD is not in use before."""

DELETE_AGAIN_S = 5.0
END_S = 5.0
"""For deletions of records to end when the daemon stops."""

LOOK_S = 0.01
MARK = Entry("", bytes(32), (), 0)
EVER = (1 << 64) - 1
"""In place of a number of a record: all that there are."""

FULL = f"{FILE_BYTES_MAX >> 20} MiB of removals are written down already, and the SSD has not deleted their records yet"


class Struck:
    """Which records are not to be believed, by what is in the file."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._whole: dict[tuple[str, bytes], int] = {}
        self._keys: dict[tuple[str, bytes], dict[bytes, int]] = {}
        upto = EVER
        for entry in reversed(entries):  # a mark speaks of what is ahead of it
            if not entry.tenant:
                upto = entry.upto
                continue
            space, last = (entry.tenant, entry.digest), entry.upto or upto
            if not entry.keys:
                self._whole[space] = max(last, self._whole.get(space, 0))
            known = self._keys.setdefault(space, {})
            for key in entry.keys:
                known[key] = max(last, known.get(key, 0))
        self._spaces: dict[int, list[tuple[str, bytes]]] = {}
        self.last = max((entry.upto for entry in entries), default=0)
        """Records of later blocks have higher numbers than this, though those that had it may be deleted."""

    def of(self, spaces: dict[int, tuple[str, bytes]]) -> "Struck":
        """In a catalogue that has these numbers for tenants and digests."""
        for number, (tenant, digest) in spaces.items():
            of = [(tenant, digest), (tenant, ANYWHERE), (EVERYBODY, ANYWHERE)]
            self._spaces[number] = [space for space in of if space in self._keys]
        return self

    def has(self, number: int, key: bytes, sequence: int) -> bool:
        """Whether that record, of the namespace of that number, is of a block that was removed since."""
        return any(
            sequence <= max(self._whole.get(space, 0), self._keys[space].get(key, 0))
            for space in self._spaces.get(number, ())
        )


class Removals:
    """Of one daemon, under its `server.state_dir`. Owned by the event loop."""

    def __init__(self, state_dir: Path, movement: Movement) -> None:
        self._movement = movement
        self._path = state_dir / FILE_NAME
        self._file = RemovalFile(self._path)
        self._thread = LoneThread("removals")
        self._bytes = 0
        """What is in the file, or on its way there."""
        self.unmarked = 0
        """Entries that speak of whatever record there is."""
        self._notes = 0
        self._waiting = False
        """For the deletions of records on the SSD."""
        self._deleting = False
        self._delete_at = 0.0
        """When that may be tried, after it failed."""
        self._failing = False
        """And it was said."""
        self.sequence: Callable[[], int] = lambda: 0
        """Of the last record that was written."""

    # -- what is removed

    def last_record(self) -> int:
        """Behind this, records are of blocks that were stored later; 0 where that is not known."""
        return self.sequence() if self._movement.ready else 0

    async def note(self, tenant: str, digest: bytes, keys: Sequence[bytes] | None, upto: int) -> str:
        """Writes down that these keys (None: all) were removed, for records up to that one (0: whichever there are).

        In the order in which these calls begin. Answers why it is not on the disk, "" where it is.
        """
        parts = [()] if keys is None else [keys[at : at + ENTRY_KEYS_MAX] for at in range(0, len(keys), ENTRY_KEYS_MAX)]
        packed = b"".join(pack(Entry(tenant, digest, part, upto)) for part in parts)
        if self._bytes + len(packed) > FILE_BYTES_MAX:
            return FULL
        self._bytes += len(packed)
        self._notes += 1
        self.unmarked += not upto
        appended = asyncio.get_running_loop().run_in_executor(self._thread, self._file.append, packed)
        try:
            async with asyncio.timeout(NOTE_S):
                await asyncio.shield(appended)
        except TimeoutError:
            return f"{self._path} was not written within {NOTE_S:.1f} s"
        except OSError as e:
            self._bytes -= len(packed)
            if not self._failing:
                log.warning("removals cannot be written down", path=str(self._path), reason=str(e.strerror or e))
            self._failing = True
            return f"{self._path} cannot be written: {e.strerror or e}"
        self._failing = False
        return ""

    async def note_everywhere(self, tenant: str, keys: Sequence[bytes] | None) -> str:
        """The same of all namespaces of a tenant ("": of everybody), for whichever records there are."""
        return await self.note(tenant or EVERYBODY, ANYWHERE, keys, 0)

    # -- what the SSD's records are compared with

    async def known(self) -> Struck:
        """What is in the file, this life's entries included. Raises OSError."""
        try:
            async with asyncio.timeout(MARK_S):
                entries, behind = await asyncio.get_running_loop().run_in_executor(self._thread, self._file.read)
        except OSError as e:  # a TimeoutError is one
            reason = e.strerror or f"no answer within {MARK_S:.0f} s"
            why = f"which blocks were removed cannot be read from {self._path}: {reason}"
            raise OSError(e.errno or errno.ETIMEDOUT, why) from e
        if behind:
            log.warning("the end of the file of removals was not written whole", path=str(self._path), bytes=behind)
        self._bytes = max(self._bytes, self._file.size_bytes)
        unmarked = 0
        for entry in entries:
            unmarked = unmarked + (not entry.upto) if entry.tenant else 0
        self.unmarked = max(self.unmarked, unmarked)
        return Struck(entries)

    async def mark(self, sequence: int) -> None:
        """All entries so far speak of records up to this one: whatever is written from now on stays. Raises OSError."""
        while self.unmarked:
            self.unmarked = 0
            packed = pack(MARK._replace(upto=sequence))
            self._bytes += len(packed)
            try:
                async with asyncio.timeout(MARK_S):
                    await asyncio.get_running_loop().run_in_executor(self._thread, self._file.append, packed)
            except BaseException:
                self.unmarked += 1
                raise

    def step(self) -> None:
        """The file goes when the SSD has no record any more of which it speaks."""
        movement, notes = self._movement, self._notes
        if not self._bytes or self._waiting or self._deleting or not movement.ready or movement.trouble:
            return
        if time.monotonic() < self._delete_at:
            return

        def ended(waiter: Deletion) -> None:
            self._waiting = False
            if not waiter.why and notes == self._notes:
                self._delete()

        self._waiting = True
        movement.writes.forgetting.wait_removed(None, None, ended)

    def _delete(self) -> None:
        self._bytes, self._deleting = 0, True
        deleted = asyncio.get_running_loop().run_in_executor(self._thread, self._file.delete)
        deleted.add_done_callback(self._deleted)

    def _deleted(self, done: asyncio.Future[None]) -> None:
        self._deleting = False
        error = done.exception()
        if error is not None:
            self._bytes = max(self._bytes, 1)  # to be tried again
            self._delete_at = time.monotonic() + DELETE_AGAIN_S
            log.warning("the file of removals cannot be deleted", path=str(self._path), reason=str(error))

    # -- the end

    async def close(self, pump: Callable[[], None]) -> None:
        """Waits until what was removed is deleted on the SSD; what is not by then is written down."""
        movement, until = self._movement, time.monotonic() + END_S
        while not (movement.writes.forgets_nothing or movement.trouble) and time.monotonic() < until:
            pump()
            await asyncio.sleep(LOOK_S)
        why = await self.note_all(movement.writes.forgetting.not_deleted(None, None))
        if why:
            log.warning("removed blocks may be back after the next start", reason=why)
        try:
            async with asyncio.timeout(NOTE_S):
                await asyncio.get_running_loop().run_in_executor(self._thread, int)
        except TimeoutError:
            log.warning("the disk of removals does not answer", path=str(self._path))
        self._thread.shutdown()

    async def note_all(self, names: Sequence[Name]) -> str:
        """Writes down that these records are to be deleted; why that is not on the disk, "" where it is."""
        joined, keys = self._movement.link.joined, dict[int, list[bytes]]()
        for space, key in names:
            keys.setdefault(space, []).append(key)
        noted = [
            self.note(space.tenant.name, space.digest, keys[number], self.last_record())
            for number, space in ((number, joined.memory_of[number]) for number in keys)
        ]
        return next(filter(None, await asyncio.gather(*noted)), "")
