"""What examples of the store's machine are made of: block sizes, chains of keys, and how they are drawn."""

from hypothesis import strategies as st

from tests.core.scene import PAGE, chain

SIZES = {"one": PAGE, "two": 2 * PAGE - 100, "large": 5 * PAGE, "other one": PAGE - 1}
"""Blocks of the first tenant's namespaces; a segment has 4 pages, so the large one does not fit in one."""

CHAINS = {
    "trunk": chain("trunk", 6),
    "branch": chain("trunk", 3) + chain("branch", 4),
    "loose": chain("loose", 6),
}
NAMES = [f"{name} {i}" for name, keys in CHAINS.items() for i in range(len(keys))]
"""What examples are drawn from and printed as; the first three of trunk and branch are the same blocks."""

PARENTS = {key: parent for keys in CHAINS.values() for parent, key in zip([b"", *keys], keys, strict=False)}
DEPTHS = {key: depth for keys in CHAINS.values() for depth, key in enumerate(keys)}
KEYS = list(PARENTS)


def key(name: str) -> bytes:
    chain_name, place = name.split()
    return CHAINS[chain_name][int(place)]


some_names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=6)
runs = st.builds(
    lambda name, start, length: [f"{name} {i}" for i in range(len(CHAINS[name]))][start : start + length],
    st.sampled_from(list(CHAINS)),
    st.integers(0, 3),
    st.integers(1, 7),
)
names = runs | some_names
choice = st.integers(0, 7)
pauses = st.sampled_from([0.0, 0.1, 0.9, 3.0, 20.0])
lives = st.sampled_from([0.0, 0.0, 0.0, 15.0])
subset = st.integers(0, 255)
"""Bits that say which of several things."""
