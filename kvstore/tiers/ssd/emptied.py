"""Whether a RocksDB would open as an empty one although it has tables: a manifest that was cut reads as a short one.

RocksDB deletes what its manifest does not name, as soon as it opens. So this looks first, and
opens it so that nothing is written or deleted.
"""

from pathlib import Path

from rocksdict import AccessType, Rdict

from kvstore.tiers.ssd.budget import Budget
from kvstore.tiers.ssd.format import VERSION_KEY
from kvstore.tiers.ssd.options import PAYLOAD_FAMILY, options, payload_options

TABLES = (".sst", ".blob")


def knows_nothing(path: Path, names: list[str], budget: Budget, *, payload: bool) -> bool:
    """Of a closed one with these files. What cannot be opened or read here, opening it says better."""
    if not any(name.endswith(TABLES) for name in names):
        return False
    families = {PAYLOAD_FAMILY: payload_options(budget)} if payload else None
    try:
        opened = Rdict(str(path), options(budget, payload=payload), families, AccessType.read_only(False))
    except Exception:  # noqa: BLE001 (the binding raises bare ones)
        return False
    try:
        return opened.get(VERSION_KEY) is None
    except Exception:  # noqa: BLE001 (the same: a table that is corrupt where that row is)
        return False
    finally:
        opened.close()
