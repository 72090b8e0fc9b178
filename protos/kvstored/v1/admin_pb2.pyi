from kvstored.v1 import stats_pb2 as _stats_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InspectRequest(_message.Message):
    __slots__ = ("tenant", "key", "namespace", "session", "segment")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    key: bytes
    namespace: bytes
    session: int
    segment: int
    def __init__(self, tenant: _Optional[str] = ..., key: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., session: _Optional[int] = ..., segment: _Optional[int] = ...) -> None: ...

class InspectReply(_message.Message):
    __slots__ = ("key", "namespace", "session", "segment")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    key: KeyInfo
    namespace: NamespaceInfo
    session: SessionInfo
    segment: SegmentInfo
    def __init__(self, key: _Optional[_Union[KeyInfo, _Mapping]] = ..., namespace: _Optional[_Union[NamespaceInfo, _Mapping]] = ..., session: _Optional[_Union[SessionInfo, _Mapping]] = ..., segment: _Optional[_Union[SegmentInfo, _Mapping]] = ...) -> None: ...

class Copy(_message.Message):
    __slots__ = ("tier", "segment", "slot", "size_bytes", "device")
    TIER_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    tier: _stats_pb2.Tier
    segment: int
    slot: int
    size_bytes: int
    device: str
    def __init__(self, tier: _Optional[_Union[_stats_pb2.Tier, str]] = ..., segment: _Optional[int] = ..., slot: _Optional[int] = ..., size_bytes: _Optional[int] = ..., device: _Optional[str] = ...) -> None: ...

class KeyInfo(_message.Message):
    __slots__ = ("key", "namespace", "copies", "parent", "parent_present", "children", "children_count", "depth", "hits", "idle_s", "age_s", "leases", "pinned_s", "ttl_s")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PARENT_PRESENT_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_COUNT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PINNED_S_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    namespace: _stats_pb2.NamespaceStats
    copies: _containers.RepeatedCompositeFieldContainer[Copy]
    parent: bytes
    parent_present: bool
    children: _containers.RepeatedScalarFieldContainer[bytes]
    children_count: int
    depth: int
    hits: int
    idle_s: float
    age_s: float
    leases: int
    pinned_s: float
    ttl_s: float
    def __init__(self, key: _Optional[bytes] = ..., namespace: _Optional[_Union[_stats_pb2.NamespaceStats, _Mapping]] = ..., copies: _Optional[_Iterable[_Union[Copy, _Mapping]]] = ..., parent: _Optional[bytes] = ..., parent_present: bool = ..., children: _Optional[_Iterable[bytes]] = ..., children_count: _Optional[int] = ..., depth: _Optional[int] = ..., hits: _Optional[int] = ..., idle_s: _Optional[float] = ..., age_s: _Optional[float] = ..., leases: _Optional[int] = ..., pinned_s: _Optional[float] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class NamespaceInfo(_message.Message):
    __slots__ = ("stats", "pool", "leased", "pinned", "roots", "orphans", "deepest", "idle_s", "oldest_s")
    STATS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    ROOTS_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_FIELD_NUMBER: _ClassVar[int]
    DEEPEST_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    OLDEST_S_FIELD_NUMBER: _ClassVar[int]
    stats: _stats_pb2.NamespaceStats
    pool: _stats_pb2.PoolStats
    leased: int
    pinned: int
    roots: int
    orphans: int
    deepest: int
    idle_s: float
    oldest_s: float
    def __init__(self, stats: _Optional[_Union[_stats_pb2.NamespaceStats, _Mapping]] = ..., pool: _Optional[_Union[_stats_pb2.PoolStats, _Mapping]] = ..., leased: _Optional[int] = ..., pinned: _Optional[int] = ..., roots: _Optional[int] = ..., orphans: _Optional[int] = ..., deepest: _Optional[int] = ..., idle_s: _Optional[float] = ..., oldest_s: _Optional[float] = ...) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("stats", "granted", "leased", "segments")
    STATS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    stats: _stats_pb2.SessionStats
    granted: _containers.RepeatedScalarFieldContainer[int]
    leased: _containers.RepeatedScalarFieldContainer[int]
    segments: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stats: _Optional[_Union[_stats_pb2.SessionStats, _Mapping]] = ..., granted: _Optional[_Iterable[int]] = ..., leased: _Optional[_Iterable[int]] = ..., segments: _Optional[_Iterable[int]] = ...) -> None: ...

