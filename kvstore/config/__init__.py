"""The daemon's settings: what there is (`settings`), how values are written (`values`), where they come from (`load`).

Rules: nothing unknown passes, nothing wrong passes, and whatever is wrong is reported at
once with its key, value, source and what is allowed. Reading and merging the sources is
left to pydantic-settings.
"""

from kvstore.config.load import Effective, as_written, describe, load
from kvstore.config.settings import Evict, Gpu, Host, Lease, Server, Settings, Ssd

__all__ = ["Effective", "Evict", "Gpu", "Host", "Lease", "Server", "Settings", "Ssd", "as_written", "describe", "load"]
