from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_NONE: _ClassVar[Tier]
    TIER_GPU: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_SSD: _ClassVar[Tier]
    TIER_REMOTE: _ClassVar[Tier]

class Operation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPERATION_NONE: _ClassVar[Operation]
    OPERATION_GET: _ClassVar[Operation]
    OPERATION_ACQUIRE: _ClassVar[Operation]
    OPERATION_MATCH: _ClassVar[Operation]
    OPERATION_PUT: _ClassVar[Operation]
TIER_NONE: Tier
TIER_GPU: Tier
TIER_HOST: Tier
TIER_SSD: Tier
TIER_REMOTE: Tier
OPERATION_NONE: Operation
OPERATION_GET: Operation
OPERATION_ACQUIRE: Operation
OPERATION_MATCH: Operation
OPERATION_PUT: Operation

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("daemon", "host", "pools", "sessions", "counters", "indexes", "loops", "namespaces", "operations", "calls", "ssd", "persist", "gpus", "gpus_off")
    DAEMON_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    LOOPS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    SSD_FIELD_NUMBER: _ClassVar[int]
    PERSIST_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    GPUS_OFF_FIELD_NUMBER: _ClassVar[int]
    daemon: DaemonStats
    host: HostStats
    pools: _containers.RepeatedCompositeFieldContainer[PoolStats]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStats]
    counters: Counters
    indexes: _containers.RepeatedCompositeFieldContainer[IndexStats]
    loops: _containers.RepeatedCompositeFieldContainer[LoopStats]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStats]
    operations: _containers.RepeatedCompositeFieldContainer[OperationStats]
    calls: _containers.RepeatedCompositeFieldContainer[CallStats]
    ssd: SsdStats
    persist: PersistStats
    gpus: _containers.RepeatedCompositeFieldContainer[GpuStats]
    gpus_off: str
    def __init__(self, daemon: _Optional[_Union[DaemonStats, _Mapping]] = ..., host: _Optional[_Union[HostStats, _Mapping]] = ..., pools: _Optional[_Iterable[_Union[PoolStats, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionStats, _Mapping]]] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., indexes: _Optional[_Iterable[_Union[IndexStats, _Mapping]]] = ..., loops: _Optional[_Iterable[_Union[LoopStats, _Mapping]]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceStats, _Mapping]]] = ..., operations: _Optional[_Iterable[_Union[OperationStats, _Mapping]]] = ..., calls: _Optional[_Iterable[_Union[CallStats, _Mapping]]] = ..., ssd: _Optional[_Union[SsdStats, _Mapping]] = ..., persist: _Optional[_Union[PersistStats, _Mapping]] = ..., gpus: _Optional[_Iterable[_Union[GpuStats, _Mapping]]] = ..., gpus_off: _Optional[str] = ...) -> None: ...

class DaemonStats(_message.Message):
    __slots__ = ("version", "pid", "epoch", "uptime_s", "socket", "grpc", "healthy", "problems", "rss_anon_bytes", "http", "open_descriptors", "internal_errors", "log_lines_dropped", "degraded")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    GRPC_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    RSS_ANON_BYTES_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    OPEN_DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    INTERNAL_ERRORS_FIELD_NUMBER: _ClassVar[int]
    LOG_LINES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    version: str
    pid: int
    epoch: int
    uptime_s: float
    socket: str
    grpc: str
    healthy: bool
    problems: _containers.RepeatedScalarFieldContainer[str]
    rss_anon_bytes: int
    http: str
    open_descriptors: int
    internal_errors: int
    log_lines_dropped: int
    degraded: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[str] = ..., pid: _Optional[int] = ..., epoch: _Optional[int] = ..., uptime_s: _Optional[float] = ..., socket: _Optional[str] = ..., grpc: _Optional[str] = ..., healthy: bool = ..., problems: _Optional[_Iterable[str]] = ..., rss_anon_bytes: _Optional[int] = ..., http: _Optional[str] = ..., open_descriptors: _Optional[int] = ..., internal_errors: _Optional[int] = ..., log_lines_dropped: _Optional[int] = ..., degraded: _Optional[_Iterable[str]] = ...) -> None: ...

