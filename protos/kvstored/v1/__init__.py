"""Version 1 of the contract: `kvstore_pb2` (messages), `shm` (shared memory), `errors`, `endpoint`, `keys`.

`PROTOCOL` is what this release speaks; a daemon also accepts clients of `PROTOCOL_OLDEST`
up to `PROTOCOL` and refuses others with FAILED_PRECONDITION naming both sides' versions.
"""

PROTOCOL = 1
PROTOCOL_OLDEST = 1

KEY_BYTES = 32
DIGEST_PREFIX_BYTES_MIN = 4
"""A namespace or key may be named to an administrator by so much of its beginning."""

ADMINISTRATION_CLIENT = "kvstore-cli"
"""The name of clients that administer: their sessions come and go with every command, which is no event to log."""

FRAME_BYTES_MAX = 1 << 20
KEYS_MAX = 4096
CHUNK_BYTES_MAX = 1 << 20
DESCRIPTORS_MAX = 253
"""Linux's SCM_MAX_FD: descriptors that fit into one message."""
