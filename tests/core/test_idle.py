"""Which conversations are idle: learned from the gaps of their kind."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.idle import ALL, BOUNDS_S, GAPS_MIN, HALVE_AT, Gaps, IdleConversations


def learned(gaps: list[float], tokens: int = 100) -> IdleConversations:
    """Conversations of two turns with these gaps, each from time 0."""
    idle = IdleConversations()
    for number, gap in enumerate(gaps, 1):
        idle.seen(number, tokens, 0.0)
        idle.seen(number, tokens, gap)
    return idle


def test_before_anything_is_known_nothing_is_idle() -> None:
    idle = learned([60.0] * (GAPS_MIN - 1))
    idle.seen(1000, 100, 0.0)
    assert not idle.is_idle(1000, 1e9)
    assert not idle.is_idle(4711, 1e9)


def test_a_conversation_is_idle_when_nine_of_ten_of_its_kind_would_be_back() -> None:
    idle = learned([10.0] * 90 + [1000.0] * 10)
    idle.seen(1000, 100, 2000.0)
    assert not idle.is_idle(1000, 2009.0)
    assert idle.is_idle(1000, 2020.0)
    idle.seen(1000, 100, 2020.0)
    assert not idle.is_idle(1000, 2021.0)


def test_kinds_learn_apart_and_a_rare_one_goes_by_all() -> None:
    idle = IdleConversations()
    for number in range(1, 101):
        idle.seen(number, 10, 0.0)
        idle.seen(number, 10, 5.0)
    for number in range(101, 201):
        idle.seen(number, 1000, 0.0)
        idle.seen(number, 1000, 500.0)
    idle.seen(1000, 10, 1000.0)
    idle.seen(1001, 1000, 1000.0)
    assert idle.is_idle(1000, 1020.0)
    assert not idle.is_idle(1001, 1020.0)
    idle.seen(1002, 100, 1000.0)  # of a kind that nobody has seen come back
    assert not idle.is_idle(1002, 1100.0)
    assert idle.is_idle(1002, 1000.0 + 2 * 500.0)


def test_messages_of_one_request_are_one_turn() -> None:
    idle = IdleConversations()
    for number in range(1, 200):
        for at in (0.0, 0.1, 0.2, 30.0, 30.1):
            idle.seen(number, 100, at)
    assert idle._gaps[ALL].total == 199
    assert idle.usual_s(ALL) >= 30.0 / 2**0.5


@given(st.lists(st.floats(0.3, 5e5), min_size=1, max_size=200))
def test_the_usual_gap_is_the_bucket_of_the_quantile(gaps: list[float]) -> None:
    histogram = Gaps()
    for gap in gaps:
        histogram.add(gap)
    usual = histogram.usual_s()
    below = sum(gap <= usual for gap in gaps)
    assert below >= 0.9 * len(gaps) - 1e-9
    smaller = max((bound for bound in BOUNDS_S if bound < usual), default=0.0)
    assert sum(gap <= smaller for gap in gaps) < 0.9 * len(gaps)


def test_what_is_usual_follows_what_happens() -> None:
    histogram = Gaps()
    for _ in range(HALVE_AT):
        histogram.add(1000.0)
    for _ in range(6 * HALVE_AT):
        histogram.add(1.0)
    assert histogram.usual_s() < 2.0


def test_known_conversations_are_bounded() -> None:
    idle = IdleConversations(known_max=10)
    for number in range(1, 1000):
        idle.seen(number, 0, float(number))
    assert len(idle._known) == 10
