"""What calls answer and what they may be told besides."""

from dataclasses import dataclass, field
from typing import NamedTuple

from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import InvalidArgument, KVStoreError

TIER_NAMES = {pb.TIER_GPU: "gpu", pb.TIER_HOST: "host", pb.TIER_SSD: "ssd", pb.TIER_REMOTE: "remote"}


class Match(NamedTuple):
    """How many leading blocks are present, and in which tier each is at its fastest.

    A hint: nothing is pinned, and a `get_into` that follows may find fewer.
    """

    blocks: int
    tiers: list[str]


class Copied(NamedTuple):
    """What a transport has read: how many leading blocks, and the slowest tier that one of them came from.

    `busy`: blocks behind them that are there, and had no turn or no room in memory in time.
    """

    blocks: int
    tier: int
    busy: int = 0


class PutResult(NamedTuple):
    """How many blocks were stored, were there already, and could not be stored.

    `error` is the reason of the last rejection: ResourceExhausted or Unavailable. Of a durable put it also says
    why what was stored, or was there, is not all on the SSD.
    """

    stored: int
    existing: int
    rejected: int
    error: KVStoreError | None = None


@dataclass(frozen=True, kw_only=True)
class Hint:
    """What an engine knows about blocks that helps to keep the right ones.

    conversation       what the user of the engine calls a session
    tokens_generated   by the request that these blocks belong to
    priority           higher is kept longer
    ttl_s              drop the blocks after so many seconds; 0 is never

    `ttl_s` takes effect in this release, and `conversation` counts in the figures; the others
    travel to the daemon and wait for an eviction policy that uses them.
    """

    conversation: str = ""
    tokens_generated: int = 0
    priority: int = 0
    ttl_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.ttl_s < float("inf"):
            raise InvalidArgument(f"ttl_s={self.ttl_s!r} is not a number of seconds from 0 (never) up")
        if len(self.conversation.encode()) > 256:
            raise InvalidArgument("a conversation is at most 256 bytes")
        if not 0 <= self.tokens_generated < 1 << 32:
            raise InvalidArgument(f"tokens_generated={self.tokens_generated!r} is not between 0 and 2^32 - 1")
        if not -(1 << 31) <= self.priority < 1 << 31:
            raise InvalidArgument(f"priority={self.priority!r} does not fit 32 bits")

    def message(self) -> pb.Hint:
        return pb.Hint(
            conversation=self.conversation,
            tokens_generated=self.tokens_generated,
            priority=self.priority,
            ttl_s=self.ttl_s,
        )


@dataclass(frozen=True)
class Health:
    """Whether the daemon can be reached and what is wrong with it, if anything."""

    reachable: bool
    healthy: bool
    problems: list[str] = field(default_factory=list)
    version: str = ""
    uptime_s: float = 0.0
