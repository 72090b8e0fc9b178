"""Looking closely: figures of one block, namespace or segment that are counted when somebody asks.

Nothing is kept for them. What takes a walk over many rows is in steps; the store changes
between steps, so such counts are of no one moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.core.block import DOOMED, NONE, PINNED, SEALED, BlockTable
from kvstore.core.holds import Namespace, Tenant
from kvstore.core.segments import Segment
from kvstore.core.store import Store

CHILDREN_SHOWN = 64
CHILDREN_WALKED = 1024
"""Children counted by walking from one to the next; of a block with more, all rows are asked for their parent."""


def first_children(table: BlockTable, row: int) -> tuple[list[int], int | None]:
    """The first CHILDREN_SHOWN rows below `row`, and how many there are; None where that is more than is walked."""
    first: list[int] = []
    child = table.child[row]
    for count in range(CHILDREN_WALKED + 1):
        if child == NONE:
            return first, count
        if count < CHILDREN_SHOWN:
            first.append(child)
        child = table.sibling[child]
    return first, None


def children_step(table: BlockTable, row: int, start: int, rows_max: int) -> int:
    """How many of `rows_max` rows from `start` hang from `row`: 20 ns a row."""
    return table.parent[start : start + rows_max].count(row)


def parent_of(store: Store, row: int) -> tuple[bytes, bool]:
    """The key of the block before this one and whether that is here; an empty key for a root."""
    parent = store.table.parent[row]
    if parent == NONE:
        return b"", False
    key = store.table.key[parent]
    assert key is not None, f"row {row} hangs from a block without a key"
    return key, not store.tree.families.is_orphan(row)


def named(tenant: Tenant, prefix: bytes) -> Sequence[Namespace]:
    """Namespaces whose digest begins so."""
    found = tenant.namespaces.get(prefix)
    if found is not None:
        return [found]
    return [namespace for digest, namespace in tenant.namespaces.items() if digest.startswith(prefix)]


def keys_step(
    tenant: Tenant, table: BlockTable, prefix: bytes, start: int, rows_max: int, found: dict[bytes, None]
) -> int | None:
    """Adds the keys of the tenant that begin so among `rows_max` rows from `start`: 50 ns a row.

    Answers where to go on, None at the end.
    """
    rows, keys = tenant.rows, table.key[start : start + rows_max]
    found.update((key, None) for key in keys if key is not None and key.startswith(prefix) and key in rows)
    stop = start + rows_max
    return stop if stop < len(table) else None


@dataclass
class NamespaceFigures:
    """What a walk over all rows has seen of one namespace."""

    leased: int = 0
    pinned: int = 0
    roots: int = 0
    orphans: int = 0
    deepest: int = 0
    used_last: float = 0.0
    used_first: float = float("inf")


def namespace_step(
    store: Store, namespace: Namespace, start: int, rows_max: int, figures: NamespaceFigures
) -> int | None:
    """Adds the blocks among `rows_max` rows from `start`; where to go on, None at the end."""
    table, is_orphan, number = store.table, store.tree.families.is_orphan, namespace.id
    stop = min(start + rows_max, len(table))
    owners = table.namespace[start:stop]
    if owners.count(number):
        for row, owner in enumerate(owners, start):
            if owner != number or table.state[row] != SEALED:
                continue
            figures.leased += table.leases[row] > 0
            figures.pinned += table.marks[row] & PINNED > 0
            if is_orphan(row):
                figures.orphans += 1
            elif table.parent[row] == NONE:
                figures.roots += 1
            figures.deepest = max(figures.deepest, table.depth[row])
            figures.used_last = max(figures.used_last, table.used[row])
            figures.used_first = min(figures.used_first, table.used[row])
    return stop if stop < len(table) else None


@dataclass
class SegmentFigures:
    """What a walk over a segment's slots has seen."""

    blocks: int = 0
    leased: int = 0
    pinned: int = 0
    doomed: int = 0


def segment_step(store: Store, segment: Segment, start: int, slots_max: int, figures: SegmentFigures) -> int | None:
    """Adds `slots_max` slots from `start`; where to go on, None at the end."""
    table = store.table
    for row in segment.row[start : start + slots_max]:
        if row == NONE:
            continue
        figures.leased += table.leases[row] > 0
        if table.state[row] == DOOMED:
            figures.doomed += 1
            continue
        figures.blocks += 1
        figures.pinned += table.marks[row] & PINNED > 0
    stop = start + slots_max
    return stop if stop < len(segment.row) else None


def time_left(store: Store, row: int, mark: int, now: float) -> float:
    """Seconds until a pin or a life of a block ends; 0 where it has none."""
    return max(store.tree.until.get(row * 4 + mark, now) - now, 0.0)
