from kvstored.v1 import stats_pb2 as _stats_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CommitResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STORED: _ClassVar[CommitResult]
    EXISTS: _ClassVar[CommitResult]
    REJECTED: _ClassVar[CommitResult]

class TicketState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TICKET_NONE: _ClassVar[TicketState]
    TICKET_RUNNING: _ClassVar[TicketState]
    TICKET_DONE: _ClassVar[TicketState]
    TICKET_FAILED: _ClassVar[TicketState]
    TICKET_CANCELLED: _ClassVar[TicketState]
STORED: CommitResult
EXISTS: CommitResult
REJECTED: CommitResult
TICKET_NONE: TicketState
TICKET_RUNNING: TicketState
TICKET_DONE: TicketState
TICKET_FAILED: TicketState
TICKET_CANCELLED: TicketState

class Hint(_message.Message):
    __slots__ = ("conversation", "tokens_generated", "priority", "ttl_s")
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    conversation: str
    tokens_generated: int
    priority: int
    ttl_s: float
    def __init__(self, conversation: _Optional[str] = ..., tokens_generated: _Optional[int] = ..., priority: _Optional[int] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("namespace_id", "count")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    count: int
    def __init__(self, namespace_id: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("slots",)
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slots: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "slots", "parents", "depths", "hint", "want", "durable")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    DEPTHS_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    slots: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[bytes]
    depths: _containers.RepeatedScalarFieldContainer[int]
    hint: Hint
    want: int
    durable: bool
    def __init__(self, namespace_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., slots: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[bytes]] = ..., depths: _Optional[_Iterable[int]] = ..., hint: _Optional[_Union[Hint, _Mapping]] = ..., want: _Optional[int] = ..., durable: bool = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("results", "slots", "ticket", "not_durable")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    NOT_DURABLE_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedScalarFieldContainer[CommitResult]
    slots: _containers.RepeatedScalarFieldContainer[int]
    ticket: int
    not_durable: str
    def __init__(self, results: _Optional[_Iterable[_Union[CommitResult, str]]] = ..., slots: _Optional[_Iterable[int]] = ..., ticket: _Optional[int] = ..., not_durable: _Optional[str] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("slots", "all", "keep")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    all: bool
    keep: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slots: _Optional[_Iterable[int]] = ..., all: bool = ..., keep: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "tier")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    tier: _stats_pb2.Tier
    def __init__(self, namespace_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., tier: _Optional[_Union[_stats_pb2.Tier, str]] = ...) -> None: ...

class MatchReply(_message.Message):
    __slots__ = ("blocks", "tiers")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    tiers: _containers.RepeatedScalarFieldContainer[_stats_pb2.Tier]
    def __init__(self, blocks: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[_stats_pb2.Tier, str]]] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("namespace_id", "keys")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, namespace_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class AcquireReply(_message.Message):
    __slots__ = ("slots",)
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slots: _Optional[_Iterable[int]] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "deadline_ms", "wait_ms", "ticket", "give_up")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    GIVE_UP_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    deadline_ms: int
    wait_ms: int
    ticket: int
    give_up: bool
    def __init__(self, namespace_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., deadline_ms: _Optional[int] = ..., wait_ms: _Optional[int] = ..., ticket: _Optional[int] = ..., give_up: bool = ...) -> None: ...

class LoadReply(_message.Message):
    __slots__ = ("ticket", "slots", "why", "loaded", "busy")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    why: str
    loaded: int
    busy: bool
    def __init__(self, ticket: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., why: _Optional[str] = ..., loaded: _Optional[int] = ..., busy: bool = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "deadline_ms", "priority")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    deadline_ms: int
    priority: int
    def __init__(self, namespace_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., deadline_ms: _Optional[int] = ..., priority: _Optional[int] = ...) -> None: ...

class PrefetchReply(_message.Message):
    __slots__ = ("ticket", "state", "blocks", "why")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    state: TicketState
    blocks: int
    why: str
    def __init__(self, ticket: _Optional[int] = ..., state: _Optional[_Union[TicketState, str]] = ..., blocks: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class TicketRequest(_message.Message):
    __slots__ = ("ticket", "wait_ms", "cancel")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    wait_ms: int
    cancel: bool
    def __init__(self, ticket: _Optional[int] = ..., wait_ms: _Optional[int] = ..., cancel: bool = ...) -> None: ...

class TicketReply(_message.Message):
    __slots__ = ("state", "blocks", "loaded", "waiting", "why", "results")
    STATE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    state: TicketState
    blocks: int
    loaded: int
    waiting: int
    why: str
    results: _containers.RepeatedScalarFieldContainer[CommitResult]
    def __init__(self, state: _Optional[_Union[TicketState, str]] = ..., blocks: _Optional[int] = ..., loaded: _Optional[int] = ..., waiting: _Optional[int] = ..., why: _Optional[str] = ..., results: _Optional[_Iterable[_Union[CommitResult, str]]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("slots", "all", "keep")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    all: bool
    keep: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slots: _Optional[_Iterable[int]] = ..., all: bool = ..., keep: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TouchRequest(_message.Message):
    __slots__ = ("keys", "hint", "reports")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    hint: Hint
    reports: _containers.RepeatedCompositeFieldContainer[Report]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., hint: _Optional[_Union[Hint, _Mapping]] = ..., reports: _Optional[_Iterable[_Union[Report, _Mapping]]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("operation", "namespace_id", "calls", "calls_hit", "hits", "misses", "seconds", "latencies", "tier", "busy")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    CALLS_HIT_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    operation: _stats_pb2.Operation
    namespace_id: int
    calls: int
    calls_hit: int
    hits: int
    misses: int
    seconds: float
    latencies: _containers.RepeatedScalarFieldContainer[int]
    tier: _stats_pb2.Tier
    busy: int
    def __init__(self, operation: _Optional[_Union[_stats_pb2.Operation, str]] = ..., namespace_id: _Optional[int] = ..., calls: _Optional[int] = ..., calls_hit: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., seconds: _Optional[float] = ..., latencies: _Optional[_Iterable[int]] = ..., tier: _Optional[_Union[_stats_pb2.Tier, str]] = ..., busy: _Optional[int] = ...) -> None: ...

class TouchReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
