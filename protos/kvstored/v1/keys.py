"""How namespaces and blocks are named: the hashes that every client of every language must agree on.

All hashes are BLAKE2b with 32 bytes of digest and a personalisation string (at most 16
bytes) that keeps the three uses apart. Golden vectors: tests/protos/test_keys.py.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence

from kvstored.v1 import KEY_BYTES
from kvstored.v1.errors import InvalidArgument

PERSON_NAMESPACE = b"kvstored.ns.1"
PERSON_TOKENS = b"kvstored.tok.1"
PERSON_NAME = b"kvstored.name.1"
ROOT = bytes(KEY_BYTES)
"""Stands for the parent of the first block of a chain."""


def namespace_digest(identity: Mapping[str, str | int]) -> bytes:
    """32 bytes that name everything which gives a block's bytes their meaning.

    Every field is hashed as `len(name) name type len(value) value` with lengths as
    little-endian u32, type `s` (UTF-8) or `i` (decimal digits), in sorted order of
    names: two different identities cannot serialise to the same bytes.
    """
    h = hashlib.blake2b(digest_size=KEY_BYTES, person=PERSON_NAMESPACE)
    for name in sorted(identity):
        value = identity[name]
        kind, text = (b"i", str(value)) if isinstance(value, int) else (b"s", value)
        for lead, part in ((b"", name.encode()), (kind, text.encode())):
            h.update(lead + struct.pack("<I", len(part)) + part)
    return h.digest()


def token_keys(digest: bytes, tokens: bytes, block_tokens: int) -> list[bytes]:
    """Keys of the full blocks of a token sequence, each chained to the one before.

    `tokens` is the sequence as little-endian i64, 8 bytes a token; what does not fill a
    block at the end has no key. `key[i] = H(digest, key[i-1], tokens of block i)` with
    `key[-1] = ROOT`.
    """
    step = block_tokens * 8
    keys: list[bytes] = []
    previous = ROOT
    for at in range(0, len(tokens) - step + 1, step):
        h = hashlib.blake2b(digest + previous, digest_size=KEY_BYTES, person=PERSON_TOKENS)
        h.update(tokens[at : at + step])
        previous = h.digest()
        keys.append(previous)
    return keys


def name_key(digest: bytes, name: bytes) -> bytes:
    """The key of a block that its engine has already named, for instance by its own block hash."""
    return hashlib.blake2b(digest + name, digest_size=KEY_BYTES, person=PERSON_NAME).digest()


def check_keys(keys: Sequence[bytes]) -> None:
    """Raises InvalidArgument naming the first key that is not 32 bytes of `bytes`."""
    if set(map(type, keys)) <= {bytes} and set(map(len, keys)) <= {KEY_BYTES}:
        return
    for i, key in enumerate(keys):
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            got = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise InvalidArgument(f"key {i} is {got}; a key is {KEY_BYTES} bytes (use Namespace.keys or key)")
