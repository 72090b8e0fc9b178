"""The namespaces of one store: opened by their digest, named in messages by a number, given up when nobody uses them.

There are NAMESPACES_MAX at a time. When one more is wanted, the numbers of those go to others that are empty and whose
number nobody has used for IDLE_S: a client opens its namespace again before it uses a number that it has not used for
half of that (kvstore_client). Keys are made of the digest, so whoever uses a number longer finds nothing, and never
another's bytes. What has a namespace in a tier below keeps its number (`kept`): copies are named by it there.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvstore.core import holds
from kvstore.core.block import State
from kvstore.core.holds import Namespace, Tenant
from kvstored.v1 import KEY_BYTES
from kvstored.v1.errors import FailedPrecondition, InvalidArgument, ResourceExhausted

if TYPE_CHECKING:
    from kvstore.core.store import Store

IDLE_S = 3600.0
"""For as long a number is good after its last use (protos/README.md)."""

LOOK_S = 1.0
"""Between two walks through all namespaces where none was found that could be given up: some 20 ms each."""

GIVE_UP_MAX = 1024
"""At a time: some milliseconds."""

GIVEN_UP = b"given up"
"""Begins the digests of numbers that are free."""

NOBODY = Tenant(-1, "")
"""Whose numbers are that have been given up."""


class Spaces:
    """Of one store. Its list is the store's `namespaces`: the one of number n is at n - 1."""

    def __init__(self, store: "Store") -> None:
        self._store = store
        self.kept: Callable[[Namespace], bool] = lambda namespace: True
        """Whether somebody goes by its number for good, as other tiers do."""
        self._given_up: deque[int] = deque()
        self._look_at = -holds.INFINITY
        self.now = 0.0
        """As the store was last told."""

    def open(self, tenant: Tenant, digest: bytes, block_bytes: int, label: str, block_tokens: int) -> Namespace:
        """As `Store.open_namespace`."""
        if len(digest) != KEY_BYTES:
            raise InvalidArgument(f"a namespace digest is {KEY_BYTES} bytes, not {len(digest)}")
        found = tenant.namespaces.get(digest)
        if found is not None:
            return self._again(found, block_bytes, block_tokens)
        segments = self._store.segments
        largest = segments.size_bytes // segments.page_bytes * segments.page_bytes
        if not 1 <= block_bytes <= min(largest, 0xFFFFFFFF):
            raise InvalidArgument(
                f"block_bytes {block_bytes} is not between 1 and {min(largest, 0xFFFFFFFF)} "
                "(host.size in whole pages, and below 4 GiB)"
            )
        number = self._number()
        found = Namespace(number, tenant, digest, block_bytes, label, block_tokens, used=self.now)
        self._store.ledger.namespace(found)
        if number > len(self._store.namespaces):
            self._store.namespaces.append(found)
        else:
            self._given_up.popleft()
            self._store.namespaces[number - 1] = found
        tenant.namespaces[digest] = found
        return found

    def _again(self, found: Namespace, block_bytes: int, block_tokens: int) -> Namespace:
        name = f"namespace {found.digest.hex()[:12]} ({found.label})"
        if found.block_bytes != block_bytes:
            raise FailedPrecondition(f"{name} has blocks of {found.block_bytes} bytes, not {block_bytes}")
        if block_tokens and found.block_tokens not in (0, block_tokens):
            raise FailedPrecondition(f"{name} has blocks of {found.block_tokens} tokens, not {block_tokens}")
        if block_tokens and not found.block_tokens:
            found.block_tokens = block_tokens
            self._store.ledger.namespace(found)
        found.used = self.now
        return found

    def by_number(self, tenant: Tenant, number: int) -> Namespace:
        """The namespace that a message names: a use of its number."""
        namespaces = self._store.namespaces
        if 1 <= number <= len(namespaces):
            found = namespaces[number - 1]
            if found.tenant is tenant:
                found.used = self.now
                return found
        raise FailedPrecondition(
            f"namespace {number} is not one that tenant {tenant.name!r} has opened since this daemon started, and used "
            f"within {IDLE_S:.0f} s; open it first (OpenNamespace)"
        )

    def _number(self) -> int:
        """For one more: a new one, or the first of `_given_up`."""
        namespaces = self._store.namespaces
        if len(namespaces) < holds.NAMESPACES_MAX:
            return len(namespaces) + 1
        if not self._given_up and self.now >= self._look_at:
            self._give_up()
            if not self._given_up:
                self._look_at = self.now + LOOK_S
        if not self._given_up:
            raise ResourceExhausted(
                f"{holds.NAMESPACES_MAX} namespaces exist already, all with blocks or used within {IDLE_S:.0f} s"
            )
        return self._given_up[0]

    def _give_up(self) -> None:
        """As many as may be at a time."""
        table = self._store.table
        # Also of what is not counted as blocks: evicted ones that are read, and parents that are not here.
        there = np.frombuffer(bytes(table.state), np.uint8) != State.GONE
        named = set(np.unique(np.frombuffer(table.namespace.tobytes(), table.namespace.typecode)[there]).tolist())
        for i, namespace in enumerate(self._store.namespaces):
            idle = namespace.used <= self.now - IDLE_S and namespace.tenant is not NOBODY
            if idle and not namespace.blocks and namespace.id not in named and not self.kept(namespace):
                del namespace.tenant.namespaces[namespace.digest]
                digest = GIVEN_UP + namespace.id.to_bytes(KEY_BYTES - len(GIVEN_UP))
                # Nobody else is written down by its digest: it may get another number.
                self._store.ledger.namespace(
                    Namespace(namespace.id, namespace.tenant, digest, namespace.block_bytes, "")
                )
                self._store.namespaces[i] = Namespace(namespace.id, NOBODY, digest, namespace.block_bytes, "")
                self._given_up.append(namespace.id)
                if len(self._given_up) == GIVE_UP_MAX:
                    break
