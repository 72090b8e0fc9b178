"""Bytes of blocks in a stream: what a `Put` sends and a `Get` answers behind their first message.

Each block is its bytes in messages that are `data`, then one message that is `checksum`
(xxh3-64 of them). PutChunk and GetChunk number these two fields alike, so one writer and
one reader do for both.

Messages of `data` are written and read by hand: protobuf copies the bytes twice more on
each side, which made streams of 2 MiB blocks three times slower. Whatever does not look
exactly like that is protobuf's to parse.
"""

from collections.abc import Iterable, Iterator

import xxhash
from google.protobuf.message import DecodeError

from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import InvalidArgument

CHUNK_BYTES = 1 << 20
"""What is sent in one message: of 256, 512 and 1024 KiB the fastest, and with other load on the machine by far."""

_DATA_TAG = 0x12
"""Field 2, length-delimited."""


def block_messages(block: memoryview) -> Iterator[bytes]:
    """The messages of one block, each made when it is asked for."""
    digest = xxhash.xxh3_64()
    for at in range(0, len(block), CHUNK_BYTES):
        piece = block[at : at + CHUNK_BYTES]
        message = encode_data(piece)
        # Of the copy, which is in the cache now and can no longer change.
        digest.update(memoryview(message)[-len(piece) :])
        yield message
    yield pb.GetChunk(checksum=digest.intdigest()).SerializeToString()


def whole_blocks(messages: Iterable[bytes], block_bytes: int) -> Iterator[list[memoryview]]:
    """The pieces of each block, once it is complete and matches its checksum.

    Raises InvalidArgument at the first message that does not belong there.
    """
    pieces: list[memoryview] = []
    left, digest = block_bytes, xxhash.xxh3_64()
    for message in messages:
        data = decode_data(message) or _checksum_or_data(message)
        if isinstance(data, int):
            if left or digest.intdigest() != data:
                raise InvalidArgument("a block is incomplete or does not match its checksum")
            yield pieces
            pieces, left, digest = [], block_bytes, xxhash.xxh3_64()
            continue
        left -= len(data)
        if left < 0:
            raise InvalidArgument(f"more than the {block_bytes} bytes of a block without a checksum")
        digest.update(data)
        pieces.append(data)


def _checksum_or_data(message: bytes) -> memoryview | int:
    try:
        chunk = pb.GetChunk.FromString(message)
    except DecodeError as e:
        raise InvalidArgument(f"{len(message)} bytes that are not a GetChunk") from e
    kind = chunk.WhichOneof("part")
    if kind == "checksum":
        return chunk.checksum
    if kind == "data":
        return memoryview(chunk.data)
    raise InvalidArgument(f"{kind or 'nothing'} where bytes of a block or their checksum were expected")


def encode_data(data: memoryview) -> bytes:
    """`PutChunk(data=...)` or `GetChunk(data=...)`, as protobuf serialises it."""
    head, left = bytearray((_DATA_TAG,)), len(data)
    while left > 0x7F:
        head.append(left & 0x7F | 0x80)
        left >>= 7
    head.append(left)
    return b"".join((head, data))


def decode_data(message: bytes) -> memoryview | None:
    """The bytes of a message that is `data` and nothing else; None for any other, or none."""
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
            return memoryview(message)[at:] if length == len(message) - at and length else None
    return None
