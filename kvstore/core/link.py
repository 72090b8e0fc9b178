"""The two stores of a node with an SSD, and what those who move blocks between them share."""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvstore.core.block import NONE
from kvstore.core.carrier import Carrier
from kvstore.core.holds import Namespace, Tenant
from kvstore.core.moves import Move
from kvstore.core.packed import Packed
from kvstore.core.schedule import Kind, Scheduler
from kvstore.core.store import Store
from kvstore.core.tiered import Joined
from kvstored.v1.errors import KVStoreError

Block = tuple[int, bytes]
"""A block as memory's store names it: number of its namespace, and key."""


@dataclass
class MoveCounts:
    """What happened between the tiers, in numbers that only grow."""

    written: int = 0
    written_bytes: int = 0
    write_errors: int = 0
    writes_dropped: int = 0
    """Blocks that were to be written and were not: no room in queue or files, gone meanwhile, or a troubled SSD."""
    offloaded: int = 0
    """Blocks queued because their conversation was idle."""
    loaded: int = 0
    loaded_bytes: int = 0
    loads_failed: int = 0
    """Blocks that somebody waited for and that did not come; those of `corrupt` and `read_errors` are among them."""
    read_errors: int = 0
    corrupt: int = 0
    """Records whose bytes were not theirs: removed, and a miss."""
    lost: int = 0
    """Blocks that were on the SSD only when its directory was set aside, deleted or replaced."""
    troubles: int = 0
    """Times that the SSD went out of use."""


OPENING = "it is being opened"
"""The trouble of an SSD that may be in use in a moment: what is to be written waits for it."""

REMOVALS_MAX = 1 << 16
"""Blocks remembered as removed while it is not known what is on the SSD."""


class Removals:
    """What clients removed before all that is on the SSD was known: it is removed there when it is met."""

    def __init__(self) -> None:
        self._blocks: set[Block] = set()
        self._cleared: set[int] = set()
        self._named: set[tuple[int, bytes]] = set()
        """Tenant's number and key: in whichever of its namespaces, also one that is not known yet."""
        self._tenants: set[int] = set()
        self._all = False

    def remove(self, namespace: Namespace, keys: Iterable[bytes]) -> None:
        """Blocks of memory's namespace. Of too many all of their namespaces go: a lost hit, and nothing kept."""
        self._blocks.update((namespace.id, key) for key in keys)
        if len(self._blocks) > REMOVALS_MAX:
            self._cleared.update(number for number, _ in self._blocks)
            self._blocks.clear()

    def clear(self, namespace: Namespace) -> None:
        """All that was stored in memory's namespace before this life."""
        self._cleared.add(namespace.id)

    def everywhere(self, tenant: Tenant | None, keys: Iterable[bytes] | None) -> None:
        """These keys of memory's tenant (None: of all), or (None) all that it has, in namespaces nobody has named."""
        if tenant is None:
            self._all = True
        elif keys is None:
            self._tenants.add(tenant.id)
        else:
            self._named.update((tenant.id, key) for key in keys)
            if len(self._named) > REMOVALS_MAX:
                self._tenants.update(number for number, _ in self._named)
                self._named.clear()

    def has(self, namespace: Namespace, key: bytes) -> bool:
        """Whether that block of memory's namespace was removed."""
        number, tenant = namespace.id, namespace.tenant.id
        known = self._all or number in self._cleared or tenant in self._tenants
        return known or (number, key) in self._blocks or (tenant, key) in self._named

    def forget(self) -> None:
        """All is known, and nothing is read from records again."""
        self._blocks.clear()
        self._cleared.clear()
        self._named.clear()
        self._tenants.clear()
        self._all = False


class Link:
    """Memory's store and the SSD's, the queue between them, and the jobs for its workers."""

    def __init__(
        self,
        memory: Store,
        disk: Store,
        joined: Joined,
        *,
        pid: int,
        queue_bytes: dict[Kind, int],
        packed_bytes: int = 0,
        packed_block_max: int = 0,
    ) -> None:
        """`packed_bytes`, `packed_block_max`: as `Packed` has them, 0 where slots bound what is on the SSD."""
        self.memory = memory
        self.disk = disk
        self.joined = joined
        joined.table = disk.table
        self.counts = MoveCounts()
        self.schedule: Scheduler[Block] = Scheduler(queue_bytes)
        self.moves: list[Move] = []
        self.on_memory = Carrier(memory, "ssd", pid)
        self.on_disk = Carrier(disk, "ssd", pid)
        self.packed = Packed(disk, self.on_disk, packed_bytes, packed_block_max)
        self.checksums = array("Q")
        """Of each row of the SSD's store."""
        self._trouble = ""
        self.away = False
        """No directory is open, or it is about to be lost: nothing ends `trouble` but another one, and no record
        that goes need be deleted."""
        self.too_full = False
        """The payload takes more than it may, where files do not bound it: nothing is written."""
        self.no_file = ""
        """Why the last segment could not be made; the SSD is in use with what it has."""
        self.on_corrupt: Callable[[bytes, int], None] = lambda key, extent: None
        """Told of a record whose bytes are not its own, before it is removed."""
        self.on_trouble: Callable[[], None] = lambda: None
        self.removals = Removals()
        self._last = 0

    @property
    def trouble(self) -> str:
        """Why the SSD is out of use; "" where it is in use. Readers of the index are told at once that it is."""
        return self._trouble

    @trouble.setter
    def trouble(self, why: str) -> None:
        if bool(why) != bool(self._trouble):
            self.joined.index.set_below(bool(why))
        self._trouble = why

    def number(self) -> int:
        """For the next job."""
        self._last += 1
        return self._last

    def memory_row(self, block: Block) -> int:
        """The row of a block in memory; NONE where it is not there."""
        number, key = block
        row = self.memory.namespaces[number - 1].tenant.rows.get(key, NONE)
        return row if row != NONE and self.memory.table.namespace[row] == number else NONE

    def disk_row(self, block: Block) -> int:
        """The same on the SSD."""
        number, key = block
        namespace = self.joined.disk_of.get(number)
        if namespace is None:
            return NONE
        row = namespace.tenant.rows.get(key, NONE)
        return row if row != NONE and self.disk.table.namespace[row] == namespace.id else NONE

    def disk_namespace(self, memory: Namespace) -> Namespace | None:
        """The same namespace on the SSD, made at first use; None where there can be none at present."""
        found = self.joined.disk_of.get(memory.id)
        if found is None:
            try:
                tenant = self.disk.tenant(memory.tenant.name)
                found = self.disk.open_namespace(
                    tenant, memory.digest, memory.block_bytes, memory.label, memory.block_tokens
                )
            except KVStoreError:  # larger than the files may be, of another size than what is there, or too many
                return None
            self.joined.pair(memory, found)
        return found

    def keep_checksum(self, row: int, checksum: int, packed: int = 0) -> None:
        """Of a block that has just come to the SSD; and what it takes there, 0 where that is its slot."""
        self.packed.keep(row, packed)
        short = len(self.disk.table) - len(self.checksums)
        if short > 0:
            self.checksums.extend([0] * short)
        self.checksums[row] = checksum

    def go_out_of_use(self, why: str) -> None:
        """An error: nothing is written or read until the SSD has been tried and works."""
        if not self.trouble:
            self.counts.troubles += 1
        self.trouble = why
        self.on_trouble()
