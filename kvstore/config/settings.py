"""The settings there are, with their defaults; this file is the list.

A field's alias is its key in the file, its name carries the unit, and its description
says what is allowed, as error messages quote it. A setting of a later release is refused
by name here, so that nobody believes it to be in force.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer
from pydantic_settings import BaseSettings, SettingsConfigDict
from pydantic_settings import PydanticBaseSettingsSource as Source

from kvstore.config import values
from kvstored.v1.endpoint import SOCKET_NAME, user_runtime_dir

HOST_SIZE_BYTES_MIN = GPU_SIZE_BYTES_MIN = 1 << 20
SSD_SIZE_BYTES_MIN, ROCKSDB_SIZE_BYTES_MIN = 64 << 20, 128 << 20
HUGE_PAGES_AUTO_BYTES = 64 << 30
"""Above this size `host.huge_pages = "auto"` is on: 4 KiB pages cost every client 2 MiB of page tables a GiB."""

SIZE = "a size such as 10GiB, 1.5TiB or 10GB (units B, KiB, MiB, GiB, TiB, KB, MB, GB, TB)"
LOOPBACK = (
    "a loopback address: 127.0.0.1:PORT, [::1]:PORT, localhost:PORT "
    "(with server.tls_cert, server.tls_key and server.tokens any HOST:PORT)"
)
NOT_YET = "not part of this release"

T = TypeVar("T")


def _only(allowed: T, what: str) -> Callable[[T], T]:
    def check(value: T) -> T:
        if value != allowed:
            raise values.Refused(f"{what} {NOT_YET}")
        return value

    return check


def _host_size(size_bytes: int) -> int:
    """Whole pages: 10GB is none, and nobody counts them; who writes a size means at most that much."""
    if size_bytes < HOST_SIZE_BYTES_MIN:
        raise values.Refused("smaller than 1MiB")
    return size_bytes - size_bytes % values.PAGE_BYTES


def _gpu_size(size_bytes: int) -> int:
    """Whole pages, as `_host_size`."""
    if 0 < size_bytes < GPU_SIZE_BYTES_MIN:
        raise values.Refused("smaller than 1MiB")
    return size_bytes - size_bytes % values.PAGE_BYTES


def _ssd_size(size_bytes: int) -> int:
    if size_bytes < SSD_SIZE_BYTES_MIN:
        raise values.Refused("smaller than 64MiB")
    return size_bytes


Size = Annotated[int, BeforeValidator(values.parse_size_bytes), PlainSerializer(values.format_size, when_used="json")]
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Duration = Annotated[
    float, BeforeValidator(values.parse_duration_s), PlainSerializer(values.format_duration, when_used="json")
]

OptionalPath = Annotated[
    Path | None,
    BeforeValidator(values.parse_optional_path),
    PlainSerializer(values.format_optional_path, when_used="json"),
]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Server(Section):
    """Where clients reach the daemon."""

    socket: Annotated[Path, BeforeValidator(values.parse_socket_path)] = Field(
        default_factory=lambda: user_runtime_dir() / SOCKET_NAME,
        description="the path of a Unix socket, at most 107 bytes",
    )
    grpc: Annotated[str, BeforeValidator(values.parse_listen_address)] = Field(
        default="", description=f'"" (off), unix:/PATH, or {LOOPBACK}'
    )
    http: Annotated[str, BeforeValidator(values.parse_listen_address)] = Field(
        default="", description=f'"" (off), unix:/PATH, or {LOOPBACK}'
    )
    tls_cert: OptionalPath = Field(default=None, description='"" (off), or the path of a certificate chain in PEM')
    tls_key: OptionalPath = Field(default=None, description='"" (off), or the path of its private key in PEM')
    tokens: OptionalPath = Field(
        default=None, description='"" (off), or the path of a TOML file with tables [tokens.NAME], mode 0600'
    )
    state_dir: Annotated[Path, BeforeValidator(values.parse_path)] = Field(
        default_factory=lambda: user_runtime_dir() / "state", description="the path of a directory"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description='"debug", "info", "warning" or "error"'
    )
    log_format: Literal["text", "json"] = Field(default="text", description='"text" or "json"')
    socket_group: Annotated[str, BeforeValidator(values.parse_group)] = Field(
        default="", description='"" (the daemon\'s user alone), or the name of a group whose members may connect'
    )

    @property
    def grpc_socket(self) -> Path | None:
        """The socket path if `grpc` is one."""
        return Path(self.grpc.removeprefix("unix:")) if self.grpc.startswith("unix:") else None

    @property
    def http_socket(self) -> Path | None:
        """The socket path if `http` is one."""
        return Path(self.http.removeprefix("unix:")) if self.http.startswith("unix:") else None

    @property
    def http_for_others(self) -> bool:
        """Whether other machines may reach `http`."""
        return bool(values.reached_by_others(self.http))

    @property
    def grpc_host_port(self) -> tuple[str, int] | None:
        """Host and port if `grpc` is such an address."""
        return values.host_and_port(self.grpc)


class Host(Section):
    """The slab in memory."""

    size_bytes: Annotated[Size, AfterValidator(_host_size)] = Field(
        default=1 << 30, alias="size", description=f"{SIZE}, at least 1MiB; rounded down to 4KiB pages"
    )
    huge_pages: Literal["auto", "on", "off"] = Field(
        default="auto", description='"auto" (on above 64GiB), "on" or "off"'
    )
    persist: Annotated[str, BeforeValidator(values.parse_persist)] = Field(
        default="none", description='"none", "fdstore" (of systemd), or the absolute path of a directory on a tmpfs'
    )

    @property
    def persist_path(self) -> Path | None:
        """The directory if `persist` is one."""
        return None if self.persist in values.PERSIST_WORDS else Path(self.persist)

    @property
    def huge_pages_on(self) -> bool:
        """Whether the slab is to be made of huge pages."""
        wanted = self.size_bytes > HUGE_PAGES_AUTO_BYTES and self.persist_path is None  # a tmpfs' files have none
        return self.huge_pages == "on" or (self.huge_pages == "auto" and wanted)


class Ssd(Section):
    """The tier on disk."""

    path: Annotated[
        Path | None,
        BeforeValidator(values.parse_own_directory),
        PlainSerializer(values.format_optional_path, when_used="json"),
    ] = Field(default=None, description='"" (off), or the absolute path of a directory of the daemon\'s own')
    size_bytes: Annotated[Size, AfterValidator(_ssd_size)] = Field(
        default=64 << 30, alias="size", description=f"{SIZE}, at least 64MiB"
    )
    write_back: Annotated[str, AfterValidator(values.parse_write_back)] = Field(
        default="through", description='"through", "evict", or "hits:N" with N from 1 to 65535'
    )
    layout: Literal["extents", "rocksdb"] = Field(default="extents", description='"extents" or "rocksdb"')
    free_floor_bytes: Size = Field(
        default=1 << 30, alias="free_floor", description=f"{SIZE}: what is left free on its file system"
    )


class Gpu(Section):
    """The tier in device memory."""

    size_bytes: Annotated[Size, AfterValidator(_gpu_size)] = Field(
        default=0,
        alias="size",
        description=f"{SIZE}, at least 1MiB: the pool of each device; 0 is off",
    )
    devices: Annotated[str, BeforeValidator(values.parse_devices)] = Field(
        default="all", description='"all", or a list of UUIDs as nvidia-smi -L shows them (as text: with commas)'
    )
    handles: Literal["ipc", "descriptor"] = Field(default="ipc", description='"ipc" or "descriptor"')

    @property
    def wanted(self) -> tuple[str, ...]:
        """UUIDs; ("all",) where none is named."""
        return tuple(self.devices.split(","))


class Evict(Section):
    """What goes when memory is full: above `high` of the slab used, down to `low`."""

    policy: Literal["lru"] = Field(default="lru", description='"lru"')
    high: Fraction = Field(default=0.95, description="a fraction, 0 < evict.low < evict.high <= 1")
    low: Fraction = Field(default=0.90, description="a fraction, 0 < evict.low < evict.high <= 1")


class Lease(Section):
    """Reservations of callers without shared memory; those of local sessions do not end by a clock."""

    ttl_s: Duration = Field(
        default=30.0,
        alias="ttl",
        description="seconds as a number, or 250ms, 30s, 5m, 1h; from 1ms to 24h",
    )


class Tables(Section):
    """Everything, as a source has it; a plain model, so that one source can be checked alone and strictly."""

    server: Server = Field(default_factory=Server)
    host: Host = Field(default_factory=Host)
    ssd: Ssd = Field(default_factory=Ssd)
    gpu: Gpu = Field(default_factory=Gpu)
    evict: Evict = Field(default_factory=Evict)
    lease: Lease = Field(default_factory=Lease)
    remote: Annotated[
        object,
        BeforeValidator(lambda value: [] if value == "[]" else value),
        AfterValidator(_only([], "stores on other nodes are")),
    ] = Field(default_factory=list, description="an empty list, []")


class Settings(BaseSettings, Tables):
    """Everything, merged from the given sources, of which the first counts most; frozen."""

    # extra="forbid" comes with the tables; case counts, so that [Host] is unknown.
    model_config = SettingsConfigDict(env_prefix="KVSTORED_", env_nested_delimiter="__", case_sensitive=True)

    def __init__(self, *sources: Source) -> None:
        super().__init__(sources=sources)

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: Source, *others: Source, **named: Source
    ) -> tuple[Source, ...]:
        """The given ones, in place of those the library would look for itself."""
        return tuple(init_settings()["sources"])
