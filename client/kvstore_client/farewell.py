"""Sees off the session that a closed or dropped client leaves behind, until the daemon knows that it is over.

A session that died (of a time-out, or ended by the daemon) has all its slots and segments
kept from others for as long as this process lives, which for an engine is for ever, unless
the process says what it still uses of them. The client itself can wait for that no longer
than one call; a finalizer cannot at all. So its thread does, after it:

    alive   says that it leaves, as soon as no view uses it any more
    dead    attaches again in its place, then as above; tries for FAREWELL_S, and for as long as nobody listens:
            where memory outlives the daemon the next one keeps what was held, whenever it comes

A view may outlive its client by any time, and so may the thread, which then looks once a
second and nothing else.
"""

import atexit
import logging
import threading
import time
from itertools import chain

from kvstore_client.session import Session, sessions
from kvstore_client.waiting import locked
from kvstored.v1.errors import KVStoreError

log = logging.getLogger("kvstore_client")

FAREWELL_S = 600.0
"""For so long while somebody listens who does not answer; then what it held stays out of use until this process
ends."""

LOOK_S = 1.0
AGAIN_FIRST_S, AGAIN_MAX_S = 0.05, 10.0
"""Between two tries to attach."""

EXIT_S = 0.1
"""For all that a process which ends without `close` has not told of its reads; what is not told by then is lost."""

Arguments = tuple[str, str, str, float, bool]
"""What Session is made with."""


@atexit.register
def tell_last_uses() -> None:
    """What was read since the last message, of clients that nobody closed: hits that would write a block to the SSD."""
    until = time.monotonic() + EXIT_S
    for session in list(sessions):
        if session.dead or session.forked or session.settled:
            continue
        session.timeout_s = max(until - time.monotonic(), 0.0)  # whoever is in a call, and may never end it
        try:
            session.tell(touches=True)
        except (KVStoreError, OSError) as e:
            log.debug("the last reads cannot be told: %s", e)


def see_off(session: Session, arguments: Arguments) -> None:
    """Returns when the session is over and the daemon knows it, or after FAREWELL_S without its answer."""
    pause = threading.Event()
    again_s, give_up_at = AGAIN_FIRST_S, 0.0
    while not session.settled:
        if not session.hung_up():
            session.leave()
            again_s, give_up_at = AGAIN_FIRST_S, 0.0
            if not session.settled:
                pause.wait(LOOK_S)
            continue
        session, away = _heir(session, arguments)
        give_up_at = 0.0 if away else give_up_at or time.monotonic() + FAREWELL_S
        if session.dead and not session.settled:
            if give_up_at and time.monotonic() >= give_up_at:
                log.warning("no answer from unix://%s: what a closed client held stays out of use", arguments[0])
                return
            pause.wait(again_s)
            again_s = min(again_s * 2, AGAIN_MAX_S)


def _heir(session: Session, arguments: Arguments) -> tuple[Session, bool]:
    """A new session in the place of a dead one; where none is to be had, who has what that held.

    And whether that is since nobody listens.
    """
    until = time.monotonic() + arguments[3]
    try:
        unmap_unused(session)
        heir = Session(*arguments)
    except KVStoreError as e:
        log.debug("a closed client cannot attach again to say so: %s", e)
        return session, isinstance(e.__cause__, FileNotFoundError | ConnectionRefusedError)
    try:
        heir.open(session, until)
    except KVStoreError as e:
        log.debug("a closed client did not get to say so: %s", e)
        heir.die(str(e))
        return (heir if heir.hello.nonce else session), False
    return heir, False


def unmap_unused(session: Session) -> None:
    """Of a dead session: lets go of all memory but what views and puts still use.

    A daemon that died gives its memory back only when the last client has unmapped it, and
    the next one may need it to start. Raises Unavailable where a call has the session and does not end.
    """
    assert session.dead, "reads of a live session rely on its mappings"
    with locked(session.lock, session.timeout_s):
        used = {slot >> 32 for slot in chain(session.writing, *session.holds.values())}
        session.mappings = {number: mapping for number, mapping in session.mappings.items() if number in used}
        session.to_populate.clear()