class HostStats(_message.Message):
    __slots__ = ("size_bytes", "segment_bytes", "segments", "unassigned_bytes", "draining_bytes", "locked", "locked_reason", "huge_pages", "used_bytes", "block_bytes", "partly_free_bytes", "slack_bytes")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    UNASSIGNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOCKED_FIELD_NUMBER: _ClassVar[int]
    LOCKED_REASON_FIELD_NUMBER: _ClassVar[int]
    HUGE_PAGES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARTLY_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLACK_BYTES_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    segment_bytes: int
    segments: int
    unassigned_bytes: int
    draining_bytes: int
    locked: bool
    locked_reason: str
    huge_pages: bool
    used_bytes: int
    block_bytes: int
    partly_free_bytes: int
    slack_bytes: int
    def __init__(self, size_bytes: _Optional[int] = ..., segment_bytes: _Optional[int] = ..., segments: _Optional[int] = ..., unassigned_bytes: _Optional[int] = ..., draining_bytes: _Optional[int] = ..., locked: bool = ..., locked_reason: _Optional[str] = ..., huge_pages: bool = ..., used_bytes: _Optional[int] = ..., block_bytes: _Optional[int] = ..., partly_free_bytes: _Optional[int] = ..., slack_bytes: _Optional[int] = ...) -> None: ...

class PoolStats(_message.Message):
    __slots__ = ("tenant", "block_bytes", "slot_bytes", "segments", "slots", "free", "granted", "quarantined", "blocks", "leased", "pinned", "doomed", "segments_held")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    DOOMED_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_HELD_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    block_bytes: int
    slot_bytes: int
    segments: int
    slots: int
    free: int
    granted: int
    quarantined: int
    blocks: int
    leased: int
    pinned: int
    doomed: int
    segments_held: int
    def __init__(self, tenant: _Optional[str] = ..., block_bytes: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., segments: _Optional[int] = ..., slots: _Optional[int] = ..., free: _Optional[int] = ..., granted: _Optional[int] = ..., quarantined: _Optional[int] = ..., blocks: _Optional[int] = ..., leased: _Optional[int] = ..., pinned: _Optional[int] = ..., doomed: _Optional[int] = ..., segments_held: _Optional[int] = ...) -> None: ...

class SessionStats(_message.Message):
    __slots__ = ("id", "client", "tenant", "pid", "local", "read_only", "granted_slots", "leased_slots", "held_bytes", "age_s", "ended")
    ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    GRANTED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    LEASED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    id: int
    client: str
    tenant: str
    pid: int
    local: bool
    read_only: bool
    granted_slots: int
    leased_slots: int
    held_bytes: int
    age_s: float
    ended: bool
    def __init__(self, id: _Optional[int] = ..., client: _Optional[str] = ..., tenant: _Optional[str] = ..., pid: _Optional[int] = ..., local: bool = ..., read_only: bool = ..., granted_slots: _Optional[int] = ..., leased_slots: _Optional[int] = ..., held_bytes: _Optional[int] = ..., age_s: _Optional[float] = ..., ended: bool = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("stored", "existing", "rejected", "hits", "misses", "hit_bytes", "evicted", "evicted_inner", "evicted_orphans", "expired", "removed", "sessions_opened", "sessions_ended", "protocol_errors", "exhausted", "segments_moved", "reservations_expired", "match_hits", "match_misses", "hit_tokens", "miss_tokens", "match_hit_tokens", "match_miss_tokens", "evicted_asked", "conversations", "conversations_evicted", "busy")
    STORED_FIELD_NUMBER: _ClassVar[int]
    EXISTING_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    HIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_INNER_FIELD_NUMBER: _ClassVar[int]
    EVICTED_ORPHANS_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_OPENED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_ENDED_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_ERRORS_FIELD_NUMBER: _ClassVar[int]
    EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_MOVED_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    MATCH_HITS_FIELD_NUMBER: _ClassVar[int]
    MATCH_MISSES_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MATCH_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MATCH_MISS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_ASKED_FIELD_NUMBER: _ClassVar[int]
    CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    CONVERSATIONS_EVICTED_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    stored: int
    existing: int
    rejected: int
    hits: int
    misses: int
    hit_bytes: int
    evicted: int
    evicted_inner: int
    evicted_orphans: int
    expired: int
    removed: int
    sessions_opened: int
    sessions_ended: int
    protocol_errors: int
    exhausted: int
    segments_moved: int
    reservations_expired: int
    match_hits: int
    match_misses: int
    hit_tokens: int
    miss_tokens: int
    match_hit_tokens: int
    match_miss_tokens: int
    evicted_asked: int
    conversations: int
    conversations_evicted: int
    busy: int
    def __init__(self, stored: _Optional[int] = ..., existing: _Optional[int] = ..., rejected: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., hit_bytes: _Optional[int] = ..., evicted: _Optional[int] = ..., evicted_inner: _Optional[int] = ..., evicted_orphans: _Optional[int] = ..., expired: _Optional[int] = ..., removed: _Optional[int] = ..., sessions_opened: _Optional[int] = ..., sessions_ended: _Optional[int] = ..., protocol_errors: _Optional[int] = ..., exhausted: _Optional[int] = ..., segments_moved: _Optional[int] = ..., reservations_expired: _Optional[int] = ..., match_hits: _Optional[int] = ..., match_misses: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., miss_tokens: _Optional[int] = ..., match_hit_tokens: _Optional[int] = ..., match_miss_tokens: _Optional[int] = ..., evicted_asked: _Optional[int] = ..., conversations: _Optional[int] = ..., conversations_evicted: _Optional[int] = ..., busy: _Optional[int] = ...) -> None: ...

class OperationStats(_message.Message):
    __slots__ = ("operation", "tier", "calls", "calls_hit", "hits", "misses", "size_bytes", "seconds", "latencies", "busy")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    CALLS_HIT_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    tier: Tier
    calls: int
    calls_hit: int
    hits: int
    misses: int
    size_bytes: int
    seconds: float
    latencies: _containers.RepeatedScalarFieldContainer[int]
    busy: int
    def __init__(self, operation: _Optional[_Union[Operation, str]] = ..., tier: _Optional[_Union[Tier, str]] = ..., calls: _Optional[int] = ..., calls_hit: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., size_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., latencies: _Optional[_Iterable[int]] = ..., busy: _Optional[int] = ...) -> None: ...

class CallStats(_message.Message):
    __slots__ = ("edge", "call", "calls", "errors", "seconds", "latencies")
    EDGE_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_FIELD_NUMBER: _ClassVar[int]
    edge: str
    call: str
    calls: int
    errors: int
    seconds: float
    latencies: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, edge: _Optional[str] = ..., call: _Optional[str] = ..., calls: _Optional[int] = ..., errors: _Optional[int] = ..., seconds: _Optional[float] = ..., latencies: _Optional[_Iterable[int]] = ...) -> None: ...

