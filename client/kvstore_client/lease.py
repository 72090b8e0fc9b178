"""Slots in a caller's hands: leased blocks to read in place, reserved slots to write in place.

Views export from an object made for their hold alone, which refers to it. A numpy array
or tensor made from a view keeps both alive, so the daemon is told only when the last user
of the bytes is gone, whatever became of the lease or the `with` block.
"""

import warnings
from collections.abc import Callable, Sequence
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvstore_client.chain import checked_count, checked_keys
from kvstore_client.reads import HOST
from kvstore_client.results import Hint, PutResult
from kvstored.v1.errors import FailedPrecondition, InvalidArgument, ResourceExhausted


class Hold:
    """Slots that this process uses; ends when the last reference to it is gone.

    Every view of a slot refers to its hold, and the hold to nothing but numbers.
    """

    __slots__ = ("__weakref__",)


class Lease:
    """Leading blocks, held in memory and readable in place until released."""

    def __init__(self, make_views: Callable[[], list[memoryview]], count: int, tier: int = HOST, busy: int = 0) -> None:
        """`make_views()` makes one view a block; each keeps the hold alive. `tier`: the slowest they came from.

        `busy`: blocks behind them that are there, and had no turn or no room in time.
        """
        self.tier = tier
        self.busy = busy
        self._make_views: Callable[[], list[memoryview]] | None = make_views
        self._views: list[memoryview] | None = None
        self._count = count

    def __len__(self) -> int:
        """How many blocks are held."""
        return self._count

    @property
    def views(self) -> list[memoryview]:
        """One read-only memoryview a block, without a copy. They stay valid while they live.

        Also where the daemon has gone since: what it held for this process stays as it was.
        """
        if self._views is None:
            if self._make_views is None:
                raise FailedPrecondition("the lease was released")
            self._views = self._make_views()
        return self._views

    def numpy(self, i: int, dtype: DTypeLike = np.uint8) -> NDArray[Any]:
        """Block `i` as a read-only array of `dtype`, one dimension, without a copy."""
        return np.frombuffer(self.views[i], dtype)

    def torch(self, i: int, dtype: Any = None) -> Any:
        """Block `i` as a CPU tensor of `dtype` (default uint8), without a copy.

        torch knows no read-only tensors: writing to this one would change the block for
        everybody. Copy it before you change it.
        """
        import torch

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self.views[i], dtype=dtype or torch.uint8)

    def release(self) -> None:
        """Lets go. What was made from the views keeps its block until it is gone itself.

        Never raises: a daemon that is away hears of it when this process attaches again, or ends.
        """
        self._make_views = None
        self._views = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Slots:
    """Reserved slots to fill in place: `views`, then `commit`. Leaving the `with` block without it aborts."""

    def __init__(
        self,
        views: list[memoryview],
        commit: Callable[[Sequence[bytes], int, Hint | None, bool], PutResult],
    ) -> None:
        self._views: list[memoryview] | None = views
        self._commit = commit
        self._count = len(views)
        self.on_commit: Callable[[int, int, float], None] = lambda stored, asked, began: None
        """Told what came of a commit: blocks stored or found to exist, blocks named, when it began."""

    def __len__(self) -> int:
        return self._count

    @property
    def views(self) -> list[memoryview]:
        """One writable memoryview a slot; of no use after commit or abort."""
        if self._views is None:
            raise FailedPrecondition("the slots were committed or aborted")
        return self._views

    def commit(
        self, keys: Sequence[bytes], start: int = 0, *, hint: Hint | None = None, durable: bool = False
    ) -> PutResult:
        """Makes slot i visible as keys[start + i]; `keys` is the chain from its root, so that parents are known.

        All writing must be done: arrays made from the views must not be written to from
        here on. Slots without a key are given back. Raises Unavailable where the daemon is away: what
        was written is lost then; FailedPrecondition where another one has come meanwhile that took
        the memory over; ResourceExhausted.
        """
        began = perf_counter()
        count = checked_count(checked_keys(keys), start)
        if self._views is None:
            raise FailedPrecondition("the slots were committed or aborted")
        if not 1 <= count <= self._count:
            raise InvalidArgument(f"{count} keys from start={start} for {self._count} slots")
        try:
            result = self._commit(keys, start, hint, durable)
        except ResourceExhausted:
            self.on_commit(0, count, began)
            raise
        finally:
            self.abort()
        self.on_commit(result.stored + result.existing, count, began)
        return result

    def abort(self) -> None:
        """Gives back what was not committed, as soon as nothing made from the views is alive."""
        if self._views is not None:
            for view in self._views:
                try:
                    view.release()
                except BufferError:
                    continue  # an array made from it lives: its slot goes back with that array
            self._views = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
