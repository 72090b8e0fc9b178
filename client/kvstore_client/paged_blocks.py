"""Pages of an engine's KV cache as `blocks` of a put and `out` of a get_into. Imports nothing of devices."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvstore_client.paged import PagedKV
    from kvstored_cuda.devices.device import Stream


@dataclass(frozen=True, eq=False)
class PagedBlocks:
    """Made by `PagedKV.blocks`: pages for blocks in a row, and the stream that copies run on."""

    kv: "PagedKV"
    pages: NDArray[np.int64]
    """`[blocks, pages_per_slot]`."""
    stream: "Stream"
    layers: range | None
    """Only these are copied; None: all."""

    def __len__(self) -> int:
        """How many blocks."""
        return len(self.pages)
