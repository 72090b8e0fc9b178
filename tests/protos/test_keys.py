"""How namespaces and blocks are named: golden vectors, and the definition written out a second time.

A change of any digest here is a change of every key in every store: old blocks miss, and
other languages' clients no longer meet ours.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_client import Client, InvalidArgument, Layout
from kvstored.v1 import keys as naming

PLAIN = Layout(model="llama", dtype="bfloat16", num_layers=32, num_kv_heads=8, head_dim=128, block_tokens=256)
FULL = replace(PLAIN, revision="r1", tp_rank=1, tp_size=2, pp_size=2, packing="flash é")

PLAIN_DIGEST = "3d6e2ef246f5af78e60f92423af80b548e62ea266bc639dcced1ef6fc69076cf"
FULL_DIGEST = "1ec4771c496c025e3d0bb956e13f52474fc134b6d2b6bf14f6c5eeea11c911fd"
RAW_DIGEST = "465f5ae8f65455ac7803f58fbb6068b0d7387995f1b7b92f8024ba02e995f4fc"
FIRST_KEYS = [
    "90d552439cd493aed9f14f9545c6f1453efd8db2f48157f2eae2e406b2a0521a",
    "d202d4809c5bc5c31fbbc1bd922d232db110a1f28999221cea7f4ad839433117",
    "450c0bb87a55fbb754829d29fc3577c182e15c7c8984536d289880183f4267b4",
]
"""Of the tokens 0 to 999 in PLAIN, 256 a block."""

ODD_TOKENS = [-1, 0, 1, (1 << 63) - 1, -(1 << 63), 151643] * 4
ODD_KEYS = [
    "aa788ac88cde932a9c2022ac864c658ca03a56666ca2433c899600c8c32898b7",
    "f16a6b03500b5e1ea7f758b9751fd0fd29fdd4ac81f369c8f704e6faf57e537d",
    "0edae4569b7036c2500069166b233dbf8a336a7b39e480c234f609354f7fd166",
]
"""Of ODD_TOKENS under PLAIN's digest, 8 a block."""

NAMES = {
    b"": "5f40437485f84fb21315f2596d01d485557a1df22aa884e256c94ed90e0e6b8a",
    b"name": "d9821516f407c72bdad7cd6547c036453fa4a5873c8fb3419216d8f9c0331cb3",
    b"\x00\xff" * 40: "00077b0437d1d97c137938a5688bba7e261cc5128b85225bd1773bd827c4207b",
}
"""Keys in the raw namespace `bench` of 2 MiB blocks."""

