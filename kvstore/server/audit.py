"""What the log says of administration: a line for each thing that was changed, and for whoever was refused.

Who it was is told as the way in tells it: user and process of a session socket, the name of
a token and its tenant over TCP. Never by a token itself, nor a part of it.

Looking changes nothing, so Inspect has a line only when it is refused.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvstore.logs import logger
from kvstored.v1.errors import FailedPrecondition, KVStoreError, Unauthenticated

log = logger("kvstored.admin")

Who = Mapping[str, Any]
"""Fields of a line that say who administers."""

REFUSALS_SAID_S = 60.0
"""Whoever is refused in a loop has one line in this time, with how often it was."""

ORIGINS_MAX = 64
"""Origins of refusals that are told apart; what comes from others meanwhile is counted as one."""


def socket_user(uid: int, pid: int, client: str) -> Who:
    """Who comes by the session socket."""
    return {"uid": uid, "pid": pid, "client": client}


@dataclass
class _Origin:
    """Refusals of one user, token or host since the last line about it."""

    say_at: float = 0.0
    refusals: int = 0


class Refusals:
    """Refused administration, of all edges."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._origins: dict[str, _Origin] = {}

    @contextmanager
    def told(self, call: str, who: Who) -> Iterator[None]:
        """Around the checks of a call: what they refuse is logged, and raised as it was."""
        try:
            yield
        except (Unauthenticated, FailedPrecondition) as e:
            self.note(call, who, e)
            raise

    def note(self, call: str, who: Who, error: KVStoreError) -> None:
        """One call was refused."""
        now, name = self._clock(), _origin(who)
        if name not in self._origins and len(self._origins) >= ORIGINS_MAX:
            self._origins = {key: found for key, found in self._origins.items() if found.say_at > now}
            if len(self._origins) >= ORIGINS_MAX:
                name = ""
        origin = self._origins.setdefault(name, _Origin())
        origin.refusals += 1
        if now < origin.say_at:
            return
        log.warning("administration refused", call=call, **who, reason=str(error), refusals=origin.refusals)
        origin.say_at, origin.refusals = now + REFUSALS_SAID_S, 0


def _origin(who: Who) -> str:
    """What stays the same when somebody tries again, with another process or from another port."""
    if "uid" in who:
        return f"uid {who['uid']}"
    if "token_name" in who:
        return f"token {who['token_name']}"
    return f"peer {str(who.get('peer', '')).rpartition(':')[0]}"
