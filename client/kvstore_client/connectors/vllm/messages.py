"""What the connector's two sides tell each other, once a step. Both ways it may travel between processes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


class Space(NamedTuple):
    """Whose blocks, besides the model's: what gives the namespaces of one request their names.

    `era` is of one engine's after a reset of its cache, "" before: what it stores from then on is found
    by nobody else, and it finds nothing older.
    """

    adapter: str = ""
    salt: str = ""
    era: str = ""


class Run(NamedTuple):
    """Consecutive blocks of one group in one request.

    `hashes[i]` names what the engine's block `blocks[i]` has; before the first one, in its chain, come
    `depth` others, the last of which is `parent`.
    """

    group: int
    depth: int
    parent: bytes
    hashes: Sequence[bytes]
    blocks: Sequence[int]


class Load(NamedTuple):
    """Fill the engine's blocks. The request waits until it is told that this has ended; `layered`: the step does."""

    request: str
    prompt_tokens: int
    space: Space
    runs: Sequence[Run]
    layered: bool = False


class Save(NamedTuple):
    """Store the engine's blocks, which are pinned until every rank has reported `job`."""

    job: int
    request: str
    prompt_tokens: int
    space: Space
    runs: Sequence[Run]
    conversation: str
    tokens_generated: int


@dataclass
class Orders(KVConnectorMetadata):  # type: ignore[misc]
    """To the workers, with a step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    computing: bool = True
    """Whether the step computes anything: one that does not may wait a moment for what is under way."""


class Stored(NamedTuple):
    """What became of a save.

    ranks      how many have ended it
    blocks     of each run: how many leading blocks all of them have stored
    existing   of each run: how many leading blocks some of them had stored before
    """

    ranks: int
    blocks: tuple[int, ...]
    existing: tuple[int, ...]


@dataclass
class Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """To the scheduler, after a step; those of several ranks are added up on the way."""

    saves: dict[int, Stored] = field(default_factory=dict)
    failed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Loads that failed: how many leading blocks of each run are there nevertheless, on all ranks."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Report":
        assert isinstance(other, Report)
        for job, stored in other.saves.items():
            before = self.saves.get(job)
            if before is not None:
                blocks = tuple(map(min, before.blocks, stored.blocks))
                existing = tuple(map(max, before.existing, stored.existing))
                stored = Stored(before.ranks + stored.ranks, blocks, existing)
            self.saves[job] = stored
        for request, loaded in other.failed.items():
            self.failed[request] = tuple(map(min, self.failed.get(request, loaded), loaded))
        return self
