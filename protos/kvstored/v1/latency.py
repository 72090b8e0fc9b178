"""How calls are counted by their time: the same buckets in reports of clients, figures of the daemon and metrics."""

from bisect import bisect_left

BOUNDS_S = (
    10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6,
    1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
"""Upper bounds of the buckets, each inclusive as Prometheus has them; one more bucket holds what took longer."""

BUCKETS = len(BOUNDS_S) + 1


def bucket(seconds: float) -> int:
    """The place of the bucket that a call of this time is counted in."""
    return bisect_left(BOUNDS_S, seconds)
