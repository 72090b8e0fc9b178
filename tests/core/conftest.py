"""How hard the core is searched: `KVSTORED_SEARCH=deep` runs far more and longer examples."""

import os

from hypothesis import HealthCheck, Phase, settings

COMMON = settings(
    deadline=None,
    derandomize=False,
    print_blob=True,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)

settings.register_profile("quick", COMMON, max_examples=200, stateful_step_count=150)
settings.register_profile("deep", COMMON, max_examples=2000, stateful_step_count=120)
settings.load_profile(os.environ.get("KVSTORED_SEARCH", "quick"))