class SegmentInfo(_message.Message):
    __slots__ = ("id", "tenant", "size_bytes", "block_bytes", "slot_bytes", "slots", "free", "granted", "quarantined", "blocks", "leased", "pinned", "doomed", "idle_s", "sessions", "draining")
    ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    DOOMED_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    id: int
    tenant: str
    size_bytes: int
    block_bytes: int
    slot_bytes: int
    slots: int
    free: int
    granted: int
    quarantined: int
    blocks: int
    leased: int
    pinned: int
    doomed: int
    idle_s: float
    sessions: _containers.RepeatedScalarFieldContainer[int]
    draining: bool
    def __init__(self, id: _Optional[int] = ..., tenant: _Optional[str] = ..., size_bytes: _Optional[int] = ..., block_bytes: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., slots: _Optional[int] = ..., free: _Optional[int] = ..., granted: _Optional[int] = ..., quarantined: _Optional[int] = ..., blocks: _Optional[int] = ..., leased: _Optional[int] = ..., pinned: _Optional[int] = ..., doomed: _Optional[int] = ..., idle_s: _Optional[float] = ..., sessions: _Optional[_Iterable[int]] = ..., draining: bool = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("tenant", "keys", "namespace", "size_bytes", "all", "tier")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    keys: EvictKeys
    namespace: bytes
    size_bytes: int
    all: bool
    tier: _stats_pb2.Tier
    def __init__(self, tenant: _Optional[str] = ..., keys: _Optional[_Union[EvictKeys, _Mapping]] = ..., namespace: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., all: bool = ..., tier: _Optional[_Union[_stats_pb2.Tier, str]] = ...) -> None: ...

class EvictKeys(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class EvictReply(_message.Message):
    __slots__ = ("blocks", "size_bytes", "held", "absent", "held_bytes", "pinned", "pinned_bytes", "leased", "leased_bytes", "ssd_blocks", "ssd_bytes", "not_on_disk_yet", "ssd_not_known", "gpu_blocks", "gpu_bytes")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SSD_BYTES_FIELD_NUMBER: _ClassVar[int]
    NOT_ON_DISK_YET_FIELD_NUMBER: _ClassVar[int]
    SSD_NOT_KNOWN_FIELD_NUMBER: _ClassVar[int]
    GPU_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GPU_BYTES_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    size_bytes: int
    held: int
    absent: int
    held_bytes: int
    pinned: int
    pinned_bytes: int
    leased: int
    leased_bytes: int
    ssd_blocks: int
    ssd_bytes: int
    not_on_disk_yet: str
    ssd_not_known: str
    gpu_blocks: int
    gpu_bytes: int
    def __init__(self, blocks: _Optional[int] = ..., size_bytes: _Optional[int] = ..., held: _Optional[int] = ..., absent: _Optional[int] = ..., held_bytes: _Optional[int] = ..., pinned: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., leased: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., ssd_blocks: _Optional[int] = ..., ssd_bytes: _Optional[int] = ..., not_on_disk_yet: _Optional[str] = ..., ssd_not_known: _Optional[str] = ..., gpu_blocks: _Optional[int] = ..., gpu_bytes: _Optional[int] = ...) -> None: ...

class EndSessionRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: int
    def __init__(self, session: _Optional[int] = ...) -> None: ...

class EndSessionReply(_message.Message):
    __slots__ = ("found", "quarantined")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    found: bool
    quarantined: int
    def __init__(self, found: bool = ..., quarantined: _Optional[int] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("wait_ms",)
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    wait_ms: int
    def __init__(self, wait_ms: _Optional[int] = ...) -> None: ...

class FlushReply(_message.Message):
    __slots__ = ("left", "trouble", "done")
    LEFT_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    left: int
    trouble: str
    done: bool
    def __init__(self, left: _Optional[int] = ..., trouble: _Optional[str] = ..., done: bool = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("cursor", "blocks_max")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_MAX_FIELD_NUMBER: _ClassVar[int]
    cursor: int
    blocks_max: int
    def __init__(self, cursor: _Optional[int] = ..., blocks_max: _Optional[int] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("cursor", "blocks", "size_bytes", "bad", "failed", "total", "trouble", "opening")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BAD_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    cursor: int
    blocks: int
    size_bytes: int
    bad: int
    failed: int
    total: int
    trouble: str
    opening: bool
    def __init__(self, cursor: _Optional[int] = ..., blocks: _Optional[int] = ..., size_bytes: _Optional[int] = ..., bad: _Optional[int] = ..., failed: _Optional[int] = ..., total: _Optional[int] = ..., trouble: _Optional[str] = ..., opening: bool = ...) -> None: ...
