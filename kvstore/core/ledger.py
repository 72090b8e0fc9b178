"""What the store has written down of itself as it goes, where memory outlives the daemon.

The order of what is written is the core's matter, and every process can die between any two
stores: a block's row comes when its bytes are whole and goes before its slot can be anybody
else's; a hold comes before the answer that tells of it, and goes after the hold is gone. So
what is written down may hold too much and never too little, and no row names bytes that are
not its block's.
"""

from collections.abc import Sequence
from typing import Protocol

from kvstore.core.holds import Namespace, Session, Tenant

GRANT, UNGRANT, LEASE, UNLEASE = 0, 1, 2, 3
"""What happened to a session's holds."""


class Ledger(Protocol):
    """The private memory that nobody but the daemon has, or a dict in tests."""

    def tenant(self, tenant: Tenant) -> None:
        """A tenant is there, before anything is its."""

    def namespace(self, namespace: Namespace) -> None:
        """A namespace is there, or has another number of tokens. Raises ResourceExhausted where there is no room."""

    def assigned(self, segment: int, tenant: int, block_bytes: int, slots: int) -> None:
        """A segment with nothing in it is a pool's, before a slot of it is anybody's."""

    def sealed(
        self, ref: int, key: bytes, parent: bytes, namespace: int, depth: int, used: float, stored: float
    ) -> None:
        """The bytes in this slot are that block's, from now until `gone`."""

    def gone(self, ref: int) -> None:
        """They are no block's: before the slot is reused. Where they are none, nothing happens."""

    def until(self, ref: int, mark: int, at: float) -> None:
        """When a block's pin or life (`mark` of block.py) ends; 0: there is no such end (any more)."""

    def used(self, ref: int, at: float, hits: int) -> None:
        """When it was last used, and its hits: written now and then, and so lost in part where a process is killed."""

    def opened(self, session: Session) -> None:
        """A session is there; those that hold slots of shared memory are written down, before they have any.

        Raises ResourceExhausted where there is no room.
        """

    def succeeds(self, heir: Session, nonce: int) -> None:
        """A session is known by that name as well."""

    def has_room(self, session: Session, more: int) -> bool:
        """Whether so many holds more can be written down: to be asked before they are given."""

    def holds(self, session: Session, kind: int, refs: Sequence[int]) -> None:
        """What has just happened to a session's holds, which are in its dicts by now."""

    def closed(self, session: Session) -> None:
        """Nothing of a session is left."""


class NoLedger:
    """Nothing is written down: memory ends with the daemon."""

    def tenant(self, tenant: Tenant) -> None: ...
    def namespace(self, namespace: Namespace) -> None: ...
    def assigned(self, segment: int, tenant: int, block_bytes: int, slots: int) -> None: ...
    def sealed(
        self, ref: int, key: bytes, parent: bytes, namespace: int, depth: int, used: float, stored: float
    ) -> None: ...
    def gone(self, ref: int) -> None: ...
    def until(self, ref: int, mark: int, at: float) -> None: ...
    def used(self, ref: int, at: float, hits: int) -> None: ...
    def opened(self, session: Session) -> None: ...
    def succeeds(self, heir: Session, nonce: int) -> None: ...
    def has_room(self, session: Session, more: int) -> bool:
        return True

    def holds(self, session: Session, kind: int, refs: Sequence[int]) -> None: ...
    def closed(self, session: Session) -> None: ...


NO_LEDGER: Ledger = NoLedger()
