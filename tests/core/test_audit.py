"""The audit sees every kind of disagreement: each is made by hand here, one at a time."""

from collections.abc import Callable

import pytest

from kvstore.core.block import HINTED, PINNED, State
from kvstore.core.evict import LEAF
from tests.core.scene import Scene, chain, key_of


def busy() -> Scene:
    """A store with one of everything: a chain, a branch, an orphan, leases, pins, grants, quarantine, draining."""
    scene = Scene(64, 4)
    keys = chain("a", 6)
    scene.put(keys, ttl_s=60.0)
    scene.put(keys[:3] + chain("branch", 2))
    scene.commit([key_of("orphan")], scene.reserve(1), after=key_of("missing"), depth=1)
    scene.acquire(keys[:2])
    scene.store.pin(scene.ns, keys[2:4], 60.0, scene.now)
    scene.reserve(2)
    gone = scene.open()
    scene.reserve(1, session=gone)
    scene.store.end_session(gone, process_gone=False)
    doomed = key_of("doomed")
    scene.put([doomed])
    scene.acquire([doomed])
    scene.store.remove(scene.ns, [doomed])
    last = scene.store.segments.live[16]
    last.sessions.add(scene.session.id)
    scene.store.segments.drop(last)
    scene.check()
    return scene


def row(scene: Scene, place: int = 0) -> int:
    return scene.tenant.rows[chain("a", 6)[place]]


def add(what: object, name: str, count: int = 1) -> None:
    setattr(what, name, getattr(what, name) + count)


def column(name: str, place: int, value: int) -> Callable[[Scene], None]:
    def change(scene: Scene) -> None:
        getattr(scene.store.table, name)[row(scene, place)] = value

    return change


def pool_counter(name: str) -> Callable[[Scene], None]:
    return lambda scene: add(scene.store.pool(scene.ns), name)


def no_more(scene: Scene) -> None:
    scene.store.policy.remove(scene.store.pool(scene.ns).order, row(scene, 5))


def no_sessions(scene: Scene) -> None:
    scene.store.segments.draining[16].sessions.clear()


def slot_free_twice(scene: Scene) -> None:
    segment = scene.store.segments.live[1]
    segment.state[0] = 0


def free_row(scene: Scene) -> None:
    scene.store.table.free.append(row(scene))


def stale_pin(scene: Scene) -> None:
    scene.store.tree.untils.clear()


def moved(scene: Scene) -> None:
    place = (scene.tenant.id, chain("a", 6)[0])
    ref, offset, length, namespace = scene.index.published[place]
    scene.index.published[place] = (ref, offset + 4096, length, namespace)


def withdrawn(scene: Scene) -> None:
    del scene.index.published[scene.tenant.id, chain("a", 6)[0]]


def left_behind(scene: Scene) -> None:
    scene.index.published[scene.tenant.id, key_of("ghost")] = (0, 0, 4096, 1)


def lost_key(scene: Scene) -> None:
    del scene.tenant.rows[chain("a", 6)[5]]


def stand_in(scene: Scene) -> int:
    return scene.tenant.missing[key_of("missing")]


def circle(scene: Scene) -> None:
    table = scene.store.table
    table.parent[row(scene, 0)] = row(scene, 5)
    table.child[row(scene, 5)] = row(scene, 0)


def circle_of_siblings(scene: Scene) -> None:
    """Two children of one parent lead to each other, and the list that the parent knows ends before them."""
    more = [key_of(f"sibling {i}") for i in range(2)]
    for key in more:
        scene.commit([key], scene.reserve(1), after=chain("a", 6)[2], depth=3)
    table, (one, other) = scene.store.table, [scene.tenant.rows[key] for key in more]
    first = row(scene, 3)
    for child in table.children(row(scene, 2)):
        table.sibling[child] = table.sibling_before[child] = -1
    table.child[row(scene, 2)] = first
    table.sibling[one] = table.sibling_before[one] = other
    table.sibling[other] = table.sibling_before[other] = one


DAMAGE: dict[str, Callable[[Scene], None]] = {
    "spare": lambda scene: add(scene.store.segments, "spare_bytes", 4096),
    "owned": lambda scene: scene.store.segments.owned.update({0: 1}),
    "owned total": lambda scene: add(scene.store.segments, "_owned_bytes"),
    "draining": no_sessions,
    "silent": lambda scene: scene.store.segments.silent.clear(),
    "unowned": lambda scene: scene.store.segments.unowned.clear(),
    "closed": lambda scene: setattr(scene.store.segments.live[1], "closed", True),
    "held": lambda scene: add(scene.store.segments.live[1], "held"),
    "slot state": slot_free_twice,
    "open": lambda scene: scene.store.pool(scene.ns).open.clear(),
    "slot row": lambda scene: scene.store.segments.live[1].row.__setitem__(0, 5),
    **{f"pool {name}": pool_counter(name) for name in ("slots", "free", "granted", "quarantined", "blocks")},
    **{f"pool {name} too": pool_counter(name) for name in ("doomed", "leased", "pinned")},
    "row state": column("state", 5, State.DOOMED),
    "row key": lambda scene: scene.store.table.key.__setitem__(row(scene, 5), key_of("other")),
    "row place": column("place", 5, 1 << 32),
    "row leases": column("leases", 0, 2),
    "row mark": column("marks", 5, PINNED | HINTED),
    "row not hinted": column("marks", 5, 0),
    "row listed": column("listed", 5, 2),
    "row parent": column("parent", 5, 0),
    "row child": column("child", 5, 0),
    "row sibling": column("sibling", 5, 0),
    "free row": free_row,
    "circle": circle,
    "circle of siblings": circle_of_siblings,
    "list": no_more,
    "list length": lambda scene: add_to(scene.store.pool(scene.ns).order.listed),
    "missing": lambda scene: scene.tenant.missing.clear(),
    "missing key": lambda scene: scene.store.table.key.__setitem__(stand_in(scene), key_of("other")),
    "missing used": lambda scene: scene.store.table.used.__setitem__(stand_in(scene), 1.0),
    "depth": column("depth", 1, 0),
    "unsettled": lambda scene: scene.store.tree.families.unsettled.update({row(scene, 0): row(scene, 5)}),
    "climbs": lambda scene: scene.store.tree.climbs.update({stand_in(scene): None}),
    "namespace": lambda scene: add(scene.ns, "blocks"),
    "keys": lost_key,
    "tenant held": lambda scene: add(scene.tenant, "held_bytes"),
    "session held": lambda scene: add(scene.session, "held_bytes"),
    "session leases": lambda scene: add(scene.session, "leases"),
    "session grants": lambda scene: scene.session.granted_of.clear(),
    "session granted": lambda scene: scene.session.granted.clear(),
    "session leased": lambda scene: scene.session.leased.clear(),
    "until": lambda scene: scene.store.tree.until.clear(),
    "untils": stale_pin,
    "index moved": moved,
    "index lost": withdrawn,
    "index kept": left_behind,
}


def add_to(listed: list[int]) -> None:
    listed[LEAF] += 1


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_seen(damage: str) -> None:
    scene = busy()
    DAMAGE[damage](scene)
    with pytest.raises(AssertionError, match=r".+"):
        scene.check()


def test_without_an_index_the_rest_is_audited() -> None:
    scene = busy()
    scene.index.published.clear()
    scene.store.check()
    scene.ns.blocks += 1
    with pytest.raises(AssertionError, match=r"namespace 1: blocks: kept as \d+, found \d+"):
        scene.store.check()
