"""Field fault A1: old bytes served to another model, adapter, salt, layout, rank or user.

Seen as sglang issues 33268, 26747 and 24758 and vLLM issue 44250: the key held tokens and a model's
name only. Here the same tokens are looked up with one field of the identity changed at a time.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest

from kvstore_client import Client, Layout
from kvstore_client.namespace import Namespace
from tests.conftest import RunningDaemon
from tests.nodes import block, running

TOKENS = list(range(640))
LAYOUT = Layout(
    model="llama",
    dtype="float16",
    num_layers=2,
    num_kv_heads=4,
    head_dim=8,
    block_tokens=64,
    revision="main",
    tp_rank=0,
    tp_size=2,
    pp_rank=0,
    pp_size=2,
    packing="paged",
)
SALT, ADAPTER = "user-1", "lora-a"

Open = Callable[[Client], Namespace]


def laid_out(salt: str = SALT, adapter: str = ADAPTER, **changed: object) -> Open:
    return lambda client: client.namespace(replace(LAYOUT, **changed), salt=salt, adapter=adapter)  # type: ignore[arg-type]


ONE_FIELD: dict[str, Open] = {
    "model": laid_out(model="llama-2"),
    "model in capitals": laid_out(model="Llama"),
    "dtype of the same size": laid_out(dtype="bfloat16"),
    "dtype of another size": laid_out(dtype="float8_e4m3fn"),
    "layers": laid_out(num_layers=3),
    "heads": laid_out(num_kv_heads=8),
    "head dim": laid_out(head_dim=16),
    "block tokens": laid_out(block_tokens=32),
    "revision": laid_out(revision="abc123"),
    "no revision": laid_out(revision=""),
    "tp rank": laid_out(tp_rank=1),
    "tp size": laid_out(tp_size=4),
    "pp rank": laid_out(pp_rank=1),
    "pp size": laid_out(pp_size=4),
    "packing": laid_out(packing="flash"),
    "no packing": laid_out(packing=""),
    "salt": laid_out(salt="user-2"),
    "no salt": laid_out(salt=""),
    "salt with a space": laid_out(salt="user-1 "),
    "adapter": laid_out(adapter="lora-b"),
    "no adapter": laid_out(adapter=""),
}
SAME_BYTES: dict[str, Open] = {
    "layers and heads swapped": laid_out(num_layers=4, num_kv_heads=2),
    "heads and dim swapped": laid_out(num_kv_heads=8, head_dim=4),
    "half the tokens, twice the layers": laid_out(block_tokens=32, num_layers=4),
    "a byte a number, twice the dim": laid_out(dtype="int8", head_dim=16),
    "both ranks": laid_out(tp_rank=1, pp_rank=1),
    "sizes moved": laid_out(tp_size=4, pp_size=1),
    "salt and adapter swapped": laid_out(salt=ADAPTER, adapter=SALT),
    "the adapter in the salt": laid_out(salt=SALT + ADAPTER, adapter=""),
    "the salt in the packing": laid_out(salt="", packing="paged" + SALT),
    "the revision in the name": laid_out(model="llamamain", revision=""),
    "opaque blocks of that name": lambda client: client.raw_namespace("llama", LAYOUT.block_bytes, salt=SALT),
}


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    with running(server__grpc="127.0.0.1:0") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def stored(node: RunningDaemon) -> Iterator[list[bytes]]:
    """The blocks of TOKENS as LAYOUT, SALT and ADAPTER mean them."""
    blocks = [block(f"kv {i}", LAYOUT.block_bytes) for i in range(10)]
    with Client(node.endpoint, name="writer") as client:
        ns = laid_out()(client)
        result = ns.put(ns.keys(TOKENS), blocks)
        assert (result.stored, result.rejected) == (10, 0)
        yield blocks


def nothing_found(ns: Namespace, keys: list[bytes]) -> None:
    assert keys
    assert ns.match(keys).blocks == 0
    out = np.full(len(keys) * ns.block_bytes, 7, np.uint8)
    assert ns.get_into(keys, out) == 0
    assert (out == 7).all()
    assert ns.get(keys) == []
    assert ns.prefetch(keys).wait() == 0
    with ns.acquire(keys) as lease:
        assert len(lease) == 0
        assert lease.views == []


def everything_found(client: Client, stored: list[bytes]) -> None:
    ns = laid_out()(client)
    assert ns.get(ns.keys(TOKENS)) == stored


def test_every_field_of_a_layout_is_varied_here() -> None:
    for field in fields(Layout):
        short = field.name.removeprefix("num_").replace("kv_", "").replace("_", " ")
        assert any(short in name for name in ONE_FIELD), field.name
    with Client("unix:///nowhere/kvstored.sock") as client:
        digests = [make(client).digest for make in (laid_out(), *ONE_FIELD.values(), *SAME_BYTES.values())]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("session", ["the same session", "another session", "gRPC"])
@pytest.mark.parametrize("changed", [*ONE_FIELD, *SAME_BYTES])
def test_tokens_miss_under_another_identity(
    node: RunningDaemon, stored: list[bytes], changed: str, session: str
) -> None:
    make = (ONE_FIELD | SAME_BYTES)[changed]
    with Client(node.grpc_endpoint if session == "gRPC" else node.endpoint, name="reader") as client:
        if session == "the same session":
            everything_found(client, stored)
        ns = make(client)
        keys = (
            ns.keys(TOKENS) if "opaque" not in changed else [ns.key(bytes(k)) for k in laid_out()(client).keys(TOKENS)]
        )
        nothing_found(ns, keys)
        everything_found(client, stored)


@pytest.mark.parametrize("changed", SAME_BYTES)
def test_each_identity_keeps_its_own_bytes(node: RunningDaemon, stored: list[bytes], changed: str) -> None:
    """Blocks of equal size under two identities live side by side."""
    with Client(node.endpoint, name="both") as client:
        ns = SAME_BYTES[changed](client)
        keys = [ns.key(b"%d" % i) for i in range(10)] if "opaque" in changed else ns.keys(TOKENS)
        mine = [block((changed, i), LAYOUT.block_bytes) for i in range(len(keys))]
        assert ns.put(keys, mine).stored == len(keys)
        assert ns.get(keys) == mine
        everything_found(client, stored)
        assert ns.clear() == len(keys)
        everything_found(client, stored)


@pytest.mark.parametrize("changed", ["first token", "one token", "last token", "order", "shifted by a token"])
def test_other_tokens_miss_from_where_they_differ(node: RunningDaemon, stored: list[bytes], changed: str) -> None:
    tokens = list(TOKENS)
    at = {"first token": 0, "one token": 200, "last token": 639, "order": 130, "shifted by a token": 0}[changed]
    if changed == "order":
        tokens[130], tokens[131] = tokens[131], tokens[130]
    elif changed == "shifted by a token":
        tokens = [-1, *tokens[:-1]]
    else:
        tokens[at] += 1
    with Client(node.endpoint, name="reader") as client:
        ns = laid_out()(client)
        keys = ns.keys(tokens)
        assert ns.match(keys).blocks == at // LAYOUT.block_tokens
        assert ns.get(keys) == stored[: at // LAYOUT.block_tokens]
        # The same tokens behind another beginning are another block.
        nothing_found(ns, keys[at // LAYOUT.block_tokens :])


@pytest.mark.parametrize("changed", [partial(laid_out), ONE_FIELD["no salt"]], ids=["nothing else", "and no salt"])
def test_another_tenant_finds_nothing(node: RunningDaemon, stored: list[bytes], changed: Callable[..., object]) -> None:
    with Client(node.endpoint, tenant="somebody-else") as client:
        ns = laid_out()(client)
        keys = ns.keys(TOKENS)
        nothing_found(ns, keys)
        theirs = [block(f"theirs {i}", LAYOUT.block_bytes) for i in range(10)]
        assert ns.put(keys, theirs).stored == 10
        assert ns.get(keys) == theirs
        with Client(node.endpoint) as mine:
            everything_found(mine, stored)
        assert ns.remove(keys) == 10
    with Client(node.endpoint) as mine:
        everything_found(mine, stored)


@pytest.mark.parametrize("seed", ["0", "4711"])
def test_another_process_with_the_same_identity_finds_all(node: RunningDaemon, stored: list[bytes], seed: str) -> None:
    program = (
        "import hashlib, sys\n"
        "from kvstore_client import Client\n"
        "from tests.faults.test_wrong_kv import TOKENS, laid_out\n"
        "with Client(sys.argv[1]) as client:\n"
        "    ns = laid_out()(client)\n"
        "    print(hashlib.sha256(b''.join(ns.get(ns.keys(TOKENS)))).hexdigest())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, node.endpoint],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == hashlib.sha256(b"".join(stored)).hexdigest()


def test_the_same_name_with_another_block_size_is_another_namespace(node: RunningDaemon) -> None:
    with Client(node.endpoint) as client:
        small, large = client.raw_namespace("blocks", 4096), client.raw_namespace("blocks", 8192)
        assert small.digest != large.digest
        assert small.put([small.key(b"x")], block("small", 4096)).stored == 1
        nothing_found(large, [large.key(b"x")])
        # Even the key of the other one, given on purpose, is no block of this size.
        nothing_found(large, [small.key(b"x")])
        assert large.put([large.key(b"x")], block("large", 8192)).stored == 1
        assert small.get([small.key(b"x")]) == [block("small", 4096)]
        assert large.get([large.key(b"x")]) == [block("large", 8192)]
