"""The reader of the shared-memory index (layout: kvstored.v1.shm; the rule: kvstore/README.md, rule 1).

`find` reads one entry as the rule demands: the sequence number alone, then the fields; for a moment
it waits for an entry that is just being written.
The caller copies, then checks that the number, the header and the socket are as before.
`leading` looks many keys up at once with numpy; what it answers is a hint.

Both rely on a processor that shows stores of one core to others in program order (x86).
Elsewhere `SHARED_READS` is False and clients ask the daemon instead.
"""

import platform
from collections.abc import Sequence

import numpy as np

from kvstored.mapping import Mapping
from kvstored.v1 import shm
from kvstored.v1.errors import FailedPrecondition

SHARED_READS = platform.machine() in ("x86_64", "AMD64", "i686")

VECTOR_KEYS_MIN = 8
"""Below this many keys, one by one is faster than numpy's fixed cost."""

WRITTEN_LOOKS = 256
"""At the number of an entry that is being written: some 20 us, where the daemon takes 2."""

IN_MEMORY = shm.GPU | shm.HOST
"""What can be read while tiers below are out of use."""

Entry = tuple[int, int, int, int, int, int]
"""word of the sequence number, the number, segment, length, offset, flags."""


class IndexReader:
    """One generation of a tenant's index, mapped read-only."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Maps and checks the header. Raises FailedPrecondition where it is not the layout that this release reads."""
        self._mapping = Mapping(descriptor, size_bytes, writable=False)
        self.raw = self._mapping.bytes.data
        self.numbers = self.raw.cast("Q")
        if self._header(shm.AT_MAGIC) != shm.MAGIC or self._header(shm.AT_VERSION) != shm.LAYOUT_VERSION:
            raise FailedPrecondition(
                f"the index in shared memory has layout {self._header(shm.AT_VERSION)}; this release of the client "
                f"reads layout {shm.LAYOUT_VERSION}"
            )
        self.epoch = self._header(shm.AT_EPOCH)
        self.generation = self._header(shm.AT_GENERATION)
        capacity = self._header(shm.AT_CAPACITY)
        if capacity & (capacity - 1) or shm.index_bytes(capacity) != size_bytes:
            raise FailedPrecondition(f"an index of {capacity} slots does not fit its {size_bytes} bytes")
        self._mask = capacity - 1
        self._slots = self._mapping.bytes[shm.HEADER_BYTES :].view("<u8").reshape(capacity, shm.SLOT_BYTES // 8)

    def current(self) -> bool:
        """Whether this is still the index, of the same life of the daemon: part of the last check of a read."""
        return self.numbers[shm.AT_GENERATION >> 3] == self.generation and self.numbers[shm.AT_EPOCH >> 3] == self.epoch

    @property
    def notice(self) -> int:
        """Grows when the daemon wants every session to Sync."""
        return self._header(shm.AT_NOTICE)

    @property
    def below_out(self) -> bool:
        """What only tiers below memory have cannot be read for now."""
        return self._header(shm.AT_BELOW) != 0

    def find(self, key: bytes) -> Entry | None:
        """The entry of `key` as it is now; None where there is none. One that is just being written is waited for."""
        first, step = shm.HASHES.unpack(key)
        step |= 1
        numbers, mask = self.numbers, self._mask
        for i in range(shm.PROBE_MAX):
            at = shm.HEADER_BYTES + ((first + i * step) & mask) * shm.SLOT_BYTES
            word = at >> 3
            sequence = numbers[word]
            if not sequence:
                return None
            if numbers[word + 1] != first:
                continue
            found, segment, length, offset, flags, _, _ = shm.FIELDS.unpack_from(self.raw, at + shm.FIELDS_AT)
            if sequence & 1:
                entry = self._when_written(at, key)
                if entry is not None:
                    return entry
            elif found == key:
                return word, sequence, segment, length, offset, flags
        return None

    def _when_written(self, at: int, key: bytes) -> Entry | None:
        """The entry of `key` in a slot that the daemon is writing: a block that moves between tiers is no miss.

        None where that becomes another key's, or takes longer than WRITTEN_LOOKS.
        """
        word = at >> 3
        for _ in range(WRITTEN_LOOKS):
            sequence = self.numbers[word]
            if not sequence & 1:
                found, segment, length, offset, flags, _, _ = shm.FIELDS.unpack_from(self.raw, at + shm.FIELDS_AT)
                return (word, sequence, segment, length, offset, flags) if found == key else None
        return None

    def leading(self, keys: Sequence[bytes], length: int) -> tuple[int, list[int]]:
        """How many leading keys have a block of `length` bytes that can be read now, and the flags of each.

        What only a device has is not in shared memory: who cannot read it there asks for it to be brought (Load).
        """
        end, flags = self._leading(keys, length)
        if self.below_out:
            end = next((i for i, tiers in enumerate(flags) if not tiers & IN_MEMORY), end)
        return end, flags[:end]

    def _leading(self, keys: Sequence[bytes], length: int) -> tuple[int, list[int]]:
        if len(keys) < VECTOR_KEYS_MIN or self.find(keys[0]) is None:
            return self._leading_one_by_one(keys, length)
        wanted = np.frombuffer(b"".join(keys), "<u8").reshape(len(keys), 4)
        mask = np.uint64(self._mask)
        at = wanted[:, 0] & mask
        step = wanted[:, 1] | np.uint64(1)
        flags = np.zeros(len(keys), np.uint16)
        left = np.arange(len(keys))
        end = len(keys)
        for _ in range(shm.PROBE_MAX):
            slots = self._slots[at[left]]
            here = (slots[:, 1:5] == wanted[left]).all(axis=1) & (slots[:, 0] & np.uint64(1) == 0)
            here &= slots[:, 5] >> np.uint64(32) == length
            flags[left[here]] = slots[here, 7].astype(np.uint16)
            never = slots[:, 0] == 0
            if never.any():
                end = min(end, int(left[never].min()))
            left = left[~here & (left < end)]
            if not len(left):
                break
            at[left] = (at[left] + step[left]) & mask
        else:
            end = min(end, int(left.min()))
        if end < len(keys) and self.find(keys[end]) is not None:  # it was just being written
            more, more_flags = self._leading_one_by_one(keys[end:], length)
            return end + more, flags[:end].tolist() + more_flags
        return end, flags[:end].tolist()

    def _leading_one_by_one(self, keys: Sequence[bytes], length: int) -> tuple[int, list[int]]:
        flags = []
        for key in keys:
            entry = self.find(key)
            if entry is None or entry[3] != length:
                break
            flags.append(entry[5])
        return len(flags), flags

    def _header(self, at: int) -> int:
        value: int = self.numbers[at >> 3]
        return value
