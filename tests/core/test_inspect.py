"""What is counted when somebody looks: against scenes whose figures are known."""

import pytest

from kvstore.core import inspect
from kvstore.core.block import HINTED, PINNED
from kvstore.core.inspect import NamespaceFigures, SegmentFigures
from tests.core.scene import PAGE, Scene, chain, key_of


def namespace_figures(scene: Scene) -> NamespaceFigures:
    figures = NamespaceFigures()
    at: int | None = 0
    while at is not None:
        at = inspect.namespace_step(scene.store, scene.ns, at, 100, figures)
    return figures


def test_a_namespace_is_its_own_blocks_only() -> None:
    scene = Scene(64)
    keys = chain("a", 5)
    scene.put(keys)
    scene.put(chain("b", 2), ns=scene.namespace("other"))
    first = scene.now
    scene.tick()
    scene.commit([key_of("orphan")], scene.reserve(1), after=key_of("missing"), depth=9)
    scene.acquire(keys[:2])
    scene.store.pin(scene.ns, keys[1:4], 60.0, scene.now)
    scene.store.remove(scene.ns, [keys[0]])
    figures = namespace_figures(scene)
    assert (figures.leased, figures.pinned, figures.roots, figures.orphans) == (1, 3, 0, 2)
    assert figures.deepest == 9
    assert (figures.used_first, figures.used_last) == (first, scene.now)


def test_keys_are_found_by_their_beginning_within_one_tenant_a_step_at_a_time() -> None:
    scene = Scene(64)
    alike = [b"like" + bytes([i]) * 28 for i in range(5)]
    scene.put([*alike, *chain("a", 5)])
    stranger = scene.store.tenant("stranger")
    found: dict[bytes, None] = {}
    steps, at = 0, 0
    while (after := inspect.keys_step(scene.tenant, scene.store.table, b"like", at, 3, found)) is not None:
        assert after == at + 3
        steps, at = steps + 1, after
    assert list(found) == alike
    assert steps == (len(scene.store.table) - 1) // 3
    scene.store.remove(scene.ns, alike[1:])
    for tenant, expected in ((scene.tenant, alike[:1]), (stranger, [])):
        again: dict[bytes, None] = {}
        assert inspect.keys_step(tenant, scene.store.table, b"like", 0, 1 << 20, again) is None
        assert list(again) == expected, "neither what went nor what is another tenant's"


def test_few_children_are_walked_and_many_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(64)
    root = key_of("root")
    scene.put([root])
    children = [key_of(f"child {i}") for i in range(30)]
    for child in children:
        scene.commit([child], scene.reserve(1), after=root, depth=1)
    row, table = scene.tenant.rows[root], scene.store.table
    first, count = inspect.first_children(table, row)
    assert {table.key[child] for child in first} == set(children)
    assert count == 30
    monkeypatch.setattr(inspect, "CHILDREN_WALKED", 29)
    monkeypatch.setattr(inspect, "CHILDREN_SHOWN", 8)
    first, count = inspect.first_children(table, row)
    assert (len(first), count) == (8, None)
    assert sum(inspect.children_step(table, row, at, 100) for at in range(0, len(table), 100)) == 30


def test_a_parent_is_told_whether_it_is_here_or_not() -> None:
    scene = Scene(16)
    keys = chain("a", 3)
    scene.put(keys)

    def parent(key: bytes) -> tuple[bytes, bool]:
        return inspect.parent_of(scene.store, scene.tenant.rows[key])

    assert parent(keys[0]) == (b"", False)
    assert parent(keys[2]) == (keys[1], True)
    scene.store.remove(scene.ns, [keys[1]])
    assert parent(keys[2]) == (keys[1], False)


def test_a_block_remembers_when_it_was_stored_whatever_is_done_with_it() -> None:
    scene = Scene(16)
    key = key_of("a")
    scene.put([key])
    at = scene.now
    scene.tick()
    scene.store.touch(scene.tenant, [key], scene.now)
    row, table = scene.tenant.rows[key], scene.store.table
    assert table.stored[row] == pytest.approx(at)
    assert table.used[row] == scene.now
    scene.store.remove(scene.ns, [key])
    scene.tick()
    scene.put([key])
    assert table.stored[scene.tenant.rows[key]] == pytest.approx(scene.now)


def test_a_digest_is_found_by_its_beginning() -> None:
    scene = Scene(16)
    digest = scene.ns.digest
    twin = scene.store.open_namespace(scene.tenant, digest[:8] + bytes(24), PAGE, "twin")
    assert inspect.named(scene.tenant, digest) == [scene.ns]
    assert inspect.named(scene.tenant, digest[:9]) == [scene.ns]
    assert inspect.named(scene.tenant, digest[:8]) == [scene.ns, twin]
    assert inspect.named(scene.tenant, b"no such") == []


def test_a_segment_is_its_slots() -> None:
    scene = Scene(8, 8)
    keys = chain("a", 4)
    scene.put(keys)
    scene.acquire(keys[:2])
    scene.store.pin(scene.ns, keys[2:3], 60.0, scene.now)
    scene.store.remove(scene.ns, keys[:1])
    (segment,) = scene.store.segments.live.values()
    figures = SegmentFigures()
    at: int | None = 0
    while at is not None:
        at = inspect.segment_step(scene.store, segment, at, 3, figures)
    assert figures == SegmentFigures(blocks=3, leased=2, pinned=1, doomed=1)


def test_what_a_pin_and_a_life_have_left() -> None:
    scene = Scene(16)
    key = key_of("a")
    scene.put([key], ttl_s=50.0)
    row = scene.tenant.rows[key]
    assert inspect.time_left(scene.store, row, PINNED, scene.now) == 0
    scene.store.pin(scene.ns, [key], 60.0, scene.now)
    assert inspect.time_left(scene.store, row, PINNED, scene.now + 20) == 40
    assert inspect.time_left(scene.store, row, HINTED, scene.now + 20) == 30
    assert inspect.time_left(scene.store, row, HINTED, scene.now + 70) == 0, "its end is due"
