"""The errors of kvstored, one class for each code on the wire.

    KVStoreError                 something this release has no finer name for (INTERNAL)
    +-- InvalidArgument          the call was wrong and will be wrong again: mend the caller
    +-- FailedPrecondition       right call, wrong state or version: the message says which
    +-- ResourceExhausted        no memory that may be given away now: drop it or try later
    +-- DeadlineExceeded         no answer in time: whether it happened is not known
    +-- Unavailable              the daemon cannot be reached: go on without it
    +-- Unauthenticated          the caller may not do this

A miss is not among them: a block that is not there is a result.
"""

from kvstored.v1 import kvstore_pb2 as pb


class KVStoreError(Exception):
    """Root of all errors; `code` is the number on the wire (the same as gRPC's)."""

    code: int = pb.INTERNAL


class InvalidArgument(KVStoreError):
    """The call itself is wrong: size, length, count or name. The message names what was expected."""

    code = pb.INVALID_ARGUMENT


class FailedPrecondition(KVStoreError):
    """The call does not fit the state of the other side: version, namespace, ended session."""

    code = pb.FAILED_PRECONDITION


class ResourceExhausted(KVStoreError):
    """Everything that could be given is held. Nothing was taken; the call may be repeated later."""

    code = pb.RESOURCE_EXHAUSTED


class DeadlineExceeded(KVStoreError):
    """The other side did not answer in time."""

    code = pb.DEADLINE_EXCEEDED


class Unavailable(KVStoreError):
    """The daemon cannot be reached. Reads miss and puts are rejected until it is back."""

    code = pb.UNAVAILABLE


class Unauthenticated(KVStoreError):
    """The caller has not shown who it is."""

    code = pb.UNAUTHENTICATED


BY_CODE: dict[int, type[KVStoreError]] = {
    kind.code: kind
    for kind in (
        KVStoreError,
        InvalidArgument,
        FailedPrecondition,
        ResourceExhausted,
        DeadlineExceeded,
        Unavailable,
        Unauthenticated,
    )
}


def from_wire(code: int, message: str) -> KVStoreError:
    """The error that a reply carried; an unknown code becomes the root class."""
    return BY_CODE.get(code, KVStoreError)(message)
