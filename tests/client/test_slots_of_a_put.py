"""A slot goes back by whoever wrote to it, and never under somebody who has it by then.

What is aborted the daemon grants to others: were it another thread's by then, two would write to one slot, and a
block would be acknowledged with bytes of another.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore_client import Client, InvalidArgument, Namespace, local
from kvstore_client.session import Session
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block

BLOCK = 64 << 10
STEP = 4
"""Blocks of one step of a put here."""


@pytest.fixture
def client(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr(local, "COMMIT_BYTES", STEP * BLOCK)
    with Client(daemon.endpoint, name="writer", timeout_s=10.0) as client:
        yield client


@pytest.fixture
def ns(client: Client) -> Namespace:
    return client.raw_namespace("slots", BLOCK)


def session_of(client: Client) -> Session:
    found: Session = client._transport._session  # type: ignore[attr-defined]
    return found


def chain(ns: Namespace, name: str, count: int) -> list[bytes]:
    return [ns.key(f"{name}{i}".encode()) for i in range(count)]


def number_of(ns: Namespace, session: Session) -> int:
    opened = session.call(pb.Request(open_namespace=ns._identity.opening())).open_namespace
    return opened.namespace_id


def commit_of(number: int, keys: list[bytes], slots: list[int]) -> pb.Request:
    return pb.Request(
        commit=pb.CommitRequest(
            namespace_id=number, keys=keys, slots=slots, parents=[b""] * len(keys), depths=[0] * len(keys)
        )
    )


def stored(ns: Namespace, session: Session, slots: list[int]) -> list[int]:
    """What the daemon says to new blocks in these slots, all of which this session must still have."""
    keys = [ns.key(f"in slot {slot}".encode()) for slot in slots]
    (reply,) = session.commit([(commit_of(number_of(ns, session), keys, slots), slots)], BLOCK, reuse=False)
    return list(reply.results)


def put_that_fails_in_its_second_step(ns: Namespace) -> None:
    """Of its first step half exists: those slots are granted ahead again. In the second a key is its own parent."""
    first, second = chain(ns, "first", 2), chain(ns, "second", STEP - 1)
    keys = [*first, *first, *second, second[-1]]
    with pytest.raises(InvalidArgument):
        ns.put(keys, [block(key, BLOCK) for key in keys])


def before_giving_up(session: Session, happens: Callable[[], None]) -> None:
    give_up = session.give_up

    def called(owner: list[int]) -> None:
        happens()
        give_up(owner)

    session.give_up = called  # type: ignore[method-assign]


def test_a_put_that_fails_late_leaves_alone_what_another_thread_has_taken_meanwhile(
    client: Client, ns: Namespace
) -> None:
    ns.put(chain(ns, "warm", 1), [block("warm", BLOCK)])
    session, taken = session_of(client), list[int]()
    before_giving_up(session, lambda: session.take_granted(BLOCK, 64, taken))
    put_that_fails_in_its_second_step(ns)
    assert taken, "there were slots granted ahead to take"
    assert stored(ns, session, taken) == [pb.STORED] * len(taken)


def test_what_a_put_that_fails_late_did_not_settle_goes_back(daemon: RunningDaemon, client: Client) -> None:
    ns = client.raw_namespace("slots", BLOCK)
    put_that_fails_in_its_second_step(ns)
    session = session_of(client)
    eventually(lambda: not len(session.writing), what="the daemon to be told, by whoever has the session")
    session.return_idle_grants(0.0)

    def granted() -> Any:
        (found,) = [one for one in client.stats()["sessions"] if one["client"] == "writer"]
        return found["granted_slots"]

    eventually(lambda: granted() == 0, what="all slots to be back")


def test_what_came_back_through_the_heir_of_a_session_is_not_given_up_by_the_put_that_had_it(
    daemon: RunningDaemon, client: Client, ns: Namespace
) -> None:
    key = chain(ns, "there", 1)
    ns.put(key, [block(key[0], BLOCK)])
    before = Session(str(daemon.socket), "before", "default", 5.0, read_only=False)
    before.open(None, time.monotonic() + 5.0)
    number, owner = number_of(ns, before), list[int]()
    before.reserve(number, 2, owner)
    heir = Session(str(daemon.socket), "before", "default", 5.0, read_only=False)
    heir.open(before, time.monotonic() + 5.0)
    assert heir.hello.resumed
    (reply,) = before.commit([(commit_of(number, key, owner[:1]), owner[:1])], BLOCK, reuse=True)
    assert list(reply.results) == [pb.EXISTS]
    taken: list[int] = []
    heir.take_granted(BLOCK, 1, taken)
    assert taken == owner[:1]
    before.give_up(owner)
    assert stored(ns, heir, taken) == [pb.STORED]
    assert not len(heir.writing)
    heir.leave()


def test_a_slot_that_was_stored_and_granted_again_is_not_given_up_with_the_view_it_had(
    client: Client, ns: Namespace
) -> None:
    """A reservation whose commit was interrupted behind the answer: its hold ends later than its slot is another's."""
    ns.put(chain(ns, "warm", 1), [block("warm", BLOCK)])
    session, own, again = session_of(client), list[int](), list[int]()
    session.reserve(number_of(ns, session), 1, own)
    hold = session.write_hold(own)
    keys = chain(ns, "view", 1)
    session.commit([(commit_of(number_of(ns, session), keys, own), list(own))], BLOCK, reuse=False)
    ns.remove(keys)
    slots = list[int]()
    while own[0] not in again:
        slots.clear()
        session.reserve(number_of(ns, session), 1, slots)
        again += slots
    again = slots
    del hold
    assert stored(ns, session, again) == [pb.STORED]


def test_threads_beside_puts_that_fail_have_their_blocks_byte_for_byte(client: Client, ns: Namespace) -> None:
    wrong: list[str] = []
    ended = threading.Event()

    def beside(number: int) -> None:
        rounds = 0
        while not ended.is_set():
            keys = chain(ns, f"{number}-{rounds}-", 2)
            rounds += 1
            result = ns.put(keys, [block(key, BLOCK) for key in keys])
            if result.error is not None or ns.get(keys) != [block(key, BLOCK) for key in keys]:
                wrong.append(f"{number}-{rounds}: {result}")

    threads = [threading.Thread(target=beside, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for i in range(100):
        first, second = chain(ns, f"f{i}-", 2), chain(ns, f"s{i}-", STEP - 1)
        keys = [*first, *first, *second, second[-1]]
        with pytest.raises(InvalidArgument):
            ns.put(keys, [block(key, BLOCK) for key in keys])
    ended.set()
    for thread in threads:
        thread.join(60)
    assert not wrong
