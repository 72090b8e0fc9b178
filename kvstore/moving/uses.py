"""Last uses and hits of blocks on the SSD, on their way to records: a crash forgets what has not been written yet."""

from collections.abc import Callable, Iterator, Sequence

from kvstore.core.holds import Tenant
from kvstore.core.moves import Name
from kvstore.core.store import Store
from kvstore.tiers.ssd.catalogue import Use
from kvstore.tiers.ssd.jobs import Touch

USES_S = 30.0
"""How often they are written."""

USES_MAX = 65536
"""Blocks of which a use is kept until then."""

TOUCH_MAX = 256
"""Records changed together."""


class Uses:
    """Of the blocks of one store of an SSD."""

    def __init__(self, disk: Store) -> None:
        self._disk = disk
        self._names: dict[Name, None] = {}
        self._coming: dict[int, list[Name]] = {}
        """Those that are being written, by the number of their job."""
        self._last = 0
        self._at = 0.0

    def note(self, tenant: Tenant, keys: Sequence[bytes]) -> None:
        """Blocks of a tenant of the SSD's were used."""
        if len(self._names) < USES_MAX:
            rows, of = tenant.rows, self._disk.table.namespace
            self._names.update(((of[rows[key]], key), None) for key in keys if key in rows)

    def due(self, now: float) -> bool:
        return bool(self._names) and now >= self._at

    def take(self, now: float, wall: float, record_key: Callable[[Name], bytes]) -> Iterator[Touch]:
        """Jobs that write them; `wall` is what the wall clock is ahead of the daemon's."""
        self._at = now + USES_S
        names, self._names = self._names, {}
        table, there, found = self._disk.table, [], []
        for namespace, key in names:
            row = self._disk.namespaces[namespace - 1].tenant.rows.get(key)
            if row is not None and table.namespace[row] == namespace:
                there.append((namespace, key))
                found.append(Use(record_key((namespace, key)), table.used[row] + wall, table.hits[row]))
        for at in range(0, len(found), TOUCH_MAX):
            self._last += 1
            self._coming[self._last] = there[at : at + TOUCH_MAX]
            yield Touch(self._last, tuple(found[at : at + TOUCH_MAX]))

    def touched(self, number: int, error: str) -> None:
        """How it went with some of them: after an error they are written with the next ones."""
        names = self._coming.pop(number, [])
        if error and len(self._names) < USES_MAX:
            self._names.update(dict.fromkeys(names))

    def forget(self) -> None:
        """The directory of those that are being written is lost."""
        self._coming.clear()
