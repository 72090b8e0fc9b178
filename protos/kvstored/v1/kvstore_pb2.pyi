from kvstored.v1 import admin_pb2 as _admin_pb2
from kvstored.v1 import blocks_pb2 as _blocks_pb2
from kvstored.v1 import stats_pb2 as _stats_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union
from kvstored.v1.admin_pb2 import InspectRequest as InspectRequest
from kvstored.v1.admin_pb2 import InspectReply as InspectReply
from kvstored.v1.admin_pb2 import Copy as Copy
from kvstored.v1.admin_pb2 import KeyInfo as KeyInfo
from kvstored.v1.admin_pb2 import NamespaceInfo as NamespaceInfo
from kvstored.v1.admin_pb2 import SessionInfo as SessionInfo
from kvstored.v1.admin_pb2 import SegmentInfo as SegmentInfo
from kvstored.v1.admin_pb2 import EvictRequest as EvictRequest
from kvstored.v1.admin_pb2 import EvictKeys as EvictKeys
from kvstored.v1.admin_pb2 import EvictReply as EvictReply
from kvstored.v1.admin_pb2 import EndSessionRequest as EndSessionRequest
from kvstored.v1.admin_pb2 import EndSessionReply as EndSessionReply
from kvstored.v1.admin_pb2 import FlushRequest as FlushRequest
from kvstored.v1.admin_pb2 import FlushReply as FlushReply
from kvstored.v1.admin_pb2 import VerifyRequest as VerifyRequest
from kvstored.v1.admin_pb2 import VerifyReply as VerifyReply
from kvstored.v1.blocks_pb2 import Hint as Hint
from kvstored.v1.blocks_pb2 import ReserveRequest as ReserveRequest
from kvstored.v1.blocks_pb2 import ReserveReply as ReserveReply
from kvstored.v1.blocks_pb2 import CommitRequest as CommitRequest
from kvstored.v1.blocks_pb2 import CommitReply as CommitReply
from kvstored.v1.blocks_pb2 import AbortRequest as AbortRequest
from kvstored.v1.blocks_pb2 import AbortReply as AbortReply
from kvstored.v1.blocks_pb2 import MatchRequest as MatchRequest
from kvstored.v1.blocks_pb2 import MatchReply as MatchReply
from kvstored.v1.blocks_pb2 import AcquireRequest as AcquireRequest
from kvstored.v1.blocks_pb2 import AcquireReply as AcquireReply
from kvstored.v1.blocks_pb2 import LoadRequest as LoadRequest
from kvstored.v1.blocks_pb2 import LoadReply as LoadReply
from kvstored.v1.blocks_pb2 import PrefetchRequest as PrefetchRequest
from kvstored.v1.blocks_pb2 import PrefetchReply as PrefetchReply
from kvstored.v1.blocks_pb2 import TicketRequest as TicketRequest
from kvstored.v1.blocks_pb2 import TicketReply as TicketReply
from kvstored.v1.blocks_pb2 import ReleaseRequest as ReleaseRequest
from kvstored.v1.blocks_pb2 import ReleaseReply as ReleaseReply
from kvstored.v1.blocks_pb2 import TouchRequest as TouchRequest
from kvstored.v1.blocks_pb2 import Report as Report
from kvstored.v1.blocks_pb2 import TouchReply as TouchReply
from kvstored.v1.blocks_pb2 import CommitResult as CommitResult
from kvstored.v1.blocks_pb2 import TicketState as TicketState
from kvstored.v1.stats_pb2 import StatsRequest as StatsRequest
from kvstored.v1.stats_pb2 import StatsReply as StatsReply
from kvstored.v1.stats_pb2 import DaemonStats as DaemonStats
from kvstored.v1.stats_pb2 import HostStats as HostStats
from kvstored.v1.stats_pb2 import PoolStats as PoolStats
from kvstored.v1.stats_pb2 import SessionStats as SessionStats
from kvstored.v1.stats_pb2 import Counters as Counters
from kvstored.v1.stats_pb2 import OperationStats as OperationStats
from kvstored.v1.stats_pb2 import CallStats as CallStats
from kvstored.v1.stats_pb2 import IndexStats as IndexStats
from kvstored.v1.stats_pb2 import LoopStats as LoopStats
from kvstored.v1.stats_pb2 import NamespaceStats as NamespaceStats
from kvstored.v1.stats_pb2 import HealthRequest as HealthRequest
from kvstored.v1.stats_pb2 import HealthReply as HealthReply
from kvstored.v1.stats_pb2 import PersistStats as PersistStats
from kvstored.v1.stats_pb2 import SsdStats as SsdStats
from kvstored.v1.stats_pb2 import QueueStats as QueueStats
from kvstored.v1.stats_pb2 import MoveCounters as MoveCounters
from kvstored.v1.stats_pb2 import GpuStats as GpuStats
from kvstored.v1.stats_pb2 import GpuCounters as GpuCounters
from kvstored.v1.stats_pb2 import Tier as Tier
from kvstored.v1.stats_pb2 import Operation as Operation

