"""Layered loads of which nobody knows yet whether they came: no other request begins with their blocks meanwhile.

The engine takes the blocks of such a load into its own prefix cache when it schedules the step that loads them, so
that a request of the same step could compute from what never comes. Where a load fails, the engine computes its
blocks anew, perhaps over several steps, and leaves them in its prefix cache until then, or for ever if the request
ends before: `settle` answers which must go.
"""

from collections.abc import Mapping, Sequence

from kvstore_client.connectors.vllm.messages import Load


class Unsure:
    """Those of the step that was scheduled last; there is but one at a time."""

    def __init__(self) -> None:
        self._loads: dict[str, tuple[Load, list[int]]] = {}
        self._names: set[bytes] = set()

    def expect(self, load: Load, table: Sequence[int]) -> None:
        """One that comes with the step being scheduled, which computes into what follows it in the request's table."""
        (run,) = load.runs
        self._loads[load.request] = load, list(table)
        self._names.update(run.hashes)

    def __bool__(self) -> bool:
        return bool(self._loads)

    def __contains__(self, name: bytes) -> bool:
        """Whether the block of this name is one of theirs."""
        return name in self._names

    def settle(self, failed: Mapping[str, tuple[int, ...]]) -> tuple[list[str], set[int]]:
        """At the end of the step: the requests, and the engine's blocks that have something wrong.

        `failed`: how many leading blocks have come, of the loads of which not all did.
        """
        requests, wrong = list(self._loads), set[int]()
        for name, (load, table) in self._loads.items():
            if name in failed:
                (run,), (came,) = load.runs, failed[name]
                wrong.update(table[run.depth + came :])
        self._loads, self._names = {}, set()
        return requests, wrong