class IndexStats(_message.Message):
    __slots__ = ("tenant", "generation", "capacity", "live", "tombstones", "size_bytes", "unpublished")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNPUBLISHED_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    generation: int
    capacity: int
    live: int
    tombstones: int
    size_bytes: int
    unpublished: int
    def __init__(self, tenant: _Optional[str] = ..., generation: _Optional[int] = ..., capacity: _Optional[int] = ..., live: _Optional[int] = ..., tombstones: _Optional[int] = ..., size_bytes: _Optional[int] = ..., unpublished: _Optional[int] = ...) -> None: ...

class LoopStats(_message.Message):
    __slots__ = ("name", "runs", "errors", "last_error", "failing")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    FAILING_FIELD_NUMBER: _ClassVar[int]
    name: str
    runs: int
    errors: int
    last_error: str
    failing: bool
    def __init__(self, name: _Optional[str] = ..., runs: _Optional[int] = ..., errors: _Optional[int] = ..., last_error: _Optional[str] = ..., failing: bool = ...) -> None: ...

class NamespaceStats(_message.Message):
    __slots__ = ("tenant", "id", "label", "digest", "block_bytes", "blocks", "block_tokens", "ssd_blocks")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SSD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    id: int
    label: str
    digest: bytes
    block_bytes: int
    blocks: int
    block_tokens: int
    ssd_blocks: int
    def __init__(self, tenant: _Optional[str] = ..., id: _Optional[int] = ..., label: _Optional[str] = ..., digest: _Optional[bytes] = ..., block_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., block_tokens: _Optional[int] = ..., ssd_blocks: _Optional[int] = ...) -> None: ...

class HealthRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealthReply(_message.Message):
    __slots__ = ("healthy", "problems", "version", "uptime_s", "degraded")
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    healthy: bool
    problems: _containers.RepeatedScalarFieldContainer[str]
    version: str
    uptime_s: float
    degraded: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, healthy: bool = ..., problems: _Optional[_Iterable[str]] = ..., version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., degraded: _Optional[_Iterable[str]] = ...) -> None: ...