DESCRIPTOR: _descriptor.FileDescriptor
STORED: _blocks_pb2.CommitResult
EXISTS: _blocks_pb2.CommitResult
REJECTED: _blocks_pb2.CommitResult
TICKET_NONE: _blocks_pb2.TicketState
TICKET_RUNNING: _blocks_pb2.TicketState
TICKET_DONE: _blocks_pb2.TicketState
TICKET_FAILED: _blocks_pb2.TicketState
TICKET_CANCELLED: _blocks_pb2.TicketState
TIER_NONE: _stats_pb2.Tier
TIER_GPU: _stats_pb2.Tier
TIER_HOST: _stats_pb2.Tier
TIER_SSD: _stats_pb2.Tier
TIER_REMOTE: _stats_pb2.Tier
OPERATION_NONE: _stats_pb2.Operation
OPERATION_GET: _stats_pb2.Operation
OPERATION_ACQUIRE: _stats_pb2.Operation
OPERATION_MATCH: _stats_pb2.Operation
OPERATION_PUT: _stats_pb2.Operation

class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OK: _ClassVar[Code]
    INVALID_ARGUMENT: _ClassVar[Code]
    DEADLINE_EXCEEDED: _ClassVar[Code]
    RESOURCE_EXHAUSTED: _ClassVar[Code]
    FAILED_PRECONDITION: _ClassVar[Code]
    INTERNAL: _ClassVar[Code]
    UNAVAILABLE: _ClassVar[Code]
    UNAUTHENTICATED: _ClassVar[Code]
OK: Code
INVALID_ARGUMENT: Code
DEADLINE_EXCEEDED: Code
RESOURCE_EXHAUSTED: Code
FAILED_PRECONDITION: Code
INTERNAL: Code
UNAVAILABLE: Code
UNAUTHENTICATED: Code

