"""Namespaces make room: whose numbers go to others, whose do not, and that a stale number finds nothing."""

import pytest

from kvstore.core import holds
from kvstore.core.spaces import IDLE_S, LOOK_S, NOBODY
from kvstored.v1.errors import FailedPrecondition, ResourceExhausted
from tests.core.scene import PAGE, Scene, chain, key_of

LIMIT = 6


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    """With room for five namespaces besides its own, of which none is kept by another tier."""
    monkeypatch.setattr(holds, "NAMESPACES_MAX", LIMIT)
    made = Scene(64)
    made.store.spaces.kept = lambda namespace: False
    made.store.expire(made.now)
    made.put(chain("block", 2))
    return made


def later(scene: Scene, seconds: float) -> None:
    scene.store.expire(scene.tick(seconds))


def filled(scene: Scene) -> list[int]:
    """All numbers are taken."""
    return [scene.namespace(f"ns {i}").id for i in range(LIMIT - 1)]


def test_an_empty_namespace_that_nobody_uses_makes_room_after_an_hour(scene: Scene) -> None:
    numbers = filled(scene)
    later(scene, IDLE_S - 1)
    with pytest.raises(ResourceExhausted, match="6 namespaces exist already, all with blocks or used within 3600 s"):
        scene.namespace("new")
    later(scene, LOOK_S + 1)
    new = [scene.namespace(f"new {i}") for i in range(LIMIT - 1)]
    assert [space.id for space in new] == numbers
    assert len(scene.store.namespaces) == LIMIT
    with pytest.raises(ResourceExhausted):
        scene.namespace("one too many")
    scene.check()
    assert scene.put(chain("in a new one", 3), ns=new[2]) == 3
    scene.check()


def test_what_has_blocks_or_is_used_or_is_kept_elsewhere_stays(scene: Scene) -> None:
    names = ["blocks", "used", "kept", "leased", "idle"]
    of = {name: scene.namespace(name) for name in names}
    scene.put(chain("b", 1), ns=of["blocks"])
    keys = chain("l", 1)
    scene.put(keys, ns=of["leased"])
    (slot,) = scene.store.acquire(scene.session, of["leased"], keys, scene.now)
    scene.store.remove(of["leased"], keys)  # a doomed block: none, and its row is there
    scene.store.spaces.kept = lambda namespace: namespace is of["kept"]
    later(scene, IDLE_S + 1)
    assert scene.store.namespace(scene.tenant, of["used"].id) is of["used"]
    assert scene.namespace("new").id == of["idle"].id
    for name in names[:-1]:
        assert scene.namespace(name) is of[name]
    with pytest.raises(ResourceExhausted):
        scene.namespace("idle")
    scene.check()
    scene.store.release(scene.session, [slot])
    later(scene, IDLE_S + 1)
    assert scene.namespace("idle").id in {of["leased"].id, of["used"].id}
    scene.check()


def test_a_number_that_was_given_up_is_refused_and_another_tenants_is_not_reached(scene: Scene) -> None:
    old = filled(scene)[0]
    other = scene.store.tenant("other")
    later(scene, IDLE_S + 1)
    found = scene.namespace("theirs", tenant=other)
    assert found.id == old
    for number in range(old, LIMIT + 1):
        with pytest.raises(FailedPrecondition, match="open it first"):
            scene.store.namespace(scene.tenant, number)
    assert scene.store.namespaces[old].tenant is NOBODY
    again = scene.namespace("ns 0")
    assert again.id != old
    scene.check()


def test_opening_again_keeps_a_namespace(scene: Scene) -> None:
    filled(scene)
    later(scene, IDLE_S - 10)
    assert scene.namespace("ns 3").blocks == 0
    later(scene, 20)
    kept = scene.namespace("ns 3")
    new = {scene.namespace(f"new {i}").id for i in range(LIMIT - 2)}
    assert kept.id not in new


def test_blocks_of_a_digest_that_comes_back_under_another_number_are_its_own(scene: Scene) -> None:
    filled(scene)
    later(scene, IDLE_S + 1)
    scene.namespace("x", 2 * PAGE)
    back = scene.namespace("ns 0")
    keys = [key_of("ns 0 block")]
    assert scene.put(keys, ns=back) == 1
    assert scene.store.match(back, keys) != []
    assert scene.store.match(scene.ns, keys) == []
    scene.check()