class PersistStats(_message.Message):
    __slots__ = ("kind", "path", "trouble", "unwritten_segments", "unwritten_bytes", "free_bytes", "cold", "adopted_blocks", "refused_blocks", "adopted_segments", "lost_segments", "adopted_sessions", "adopted_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    UNWRITTEN_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    UNWRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    COLD_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    LOST_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_S_FIELD_NUMBER: _ClassVar[int]
    kind: str
    path: str
    trouble: str
    unwritten_segments: int
    unwritten_bytes: int
    free_bytes: int
    cold: str
    adopted_blocks: int
    refused_blocks: int
    adopted_segments: int
    lost_segments: int
    adopted_sessions: int
    adopted_s: float
    def __init__(self, kind: _Optional[str] = ..., path: _Optional[str] = ..., trouble: _Optional[str] = ..., unwritten_segments: _Optional[int] = ..., unwritten_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., cold: _Optional[str] = ..., adopted_blocks: _Optional[int] = ..., refused_blocks: _Optional[int] = ..., adopted_segments: _Optional[int] = ..., lost_segments: _Optional[int] = ..., adopted_sessions: _Optional[int] = ..., adopted_s: _Optional[float] = ...) -> None: ...

class SsdStats(_message.Message):
    __slots__ = ("path", "layout", "state", "trouble", "direct_refused", "size_bytes", "physical_bytes", "free_bytes", "file_bytes", "used_bytes", "blocks", "aside", "evicted", "queues", "counters", "tickets", "no_file", "room_bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    DIRECT_REFUSED_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PHYSICAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ASIDE_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    NO_FILE_FIELD_NUMBER: _ClassVar[int]
    ROOM_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    layout: str
    state: str
    trouble: str
    direct_refused: str
    size_bytes: int
    physical_bytes: int
    free_bytes: int
    file_bytes: int
    used_bytes: int
    blocks: int
    aside: int
    evicted: int
    queues: _containers.RepeatedCompositeFieldContainer[QueueStats]
    counters: MoveCounters
    tickets: int
    no_file: str
    room_bytes: int
    def __init__(self, path: _Optional[str] = ..., layout: _Optional[str] = ..., state: _Optional[str] = ..., trouble: _Optional[str] = ..., direct_refused: _Optional[str] = ..., size_bytes: _Optional[int] = ..., physical_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., file_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., aside: _Optional[int] = ..., evicted: _Optional[int] = ..., queues: _Optional[_Iterable[_Union[QueueStats, _Mapping]]] = ..., counters: _Optional[_Union[MoveCounters, _Mapping]] = ..., tickets: _Optional[int] = ..., no_file: _Optional[str] = ..., room_bytes: _Optional[int] = ...) -> None: ...

class QueueStats(_message.Message):
    __slots__ = ("kind", "waiting", "waiting_bytes", "running", "refused", "moved_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_BYTES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    waiting: int
    waiting_bytes: int
    running: int
    refused: int
    moved_bytes: int
    def __init__(self, kind: _Optional[str] = ..., waiting: _Optional[int] = ..., waiting_bytes: _Optional[int] = ..., running: _Optional[int] = ..., refused: _Optional[int] = ..., moved_bytes: _Optional[int] = ...) -> None: ...

class MoveCounters(_message.Message):
    __slots__ = ("written", "written_bytes", "write_errors", "writes_dropped", "loaded", "loaded_bytes", "loads_failed", "read_errors", "corrupt", "troubles", "offloaded", "lost")
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITE_ERRORS_FIELD_NUMBER: _ClassVar[int]
    WRITES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADS_FAILED_FIELD_NUMBER: _ClassVar[int]
    READ_ERRORS_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    OFFLOADED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    written: int
    written_bytes: int
    write_errors: int
    writes_dropped: int
    loaded: int
    loaded_bytes: int
    loads_failed: int
    read_errors: int
    corrupt: int
    troubles: int
    offloaded: int
    lost: int
    def __init__(self, written: _Optional[int] = ..., written_bytes: _Optional[int] = ..., write_errors: _Optional[int] = ..., writes_dropped: _Optional[int] = ..., loaded: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., loads_failed: _Optional[int] = ..., read_errors: _Optional[int] = ..., corrupt: _Optional[int] = ..., troubles: _Optional[int] = ..., offloaded: _Optional[int] = ..., lost: _Optional[int] = ...) -> None: ...

class GpuStats(_message.Message):
    __slots__ = ("uuid", "name", "trouble", "no_memory", "size_bytes", "segments", "blocks", "used_bytes", "granted", "leased", "quarantined", "draining_bytes", "copying", "commits_pending", "tickets", "page_locked_bytes", "not_page_locked", "calls_hanging", "counters", "generation", "handle_kind")
    UUID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    NO_MEMORY_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPYING_FIELD_NUMBER: _ClassVar[int]
    COMMITS_PENDING_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    PAGE_LOCKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NOT_PAGE_LOCKED_FIELD_NUMBER: _ClassVar[int]
    CALLS_HANGING_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HANDLE_KIND_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    name: str
    trouble: str
    no_memory: str
    size_bytes: int
    segments: int
    blocks: int
    used_bytes: int
    granted: int
    leased: int
    quarantined: int
    draining_bytes: int
    copying: int
    commits_pending: int
    tickets: int
    page_locked_bytes: int
    not_page_locked: str
    calls_hanging: int
    counters: GpuCounters
    generation: int
    handle_kind: str
    def __init__(self, uuid: _Optional[str] = ..., name: _Optional[str] = ..., trouble: _Optional[str] = ..., no_memory: _Optional[str] = ..., size_bytes: _Optional[int] = ..., segments: _Optional[int] = ..., blocks: _Optional[int] = ..., used_bytes: _Optional[int] = ..., granted: _Optional[int] = ..., leased: _Optional[int] = ..., quarantined: _Optional[int] = ..., draining_bytes: _Optional[int] = ..., copying: _Optional[int] = ..., commits_pending: _Optional[int] = ..., tickets: _Optional[int] = ..., page_locked_bytes: _Optional[int] = ..., not_page_locked: _Optional[str] = ..., calls_hanging: _Optional[int] = ..., counters: _Optional[_Union[GpuCounters, _Mapping]] = ..., generation: _Optional[int] = ..., handle_kind: _Optional[str] = ...) -> None: ...

class GpuCounters(_message.Message):
    __slots__ = ("committed", "committed_bytes", "commits_failed", "events_failed", "events_late", "removed_pending", "copied_up", "bytes_up", "up_failed", "copied_down", "bytes_down", "down_failed", "down_dropped", "copies_vain", "evicted_only", "losses", "lost", "left_behind", "out_of_memory", "quiet_asked", "evicted")
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FAILED_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FAILED_FIELD_NUMBER: _ClassVar[int]
    EVENTS_LATE_FIELD_NUMBER: _ClassVar[int]
    REMOVED_PENDING_FIELD_NUMBER: _ClassVar[int]
    COPIED_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    UP_FAILED_FIELD_NUMBER: _ClassVar[int]
    COPIED_DOWN_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    DOWN_FAILED_FIELD_NUMBER: _ClassVar[int]
    DOWN_DROPPED_FIELD_NUMBER: _ClassVar[int]
    COPIES_VAIN_FIELD_NUMBER: _ClassVar[int]
    EVICTED_ONLY_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    LEFT_BEHIND_FIELD_NUMBER: _ClassVar[int]
    OUT_OF_MEMORY_FIELD_NUMBER: _ClassVar[int]
    QUIET_ASKED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    committed: int
    committed_bytes: int
    commits_failed: int
    events_failed: int
    events_late: int
    removed_pending: int
    copied_up: int
    bytes_up: int
    up_failed: int
    copied_down: int
    bytes_down: int
    down_failed: int
    down_dropped: int
    copies_vain: int
    evicted_only: int
    losses: int
    lost: int
    left_behind: int
    out_of_memory: int
    quiet_asked: int
    evicted: int
    def __init__(self, committed: _Optional[int] = ..., committed_bytes: _Optional[int] = ..., commits_failed: _Optional[int] = ..., events_failed: _Optional[int] = ..., events_late: _Optional[int] = ..., removed_pending: _Optional[int] = ..., copied_up: _Optional[int] = ..., bytes_up: _Optional[int] = ..., up_failed: _Optional[int] = ..., copied_down: _Optional[int] = ..., bytes_down: _Optional[int] = ..., down_failed: _Optional[int] = ..., down_dropped: _Optional[int] = ..., copies_vain: _Optional[int] = ..., evicted_only: _Optional[int] = ..., losses: _Optional[int] = ..., lost: _Optional[int] = ..., left_behind: _Optional[int] = ..., out_of_memory: _Optional[int] = ..., quiet_asked: _Optional[int] = ..., evicted: _Optional[int] = ...) -> None: ...
