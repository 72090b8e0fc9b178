"""Who may touch what: tenants, namespaces and the sessions that hold slots.

A hold ends by commit, abort or release, or with the death of its session's process,
never by a clock while that process lives: a process that was stopped for an hour may
write the moment it goes on. Callers without shared memory (`local=False`) write through
the daemon, so their reservations may expire.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

INFINITY = float("inf")
"""When a hold of a local session expires."""

GRANT_SLOTS_MAX = 16
GRANT_SHARE = 64
"""Granted ahead to one session: at most 16 slots and 1/64 of the tenant's bytes a block size; none is legal."""

RESERVE_SLOTS_MAX = 64
SESSION_SHARE = 4
"""All holds of one session: at most 1/4 of the tenant's bytes, but always one slot."""

HELD_NUMERATOR, HELD_DENOMINATOR = 3, 4
"""All holds of a tenant: at most 3/4 of its bytes, but always one slot."""

HOLDS_MAX = 1 << 16
"""Leases of one session, counting each hold, and slots granted to it, together.

So a Resume, which names them all, fits a frame with each reference at its longest (10
bytes), the end of a session is one step of some 30 ms, and the leases of all sessions fit
a column of 32 bits.
"""

TENANTS_MAX = 64
NAMESPACES_MAX = 65536
SESSIONS_MAX = 1024


@dataclass(eq=False, slots=True, repr=False)
class Namespace:
    """Blocks of one identity within a tenant; all of one size."""

    id: int
    tenant: "Tenant"
    digest: bytes
    block_bytes: int
    label: str
    block_tokens: int = 0
    """For counts in tokens; 0 where nobody has said."""
    blocks: int = 0
    pinned: int = 0
    """Of those blocks."""
    used: float = 0.0
    """When its number was last used, as the store knows the time."""


@dataclass(eq=False, slots=True, repr=False)
class Tenant:
    """Whose data may meet: one dict from key to row, one index, memory never shared with others."""

    id: int
    name: str
    rows: dict[bytes, int] = field(default_factory=dict)
    namespaces: dict[bytes, Namespace] = field(default_factory=dict)
    missing: dict[bytes, int] = field(default_factory=dict)
    """Key of a parent that is not here -> the row that stands in for it (families.py)."""
    held_bytes: int = 0
    """Slots granted, quarantined or leased, each counted once."""


@dataclass(eq=False, slots=True, repr=False)
class Session:
    """One client's connection, or one gRPC call that writes."""

    id: int
    tenant: Tenant
    client: str
    local: bool
    read_only: bool
    pid: int
    nonce: int
    opened: float
    born: int = 0
    """When its process started, in ticks since boot; 0 where nobody asked (memory ends with the daemon)."""
    granted: dict[int, float] = field(default_factory=dict)
    """Slot reference -> when the reservation expires (infinity for local sessions)."""
    leased: dict[int, int] = field(default_factory=dict)
    """Slot reference -> how many holds on it."""
    leases: int = 0
    """Holds in `leased`, all together."""
    granted_of: dict[int, int] = field(default_factory=dict)
    """Block size -> slots granted."""
    held_bytes: int = 0
    """Slots granted and slots leased, each slot counted once."""
    gave_back: int = 0
    """How often it asked to give slots or leases back. What was granted before may be another's since."""
    committed: float = INFINITY
    """When it last stored a block; infinity before."""
    half_written: set[int] = field(default_factory=set)
    """Of `granted`: reserved of a daemon before this one. They can be given back, and not be committed."""
    ended: bool = False
    """The socket is gone, the process is not: what it held is quarantined."""
    detach: set[int] = field(default_factory=set)
    """Segments that the client is asked to unmap."""
    recall: bool = False
    """Memory is short: the client is asked to give back what was granted ahead, and gets no more
    until it holds no grant at all."""

    @property
    def holds_left(self) -> int:
        """Further leases and slots that it may have by number, whatever their size."""
        return HOLDS_MAX - self.leases - len(self.granted)

    def grant(self, refs: Sequence[int], block_bytes: int, slot_bytes: int, expires: float) -> None:
        """These slots are this session's to write to."""
        for ref in refs:
            self.granted[ref] = expires
        self.granted_of[block_bytes] = self.granted_of.get(block_bytes, 0) + len(refs)
        self.held_bytes += len(refs) * slot_bytes
        self.tenant.held_bytes += len(refs) * slot_bytes

    def ungranted(self, count: int, block_bytes: int, slot_bytes: int) -> None:
        """`count` slots have just left `granted`: they hold blocks now, or nothing."""
        if not count:
            return
        left = self.granted_of[block_bytes] - count
        if left:
            self.granted_of[block_bytes] = left
        else:
            del self.granted_of[block_bytes]
        self.held_bytes -= count * slot_bytes
        self.tenant.held_bytes -= count * slot_bytes
        if not self.granted:
            self.recall = False
