"""Bytes of blocks in a stream: what a `Put` sends and a `Get` answers behind their first message.

Each block is its bytes in chunks, the last of which carries the block's checksum (xxh3-64).
PutChunk and GetChunk number these two fields alike, so one writer and one reader do for both.

Chunks are written and read by hand: protobuf copies the bytes twice more on each side, which
made streams of 2 MiB blocks three times slower. Whatever does not look exactly like that is
protobuf's to parse. The checksum has no message of its own: beside two chunks a block, a
third message took 3 to 17 % of a stream's time.
"""

import struct
from collections.abc import Iterable, Iterator

import xxhash
from google.protobuf.message import DecodeError

from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import InvalidArgument

TIER_METADATA = "kvstored-tier"
"""Trailing metadata of a Get: the number of the slowest tier that a block of it came from; none is memory."""

BUSY_METADATA = "kvstored-busy"
"""Trailing, of a Get that ended early: how many blocks behind are there, and had no room or turn in time. No misses."""

CHUNK_BYTES = 1 << 20
"""What is sent in one message: of 256, 512 and 1024 KiB the fastest, and with other load on the machine by far."""

_DATA_TAG = 0x12
"""Field 2, length-delimited."""

_CHECKSUM = struct.Struct("<BQ")
_CHECKSUM_TAG = 0x19
"""Field 3, 64 bits."""

Chunk = tuple[memoryview, int | None]
"""Bytes, and the checksum of the block that ends with them."""


def block_messages(block: memoryview) -> Iterator[bytes]:
    """The messages of one block, each made when it is asked for.

    Its bytes must not change meanwhile: what was hashed may not be what is sent then, and
    the other side refuses it.
    """
    digest, size = xxhash.xxh3_64(), len(block)
    for at in range(0, size, CHUNK_BYTES):
        piece = block[at : at + CHUNK_BYTES]
        digest.update(piece)
        yield encode(piece, digest.intdigest() if at + CHUNK_BYTES >= size else None)


def block_pieces(
    messages: Iterable[bytes], block_bytes: int, blocks_max: int
) -> Iterator[tuple[int, memoryview, bool]]:
    """Where in its block each piece belongs, its bytes, and whether the block is whole with it and right.

    What came before the last piece of a block is not known to be right yet. A piece is to be
    used, and let go of, before the next is asked for: it is in the cache now, and its memory is
    taken for the next one. Raises InvalidArgument at the first message that does not belong there.
    """
    at, blocks, digest = 0, 0, xxhash.xxh3_64()
    for message in messages:
        data, checksum = decode(message) or _parsed(message)
        end, last = at + len(data), checksum is not None
        if end > block_bytes or blocks == blocks_max:
            raise InvalidArgument(f"more than {blocks_max} blocks of {block_bytes} bytes")
        digest.update(data)
        if last != (end == block_bytes) or (last and checksum != digest.intdigest()):
            raise InvalidArgument("a block is incomplete or does not match its checksum")
        yield at, data, last
        at = end
        if last:
            at, blocks, digest = 0, blocks + 1, xxhash.xxh3_64()
        del message, data


def _parsed(message: bytes) -> Chunk:
    """By protobuf: a chunk that is written in another way."""
    try:
        chunk = pb.GetChunk.FromString(message)
    except DecodeError as e:
        raise InvalidArgument(f"{len(message)} bytes that are not a GetChunk") from e
    if chunk.blocks or not chunk.data:
        raise InvalidArgument("a message without bytes where those of a block were expected")
    return memoryview(chunk.data), chunk.checksum if chunk.HasField("checksum") else None


def encode(data: memoryview, checksum: int | None = None) -> bytes:
    """`PutChunk(data=..., checksum=...)` or the same GetChunk, as protobuf serialises it."""
    head, left = bytearray((_DATA_TAG,)), len(data)
    while left > 0x7F:
        head.append(left & 0x7F | 0x80)
        left >>= 7
    head.append(left)
    return b"".join((head, data) if checksum is None else (head, data, _CHECKSUM.pack(_CHECKSUM_TAG, checksum)))


def decode(message: bytes) -> Chunk | None:
    """What `encode` writes of one byte or more; None for any other message."""
    if len(message) < 2 or message[0] != _DATA_TAG:
        return None
    length, at = 0, 1
    for shift in range(0, 35, 7):
        if at >= len(message):
            return None
        byte = message[at]
        at += 1
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    else:
        return None
    end = at + length
    if not length:
        return None
    if end == len(message):
        return memoryview(message)[at:], None
    if end + _CHECKSUM.size != len(message) or message[end] != _CHECKSUM_TAG:
        return None
    return memoryview(message)[at:end], _CHECKSUM.unpack_from(message, end)[1]