class Error(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: Code
    message: str
    def __init__(self, code: _Optional[_Union[Code, str]] = ..., message: _Optional[str] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("protocol", "client", "tenant", "read_only", "resume")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    client: str
    tenant: str
    read_only: bool
    resume: Resume
    def __init__(self, protocol: _Optional[int] = ..., client: _Optional[str] = ..., tenant: _Optional[str] = ..., read_only: bool = ..., resume: _Optional[_Union[Resume, _Mapping]] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("nonce", "leased", "granted", "devices")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    leased: _containers.RepeatedScalarFieldContainer[int]
    granted: _containers.RepeatedScalarFieldContainer[int]
    devices: _containers.RepeatedCompositeFieldContainer[DeviceUses]
    def __init__(self, nonce: _Optional[int] = ..., leased: _Optional[_Iterable[int]] = ..., granted: _Optional[_Iterable[int]] = ..., devices: _Optional[_Iterable[_Union[DeviceUses, _Mapping]]] = ...) -> None: ...

class DeviceUses(_message.Message):
    __slots__ = ("device", "generation", "leased", "granted")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    device: str
    generation: int
    leased: _containers.RepeatedScalarFieldContainer[int]
    granted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, device: _Optional[str] = ..., generation: _Optional[int] = ..., leased: _Optional[_Iterable[int]] = ..., granted: _Optional[_Iterable[int]] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol", "nonce", "epoch", "version", "pid", "read_only", "read_only_reason", "tenant_bytes", "oldest_protocol", "resumed", "granted", "token", "devices")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_REASON_FIELD_NUMBER: _ClassVar[int]
    TENANT_BYTES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    nonce: int
    epoch: int
    version: str
    pid: int
    read_only: bool
    read_only_reason: str
    tenant_bytes: int
    oldest_protocol: int
    resumed: bool
    granted: _containers.RepeatedScalarFieldContainer[int]
    token: bytes
    devices: _containers.RepeatedCompositeFieldContainer[DeviceUses]
    def __init__(self, protocol: _Optional[int] = ..., nonce: _Optional[int] = ..., epoch: _Optional[int] = ..., version: _Optional[str] = ..., pid: _Optional[int] = ..., read_only: bool = ..., read_only_reason: _Optional[str] = ..., tenant_bytes: _Optional[int] = ..., oldest_protocol: _Optional[int] = ..., resumed: bool = ..., granted: _Optional[_Iterable[int]] = ..., token: _Optional[bytes] = ..., devices: _Optional[_Iterable[_Union[DeviceUses, _Mapping]]] = ...) -> None: ...

class IndexRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class IndexReply(_message.Message):
    __slots__ = ("size_bytes", "generation")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    generation: int
    def __init__(self, size_bytes: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class SegmentsRequest(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SegmentsReply(_message.Message):
    __slots__ = ("segments",)
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    def __init__(self, segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("id", "size_bytes", "huge_pages")
    ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HUGE_PAGES_FIELD_NUMBER: _ClassVar[int]
    id: int
    size_bytes: int
    huge_pages: bool
    def __init__(self, id: _Optional[int] = ..., size_bytes: _Optional[int] = ..., huge_pages: bool = ...) -> None: ...

class OpenNamespaceRequest(_message.Message):
    __slots__ = ("digest", "block_bytes", "label", "block_tokens")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    block_bytes: int
    label: str
    block_tokens: int
    def __init__(self, digest: _Optional[bytes] = ..., block_bytes: _Optional[int] = ..., label: _Optional[str] = ..., block_tokens: _Optional[int] = ...) -> None: ...

class OpenNamespaceReply(_message.Message):
    __slots__ = ("namespace_id", "slot_bytes", "grant_max", "reserve_max", "segments")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRANT_MAX_FIELD_NUMBER: _ClassVar[int]
    RESERVE_MAX_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    slot_bytes: int
    grant_max: int
    reserve_max: int
    segments: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, namespace_id: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., grant_max: _Optional[int] = ..., reserve_max: _Optional[int] = ..., segments: _Optional[_Iterable[int]] = ...) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "ticket")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    ticket: bool
    def __init__(self, namespace_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., ticket: bool = ...) -> None: ...

class RemoveReply(_message.Message):
    __slots__ = ("removed", "not_on_disk_yet", "ticket")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    NOT_ON_DISK_YET_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    removed: int
    not_on_disk_yet: str
    ticket: int
    def __init__(self, removed: _Optional[int] = ..., not_on_disk_yet: _Optional[str] = ..., ticket: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "ttl_s")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    ttl_s: float
    def __init__(self, namespace_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("pinned",)
    PINNED_FIELD_NUMBER: _ClassVar[int]
    pinned: int
    def __init__(self, pinned: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("namespace_id", "keys")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, namespace_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class UnpinReply(_message.Message):
    __slots__ = ("unpinned",)
    UNPINNED_FIELD_NUMBER: _ClassVar[int]
    unpinned: int
    def __init__(self, unpinned: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("namespace_id",)
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    def __init__(self, namespace_id: _Optional[int] = ...) -> None: ...

class ClearReply(_message.Message):
    __slots__ = ("removed", "not_on_disk_yet")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    NOT_ON_DISK_YET_FIELD_NUMBER: _ClassVar[int]
    removed: int
    not_on_disk_yet: str
    def __init__(self, removed: _Optional[int] = ..., not_on_disk_yet: _Optional[str] = ...) -> None: ...

class SyncRequest(_message.Message):
    __slots__ = ("detached", "leaving")
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    detached: _containers.RepeatedScalarFieldContainer[int]
    leaving: bool
    def __init__(self, detached: _Optional[_Iterable[int]] = ..., leaving: bool = ...) -> None: ...

class SyncReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DevicesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DevicesReply(_message.Message):
    __slots__ = ("devices", "exporter")
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    EXPORTER_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    exporter: bytes
    def __init__(self, devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ..., exporter: _Optional[bytes] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("uuid", "generation", "size_bytes", "page_bytes", "driver", "trouble")
    UUID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    generation: int
    size_bytes: int
    page_bytes: int
    driver: int
    trouble: str
    def __init__(self, uuid: _Optional[str] = ..., generation: _Optional[int] = ..., size_bytes: _Optional[int] = ..., page_bytes: _Optional[int] = ..., driver: _Optional[int] = ..., trouble: _Optional[str] = ...) -> None: ...

class DeviceRequest(_message.Message):
    __slots__ = ("device", "generation", "segments", "reserve", "commit", "abort", "acquire", "release", "prefetch", "closed")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    device: str
    generation: int
    segments: SegmentsRequest
    reserve: _blocks_pb2.ReserveRequest
    commit: DeviceCommitRequest
    abort: _blocks_pb2.AbortRequest
    acquire: _blocks_pb2.AcquireRequest
    release: _blocks_pb2.ReleaseRequest
    prefetch: _blocks_pb2.PrefetchRequest
    closed: DeviceClosedRequest
    def __init__(self, device: _Optional[str] = ..., generation: _Optional[int] = ..., segments: _Optional[_Union[SegmentsRequest, _Mapping]] = ..., reserve: _Optional[_Union[_blocks_pb2.ReserveRequest, _Mapping]] = ..., commit: _Optional[_Union[DeviceCommitRequest, _Mapping]] = ..., abort: _Optional[_Union[_blocks_pb2.AbortRequest, _Mapping]] = ..., acquire: _Optional[_Union[_blocks_pb2.AcquireRequest, _Mapping]] = ..., release: _Optional[_Union[_blocks_pb2.ReleaseRequest, _Mapping]] = ..., prefetch: _Optional[_Union[_blocks_pb2.PrefetchRequest, _Mapping]] = ..., closed: _Optional[_Union[DeviceClosedRequest, _Mapping]] = ...) -> None: ...

class DeviceReply(_message.Message):
    __slots__ = ("segments", "reserve", "commit", "abort", "acquire", "release", "prefetch", "closed")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    segments: DeviceSegmentsReply
    reserve: _blocks_pb2.ReserveReply
    commit: _blocks_pb2.CommitReply
    abort: _blocks_pb2.AbortReply
    acquire: _blocks_pb2.AcquireReply
    release: _blocks_pb2.ReleaseReply
    prefetch: _blocks_pb2.PrefetchReply
    closed: DeviceClosedReply
    def __init__(self, segments: _Optional[_Union[DeviceSegmentsReply, _Mapping]] = ..., reserve: _Optional[_Union[_blocks_pb2.ReserveReply, _Mapping]] = ..., commit: _Optional[_Union[_blocks_pb2.CommitReply, _Mapping]] = ..., abort: _Optional[_Union[_blocks_pb2.AbortReply, _Mapping]] = ..., acquire: _Optional[_Union[_blocks_pb2.AcquireReply, _Mapping]] = ..., release: _Optional[_Union[_blocks_pb2.ReleaseReply, _Mapping]] = ..., prefetch: _Optional[_Union[_blocks_pb2.PrefetchReply, _Mapping]] = ..., closed: _Optional[_Union[DeviceClosedReply, _Mapping]] = ...) -> None: ...

class DeviceSegmentsReply(_message.Message):
    __slots__ = ("segments",)
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[DeviceSegment]
    def __init__(self, segments: _Optional[_Iterable[_Union[DeviceSegment, _Mapping]]] = ...) -> None: ...

class DeviceSegment(_message.Message):
    __slots__ = ("id", "size_bytes", "handle")
    ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    id: int
    size_bytes: int
    handle: bytes
    def __init__(self, id: _Optional[int] = ..., size_bytes: _Optional[int] = ..., handle: _Optional[bytes] = ...) -> None: ...

class DeviceCommitRequest(_message.Message):
    __slots__ = ("commit", "event")
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    commit: _blocks_pb2.CommitRequest
    event: bytes
    def __init__(self, commit: _Optional[_Union[_blocks_pb2.CommitRequest, _Mapping]] = ..., event: _Optional[bytes] = ...) -> None: ...

class DeviceClosedRequest(_message.Message):
    __slots__ = ("segments",)
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, segments: _Optional[_Iterable[int]] = ...) -> None: ...

class DeviceClosedReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeviceDetach(_message.Message):
    __slots__ = ("device", "generation", "segments")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    device: str
    generation: int
    segments: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, device: _Optional[str] = ..., generation: _Optional[int] = ..., segments: _Optional[_Iterable[int]] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("id", "hello", "index", "segments", "open_namespace", "reserve", "commit", "abort", "match", "acquire", "release", "touch", "remove", "pin", "unpin", "clear", "sync", "stats", "health", "inspect", "evict", "end_session", "load", "prefetch", "ticket", "flush", "verify", "devices", "device")
    ID_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    OPEN_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    TOUCH_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    CLEAR_FIELD_NUMBER: _ClassVar[int]
    SYNC_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    INSPECT_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    END_SESSION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    id: int
    hello: HelloRequest
    index: IndexRequest
    segments: SegmentsRequest
    open_namespace: OpenNamespaceRequest
    reserve: _blocks_pb2.ReserveRequest
    commit: _blocks_pb2.CommitRequest
    abort: _blocks_pb2.AbortRequest
    match: _blocks_pb2.MatchRequest
    acquire: _blocks_pb2.AcquireRequest
    release: _blocks_pb2.ReleaseRequest
    touch: _blocks_pb2.TouchRequest
    remove: RemoveRequest
    pin: PinRequest
    unpin: UnpinRequest
    clear: ClearRequest
    sync: SyncRequest
    stats: _stats_pb2.StatsRequest
    health: _stats_pb2.HealthRequest
    inspect: _admin_pb2.InspectRequest
    evict: _admin_pb2.EvictRequest
    end_session: _admin_pb2.EndSessionRequest
    load: _blocks_pb2.LoadRequest
    prefetch: _blocks_pb2.PrefetchRequest
    ticket: _blocks_pb2.TicketRequest
    flush: _admin_pb2.FlushRequest
    verify: _admin_pb2.VerifyRequest
    devices: DevicesRequest
    device: DeviceRequest
    def __init__(self, id: _Optional[int] = ..., hello: _Optional[_Union[HelloRequest, _Mapping]] = ..., index: _Optional[_Union[IndexRequest, _Mapping]] = ..., segments: _Optional[_Union[SegmentsRequest, _Mapping]] = ..., open_namespace: _Optional[_Union[OpenNamespaceRequest, _Mapping]] = ..., reserve: _Optional[_Union[_blocks_pb2.ReserveRequest, _Mapping]] = ..., commit: _Optional[_Union[_blocks_pb2.CommitRequest, _Mapping]] = ..., abort: _Optional[_Union[_blocks_pb2.AbortRequest, _Mapping]] = ..., match: _Optional[_Union[_blocks_pb2.MatchRequest, _Mapping]] = ..., acquire: _Optional[_Union[_blocks_pb2.AcquireRequest, _Mapping]] = ..., release: _Optional[_Union[_blocks_pb2.ReleaseRequest, _Mapping]] = ..., touch: _Optional[_Union[_blocks_pb2.TouchRequest, _Mapping]] = ..., remove: _Optional[_Union[RemoveRequest, _Mapping]] = ..., pin: _Optional[_Union[PinRequest, _Mapping]] = ..., unpin: _Optional[_Union[UnpinRequest, _Mapping]] = ..., clear: _Optional[_Union[ClearRequest, _Mapping]] = ..., sync: _Optional[_Union[SyncRequest, _Mapping]] = ..., stats: _Optional[_Union[_stats_pb2.StatsRequest, _Mapping]] = ..., health: _Optional[_Union[_stats_pb2.HealthRequest, _Mapping]] = ..., inspect: _Optional[_Union[_admin_pb2.InspectRequest, _Mapping]] = ..., evict: _Optional[_Union[_admin_pb2.EvictRequest, _Mapping]] = ..., end_session: _Optional[_Union[_admin_pb2.EndSessionRequest, _Mapping]] = ..., load: _Optional[_Union[_blocks_pb2.LoadRequest, _Mapping]] = ..., prefetch: _Optional[_Union[_blocks_pb2.PrefetchRequest, _Mapping]] = ..., ticket: _Optional[_Union[_blocks_pb2.TicketRequest, _Mapping]] = ..., flush: _Optional[_Union[_admin_pb2.FlushRequest, _Mapping]] = ..., verify: _Optional[_Union[_admin_pb2.VerifyRequest, _Mapping]] = ..., devices: _Optional[_Union[DevicesRequest, _Mapping]] = ..., device: _Optional[_Union[DeviceRequest, _Mapping]] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("id", "error", "recall", "detach", "hello", "index", "segments", "open_namespace", "reserve", "commit", "abort", "match", "acquire", "release", "touch", "remove", "pin", "unpin", "clear", "sync", "stats", "health", "inspect", "evict", "end_session", "load", "prefetch", "ticket", "flush", "verify", "devices", "device", "detach_devices")
    ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    OPEN_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    TOUCH_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    CLEAR_FIELD_NUMBER: _ClassVar[int]
    SYNC_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    INSPECT_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    END_SESSION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DETACH_DEVICES_FIELD_NUMBER: _ClassVar[int]
    id: int
    error: Error
    recall: bool
    detach: _containers.RepeatedScalarFieldContainer[int]
    hello: HelloReply
    index: IndexReply
    segments: SegmentsReply
    open_namespace: OpenNamespaceReply
    reserve: _blocks_pb2.ReserveReply
    commit: _blocks_pb2.CommitReply
    abort: _blocks_pb2.AbortReply
    match: _blocks_pb2.MatchReply
    acquire: _blocks_pb2.AcquireReply
    release: _blocks_pb2.ReleaseReply
    touch: _blocks_pb2.TouchReply
    remove: RemoveReply
    pin: PinReply
    unpin: UnpinReply
    clear: ClearReply
    sync: SyncReply
    stats: _stats_pb2.StatsReply
    health: _stats_pb2.HealthReply
    inspect: _admin_pb2.InspectReply
    evict: _admin_pb2.EvictReply
    end_session: _admin_pb2.EndSessionReply
    load: _blocks_pb2.LoadReply
    prefetch: _blocks_pb2.PrefetchReply
    ticket: _blocks_pb2.TicketReply
    flush: _admin_pb2.FlushReply
    verify: _admin_pb2.VerifyReply
    devices: DevicesReply
    device: DeviceReply
    detach_devices: _containers.RepeatedCompositeFieldContainer[DeviceDetach]
    def __init__(self, id: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., recall: bool = ..., detach: _Optional[_Iterable[int]] = ..., hello: _Optional[_Union[HelloReply, _Mapping]] = ..., index: _Optional[_Union[IndexReply, _Mapping]] = ..., segments: _Optional[_Union[SegmentsReply, _Mapping]] = ..., open_namespace: _Optional[_Union[OpenNamespaceReply, _Mapping]] = ..., reserve: _Optional[_Union[_blocks_pb2.ReserveReply, _Mapping]] = ..., commit: _Optional[_Union[_blocks_pb2.CommitReply, _Mapping]] = ..., abort: _Optional[_Union[_blocks_pb2.AbortReply, _Mapping]] = ..., match: _Optional[_Union[_blocks_pb2.MatchReply, _Mapping]] = ..., acquire: _Optional[_Union[_blocks_pb2.AcquireReply, _Mapping]] = ..., release: _Optional[_Union[_blocks_pb2.ReleaseReply, _Mapping]] = ..., touch: _Optional[_Union[_blocks_pb2.TouchReply, _Mapping]] = ..., remove: _Optional[_Union[RemoveReply, _Mapping]] = ..., pin: _Optional[_Union[PinReply, _Mapping]] = ..., unpin: _Optional[_Union[UnpinReply, _Mapping]] = ..., clear: _Optional[_Union[ClearReply, _Mapping]] = ..., sync: _Optional[_Union[SyncReply, _Mapping]] = ..., stats: _Optional[_Union[_stats_pb2.StatsReply, _Mapping]] = ..., health: _Optional[_Union[_stats_pb2.HealthReply, _Mapping]] = ..., inspect: _Optional[_Union[_admin_pb2.InspectReply, _Mapping]] = ..., evict: _Optional[_Union[_admin_pb2.EvictReply, _Mapping]] = ..., end_session: _Optional[_Union[_admin_pb2.EndSessionReply, _Mapping]] = ..., load: _Optional[_Union[_blocks_pb2.LoadReply, _Mapping]] = ..., prefetch: _Optional[_Union[_blocks_pb2.PrefetchReply, _Mapping]] = ..., ticket: _Optional[_Union[_blocks_pb2.TicketReply, _Mapping]] = ..., flush: _Optional[_Union[_admin_pb2.FlushReply, _Mapping]] = ..., verify: _Optional[_Union[_admin_pb2.VerifyReply, _Mapping]] = ..., devices: _Optional[_Union[DevicesReply, _Mapping]] = ..., device: _Optional[_Union[DeviceReply, _Mapping]] = ..., detach_devices: _Optional[_Iterable[_Union[DeviceDetach, _Mapping]]] = ...) -> None: ...

class PutHeader(_message.Message):
    __slots__ = ("namespace_id", "keys", "parents", "depths", "hint", "durable")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    DEPTHS_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    parents: _containers.RepeatedScalarFieldContainer[bytes]
    depths: _containers.RepeatedScalarFieldContainer[int]
    hint: _blocks_pb2.Hint
    durable: bool
    def __init__(self, namespace_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., parents: _Optional[_Iterable[bytes]] = ..., depths: _Optional[_Iterable[int]] = ..., hint: _Optional[_Union[_blocks_pb2.Hint, _Mapping]] = ..., durable: bool = ...) -> None: ...

class PutChunk(_message.Message):
    __slots__ = ("header", "data", "checksum")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    header: PutHeader
    data: bytes
    checksum: int
    def __init__(self, header: _Optional[_Union[PutHeader, _Mapping]] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ("results", "not_durable")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    NOT_DURABLE_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedScalarFieldContainer[_blocks_pb2.CommitResult]
    not_durable: str
    def __init__(self, results: _Optional[_Iterable[_Union[_blocks_pb2.CommitResult, str]]] = ..., not_durable: _Optional[str] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("namespace_id", "keys")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, namespace_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GetChunk(_message.Message):
    __slots__ = ("blocks", "data", "checksum")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    data: bytes
    checksum: int
    def __init__(self, blocks: _Optional[int] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...
