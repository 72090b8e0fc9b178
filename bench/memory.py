"""What the daemon itself needs: idle, and for each block it keeps."""

import numpy as np

from bench.measure import Row
from bench.node import Node
from kvstore_client import Client

BLOCKS = 100_000


def rows() -> list[Row]:
    """RssAnon of an idle daemon without a GPU, and what 100,000 blocks of 4 KiB add to it."""
    with Node(host__size="512MiB") as node, Client(node.endpoint) as client:
        ns = client.raw_namespace("bench-memory", 4096)
        idle = client.stats()["daemon"]["rss_anon_bytes"]
        keys = [ns.key(b"%d" % i) for i in range(BLOCKS)]
        blocks = np.zeros((1000, 4096), np.uint8)
        for at in range(0, BLOCKS, 1000):
            assert ns.put(keys[at : at + 1000], blocks).stored == 1000
        stats = client.stats()
        grown = stats["daemon"]["rss_anon_bytes"] - idle
        index = stats["indexes"][0]["size_bytes"]
    return [
        Row("daemon, idle RssAnon", idle / 1e6, 120, False, " MB", f"{idle / 1e6:.0f} MB", "none"),
        Row(
            "daemon, RssAnon per block",
            grown / BLOCKS / 1e3,
            0.3,
            False,
            " kB",
            f"{grown / 1e6:.1f} MB for {BLOCKS} blocks",
            f"the index apart: {index / BLOCKS:.0f} B a block",
        ),
    ]
