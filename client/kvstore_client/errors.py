"""The errors of the SDK; the tree and what each asks of the caller stand in kvstored.v1.errors."""

from kvstored.v1.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    KVStoreError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)

__all__ = [
    "DeadlineExceeded",
    "FailedPrecondition",
    "InvalidArgument",
    "KVStoreError",
    "ResourceExhausted",
    "Unauthenticated",
    "Unavailable",
]
