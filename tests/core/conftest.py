"""How hard the core is searched: `KVSTORED_SEARCH=deep` runs far more and longer examples."""

import os

from hypothesis import HealthCheck, settings

COMMON = {
    "deadline": None,
    "derandomize": False,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
}

settings.register_profile("quick", max_examples=60, stateful_step_count=50, **COMMON)
settings.register_profile("deep", max_examples=2000, stateful_step_count=120, **COMMON)
settings.load_profile(os.environ.get("KVSTORED_SEARCH", "quick"))
