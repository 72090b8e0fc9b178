"""Conversations seen, and evicted while alive: against plain sets, and through a store."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.conversations import KNOWN_MAX, NOBODY, Conversations
from kvstore.core.counts import Counts
from tests.core.scene import Scene, chain, key_of

NAMES = [(tenant, name) for tenant in ("a", "b") for name in ("", "one", "two", "three", "four")]
STEPS = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 9), st.sampled_from(NAMES)),
    st.tuples(st.just("evict"), st.integers(0, 9), st.none()),
)


@given(st.lists(STEPS, max_size=60), st.integers(1, 5), st.integers(3, 12))
def test_counts_are_those_of_plain_sets(
    steps: list[tuple[str, int, tuple[str, str]]], known: int, numbers: int
) -> None:
    """Ten blocks; few numbers, so that they run out again and again, and few conversations known at once."""
    counts, rows, was_given = Counts(), [NOBODY] * 10, 0

    def forget_rows() -> None:
        nonlocal was_given
        rows[:] = [NOBODY] * 10
        was_given = 0
        alive.clear()
        owner[:] = [None] * 10

    conversations = Conversations(counts, forget_rows, known, numbers)
    alive: OrderedDict[tuple[str, str], bool] = OrderedDict()
    owner: list[tuple[str, str] | None] = [None] * 10
    """Model: the conversation of each block, and whether one of those known has lost a block."""
    seen = back = 0
    for what, block, name in steps:
        if what == "put":
            rows[block] = conversations.seen(*name)
            owner[block] = name if name[1] else None
            if name[1]:
                if name in alive:
                    back += alive[name]
                else:
                    seen, was_given = seen + 1, was_given + 1
                    while len(alive) >= known:
                        gone, _ = alive.popitem(last=False)
                        owner[:] = [None if of == gone else of for of in owner]
                    owner[block] = name
                alive[name] = False
                alive.move_to_end(name)
        else:
            conversations.evicted(rows[block])
            if owner[block] is not None:
                alive[owner[block]] = True  # type: ignore[index]
            rows[block], owner[block] = NOBODY, None
        conversations.check()
        assert was_given <= numbers
        assert (counts.conversations, counts.conversations_evicted) == (seen, back)


def test_a_conversation_that_comes_back_after_eviction_counts_once() -> None:
    scene = Scene(slots=8)
    store, counts = scene.store, scene.store.counts
    put(scene, "mine", "chat")
    crowd_out(scene, "mine")
    assert (counts.conversations, counts.conversations_evicted) == (1, 0), "it has not come back yet"
    put(scene, "mine again", "chat")
    put(scene, "and again", "chat")
    assert (counts.conversations, counts.conversations_evicted) == (1, 1)
    crowd_out(scene, "mine again")
    store.touch(scene.tenant, [key_of("and again")], scene.now, "chat")
    assert counts.conversations_evicted == 2, "a touch brings it back as a put does"
    scene.check()


def test_only_eviction_for_room_is_counted() -> None:
    scene = Scene(slots=8)
    store, counts = scene.store, scene.store.counts
    for i in range(3):
        put(scene, f"{i}", f"chat {i}", ttl_s=5.0 if i == 2 else 0.0)
    store.remove(scene.ns, [key_of("0")])
    store.clear_step(scene.ns, 0, 1 << 20)
    put(scene, "expires", "chat 2", ttl_s=5.0)
    store.expire(scene.tick(10.0))
    assert not scene.present(key_of("expires"))
    for i in range(3):
        put(scene, f"again {i}", f"chat {i}")
    assert (counts.conversations, counts.conversations_evicted) == (3, 0)


def test_a_row_that_is_used_again_is_not_of_the_conversation_before() -> None:
    scene = Scene(slots=8)
    put(scene, "mine", "chat")
    scene.store.remove(scene.ns, [key_of("mine")])
    put(scene, "nobody's", "")
    crowd_out(scene, "nobody's")
    put(scene, "back", "chat")
    assert scene.store.counts.conversations_evicted == 0


def test_a_block_is_of_the_conversation_that_last_stored_it() -> None:
    scene = Scene(slots=8)
    put(scene, "shared", "first")
    put(scene, "shared", "second")
    crowd_out(scene, "shared")
    put(scene, "a", "first")
    assert scene.store.counts.conversations_evicted == 0
    put(scene, "b", "second")
    assert scene.store.counts.conversations_evicted == 1


def test_tenants_have_conversations_of_their_own() -> None:
    counts = Counts()
    conversations = Conversations(counts, lambda: None)
    assert len({conversations.seen(tenant, "chat") for tenant in ("a", "b", "a")}) == 2
    assert conversations.seen("a", "") == NOBODY
    assert counts.conversations == 2


def test_when_numbers_run_out_no_row_keeps_an_old_one() -> None:
    scene = Scene(slots=8)
    store = scene.store
    store.conversations._numbers_max = 2
    for name in ("one", "two"):
        put(scene, name, name)
    put(scene, "three", "three")
    store.conversations.check()
    assert sorted(store.table.conversation)[-2:] == [0, 1], "only the block of the third has a number"
    crowd_out(scene, "three")
    for name in ("one", "two", "three"):
        put(scene, f"again {name}", name)
    assert store.counts.conversations_evicted <= 1, "blocks of the first two are nobody's"


def test_the_table_is_bounded() -> None:
    conversations = Conversations(Counts(), lambda: None)
    for i in range(KNOWN_MAX + 100):
        conversations.seen("default", f"{i}")
    conversations.check()
    assert len(conversations._known) == KNOWN_MAX


def test_a_chain_that_loses_several_blocks_counts_once() -> None:
    scene = Scene(slots=8)
    keys = chain("long", 2)
    slots = scene.reserve(2)
    scene.store.commit(scene.session, scene.ns, keys, slots, [b"", keys[0]], [0, 1], scene.now, 0.0, "chat")
    crowd_out(scene, "long/0")
    assert scene.here(keys) == []
    put(scene, "back", "chat")
    assert scene.store.counts.conversations_evicted == 1


def crowd_out(scene: Scene, name: str) -> None:
    """Stores others until this block was evicted."""
    while scene.present(key_of(name)):
        scene.fill(name=f"after {scene.tick()}")


def put(scene: Scene, name: str, conversation: str, ttl_s: float = 0.0) -> None:
    """One root block, stored or found to exist, for a conversation."""
    keys = [key_of(name)]
    slots = scene.reserve()
    results = scene.store.commit(scene.session, scene.ns, keys, slots, [b""], [0], scene.tick(), ttl_s, conversation)
    if results[0] != 0:
        scene.store.abort(scene.session, slots)