Identity = dict[str, str | int]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Naming blocks needs no daemon."""
    with Client("unix:///nowhere/kvstored.sock") as client:
        yield client


def identity_of(layout: Layout, salt: str = "", adapter: str = "") -> Identity:
    return {**layout.identity(), "kind": "layout", "salt": salt, "adapter": adapter}


def i64(tokens: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes(8, "little", signed=True) for token in tokens)


# -- the definition once more, from its words


def field(text: bytes) -> bytes:
    return len(text).to_bytes(4, "little") + text


def serialised(identity: Mapping[str, str | int]) -> bytes:
    """`len(name) name type len(value) value`, names sorted, lengths little-endian u32, `s` text, `i` digits."""
    whole = b""
    for name, value in sorted(identity.items()):
        kind, text = (b"i", f"{value:d}") if isinstance(value, int) else (b"s", value)
        whole += field(name.encode()) + kind + field(text.encode())
    return whole


def blake(person: str, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32, person=person.encode()).digest()


def chain(digest: bytes, tokens: Sequence[int], block_tokens: int) -> list[str]:
    found: list[str] = []
    before = b"\0" * 32
    for block in range(len(tokens) // block_tokens):
        part = tokens[block * block_tokens : (block + 1) * block_tokens]
        before = blake("kvstored.tok.1", digest + before + i64(part))
        found.append(before.hex())
    return found


# -- golden vectors


@pytest.mark.parametrize(
    ("identity", "digest"),
    [
        (identity_of(PLAIN), PLAIN_DIGEST),
        (identity_of(FULL, salt="s", adapter="lora"), FULL_DIGEST),
        ({"kind": "raw", "name": "bench", "block_bytes": 2 << 20, "salt": ""}, RAW_DIGEST),
    ],
    ids=["plain layout", "full layout", "raw"],
)
def test_the_digest_of_a_namespace_is_what_it_always_was(identity: Identity, digest: str) -> None:
    assert naming.namespace_digest(identity).hex() == digest
    assert blake("kvstored.ns.1", serialised(identity)).hex() == digest


def test_the_sdk_names_namespaces_so(client: Client) -> None:
    assert client.namespace(PLAIN).digest.hex() == PLAIN_DIGEST
    assert client.namespace(FULL, salt="s", adapter="lora").digest.hex() == FULL_DIGEST
    assert client.raw_namespace("bench", block_bytes=2 << 20).digest.hex() == RAW_DIGEST


def test_the_keys_of_tokens_are_what_they_always_were(client: Client) -> None:
    assert [key.hex() for key in client.namespace(PLAIN).keys(range(1000))] == FIRST_KEYS
    assert chain(bytes.fromhex(PLAIN_DIGEST), range(1000), 256) == FIRST_KEYS


def test_the_keys_of_negative_and_huge_tokens_are_what_they_always_were() -> None:
    digest = bytes.fromhex(PLAIN_DIGEST)
    assert [key.hex() for key in naming.token_keys(digest, i64(ODD_TOKENS), 8)] == ODD_KEYS
    assert chain(digest, ODD_TOKENS, 8) == ODD_KEYS


@pytest.mark.parametrize("name", NAMES, ids=["empty", "short", "long"])
def test_the_key_of_a_name_is_what_it_always_was(client: Client, name: bytes) -> None:
    assert client.raw_namespace("bench", block_bytes=2 << 20).key(name).hex() == NAMES[name]
    assert blake("kvstored.name.1", bytes.fromhex(RAW_DIGEST) + name).hex() == NAMES[name]


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_keys_are_the_same_under_every_hash_seed(seed: str) -> None:
    program = (
        "from kvstore_client import Client, Layout\n"
        "layout = Layout(model='llama', dtype='bfloat16', num_layers=32, num_kv_heads=8, head_dim=128,"
        " block_tokens=256)\n"
        "with Client('unix:///nowhere/kvstored.sock') as client:\n"
        "    print(*(key.hex() for key in client.namespace(layout).keys(range(1000))))\n"
        "    print(client.raw_namespace('bench', block_bytes=2 << 20).key(b'name').hex())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == [*FIRST_KEYS, NAMES[b"name"]]


# -- what every spelling of tokens has in common


def test_the_type_of_the_sequence_does_not_change_a_key(client: Client) -> None:
    ns = client.namespace(PLAIN)
    wanted = ns.keys(list(range(600)))
    assert len(wanted) == 2
    for kind in ("int16", "int32", "int64", "uint32", "uint64", ">i4"):
        assert ns.keys(np.arange(600, dtype=kind)) == wanted, kind
    assert ns.keys(tuple(range(600))) == wanted
    assert ns.keys(np.arange(1200)[::2] // 2) == wanted, "a strided array"


def test_a_tensor_of_tokens_has_the_keys_of_its_numbers(client: Client) -> None:
    torch = pytest.importorskip("torch")
    ns = client.namespace(PLAIN)
    for kind in (torch.int32, torch.int64):
        assert ns.keys(torch.arange(600, dtype=kind)) == ns.keys(range(600))


@pytest.mark.parametrize(
    "wrong",
    [[1.0] * 300, np.ones(300, np.float32), ["1"] * 300, [True] * 300, [1 << 63] * 300, [None] * 300, [[1] * 300], 7],
    ids=["floats", "an array of floats", "digits", "truths", "too large", "nothing", "two dimensions", "one number"],
)
def test_what_is_not_a_row_of_whole_numbers_has_no_keys(client: Client, wrong: object) -> None:
    """Numbers that are rounded on the way would give two prompts one key."""
    with pytest.raises(InvalidArgument, match="token ids"):
        client.namespace(PLAIN).keys(wrong)


@pytest.mark.parametrize("tokens", [0, 1, 255], ids=str)
def test_less_than_a_block_has_no_key(client: Client, tokens: int) -> None:
    assert client.namespace(PLAIN).keys(list(range(tokens))) == []


@pytest.mark.parametrize("tokens", [256, 257, 511], ids=str)
def test_what_does_not_fill_a_block_has_no_key(client: Client, tokens: int) -> None:
    assert [key.hex() for key in client.namespace(PLAIN).keys(list(range(tokens)))] == FIRST_KEYS[:1]


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=40), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_a_chain_is_as_its_definition_says(tokens: list[int], block_tokens: int) -> None:
    digest = bytes.fromhex(RAW_DIGEST)
    assert [key.hex() for key in naming.token_keys(digest, i64(tokens), block_tokens)] == chain(
        digest, tokens, block_tokens
    )


# -- no two identities are one

TEXTS = st.text(alphabet=st.sampled_from(["a", "b", "s", "i", "\0", "\1", "1", "é", "\U0001f600"]), max_size=6)
IDENTITIES = st.dictionaries(TEXTS, TEXTS | st.integers(-20, 1 << 40), max_size=4)


@given(IDENTITIES, IDENTITIES)
@settings(max_examples=300, deadline=None)
def test_two_identities_are_the_same_bytes_only_if_they_are_the_same(one: Identity, other: Identity) -> None:
    assert (serialised(one) == serialised(other)) == (one == other)
    assert (naming.namespace_digest(one) == naming.namespace_digest(other)) == (one == other)


@given(IDENTITIES)
@settings(max_examples=100, deadline=None)
def test_a_digest_is_as_its_definition_says_in_any_order_of_fields(identity: Identity) -> None:
    digest = naming.namespace_digest(identity)
    assert digest == blake("kvstored.ns.1", serialised(identity))
    assert digest == naming.namespace_digest(dict(reversed(identity.items())))


def test_what_moves_from_one_field_to_its_neighbour_changes_the_digest() -> None:
    seen: list[Identity] = [
        {"name": "ab", "salt": "c"},
        {"name": "a", "salt": "bc"},
        {"name": "abc", "salt": ""},
        {"name": "", "salt": "abc"},
        {"name": "c", "salt": "ab"},
        {"name": "1", "salt": ""},
        {"name": 1, "salt": ""},
        {"name": "1"},
        {"namesalt": "1"},
    ]
    assert len({naming.namespace_digest(identity) for identity in seen}) == len(seen)


def test_every_field_of_a_layout_is_in_its_identity() -> None:
    assert set(PLAIN.identity()) == {field.name for field in fields(Layout)}


@pytest.mark.parametrize("wrong", [None, b"x", 1.5, ["x"], "\ud800"], ids=repr)
@pytest.mark.parametrize("where", ["salt", "adapter", "model", "revision", "packing", "raw name", "raw salt"])
def test_an_identity_that_is_not_text_is_refused(client: Client, where: str, wrong: str) -> None:
    make: Callable[[], object]
    if where == "raw name":
        make = partial(client.raw_namespace, wrong, block_bytes=1)
    elif where == "raw salt":
        make = partial(client.raw_namespace, "x", block_bytes=1, salt=wrong)
    elif where in ("salt", "adapter"):
        make = partial(client.namespace, PLAIN, **{where: wrong})  # type: ignore[arg-type]
    else:
        make = partial(client.namespace, replace(PLAIN, **{where: wrong}))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="text"):
        make()


def test_the_contract_names_every_field_of_an_identity() -> None:
    """A client in another language that leaves one out gets another digest, and misses for ever."""
    text = (Path(__file__).resolve().parents[2] / "protos" / "README.md").read_text()
    recipe = text[text.index("Fields of a layout:") : text.index("A **key** is 32 bytes")]
    layout = Layout(model="m", dtype="bfloat16", num_layers=1, num_kv_heads=1, head_dim=1, block_tokens=1)
    for name in (*layout.identity(), "kind", "salt", "adapter", "name", "block_bytes"):
        assert f"`{name}`" in recipe, name
