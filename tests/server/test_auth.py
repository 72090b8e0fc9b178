"""Who may come in over TCP: the file of tokens, what each token allows, and the certificate."""

import contextlib
import os
import re
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.errors import ConfigError, StartupError
from kvstore.server import private_file
from kvstore.server.auth import Access, Tokens
from kvstored.v1 import PROTOCOL
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import Unauthenticated
from kvstored.v1.kvstore_pb2_grpc import KVStoreStub
from tests.certificates import Authority, guarded, token, write_tokens
from tests.conftest import RunningDaemon
from tests.nodes import block, running
from tests.server.grpc_edge import put_messages, refused
from tests.wire import Wire

Code = grpc.StatusCode
BLOCK = 4096
GOOD = '[tokens.a]\ntoken = "0123456789abcdef"\n'


def private(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(0o600)
    return path


# -- the file


def test_a_token_is_what_its_table_says(tmp_path: Path) -> None:
    tokens = Tokens.load(write_tokens(tmp_path / "tokens"))
    engine, operator = tokens.check(token("engine")), tokens.check(token("operator"))
    assert engine is not None
    assert (engine.name, engine.tenant, engine.admin) == ("engine", "default", False)
    assert operator is not None
    assert (operator.name, operator.tenant, operator.admin) == ("operator", "*", True)
    for wrong in (None, "", token("engine")[:-1], token("engine") + " ", token("engine").upper(), "\udcff", "é"):
        assert tokens.check(wrong) is None
    bare = Tokens.load(private(tmp_path / "bare", GOOD)).check("0123456789abcdef")
    assert bare is not None
    assert (bare.tenant, bare.admin) == ("default", False)


@pytest.mark.parametrize(
    "header", [None, "", "Basic abc", "Bearer", "Bearer ", "bearer  wrong-token-00000", token("engine")]
)
def test_a_header_is_bearer_and_a_token(tmp_path: Path, header: str | None) -> None:
    tokens = Tokens.load(write_tokens(tmp_path / "tokens"))
    with pytest.raises(Unauthenticated, match=r"Bearer TOKEN.*Client\(token=.*kvstore-cli --token-file"):
        tokens.of_header(header)
    assert tokens.of_header(f"bEARER  {token('engine')} ").name == "engine"


BAD: dict[str, tuple[str | bytes, str]] = {
    "nothing": ("", r"one or more tables \[tokens.NAME\]"),
    "no table": ("tokens = 3\n", r"one or more tables"),
    "something else": (GOOD + "[more]\n", r"and nothing else"),
    "no TOML": ("[tokens.a\ntoken = 'secret-secret-secret'", "is not TOML that can be read"),
    "not UTF-8": (b"\xff\xfe", "is not TOML"),
    "not a table": ("[tokens]\na = 'secret-secret-secret'\n", "is not a table"),
    "no token": ("[tokens.a]\nadmin = true\n", "token is not 16 to"),
    "a short token": ("[tokens.a]\ntoken = 'secret-15-chars'\n", "token is not 16 to"),
    "a token with spaces": ("[tokens.a]\ntoken = 'secret secret secret'\n", "no spaces"),
    "the sample of the manual": ("[tokens.a]\ntoken = 'REPLACE-ME-openssl-rand-hex-32'\n", "sample of the manual"),
    "a token that no header takes": ("[tokens.a]\ntoken = 'sécret-secret-secret'\n", "printable ASCII"),
    "a number": ("[tokens.a]\ntoken = 1234567890123456\n", "token is not text"),
    "a wrong tenant": (GOOD + "tenant = 'a/b'\n", "tenant is neither"),
    "half a yes": (GOOD + "admin = 'yes'\n", "admin is not true or false"),
    "a misspelling": (GOOD + "admn = true\n", "has 'admn'; allowed: token, tenant, admin"),
    "one token twice": (GOOD + '[tokens.b]\ntoken = "0123456789abcdef"\n', r"has the token of \[tokens.a\]"),
    "very much": (GOOD + "#" * private_file.FILE_BYTES_MAX, "larger than"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_file_that_is_wrong_is_refused_and_never_quoted(tmp_path: Path, what: str) -> None:
    text, said = BAD[what]
    with pytest.raises(StartupError, match=said) as raised:
        Tokens.load(private(tmp_path / "tokens", text))
    assert str(raised.value).startswith(f"server.tokens: {tmp_path}/tokens ")
    assert "cret" not in str(raised.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o666, 0o610])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = private(tmp_path / "tokens", GOOD)
    path.chmod(mode)
    with pytest.raises(StartupError, match=f"has mode {mode:04o}.*chmod 0600"):
        Tokens.load(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path, said in (
        (tmp_path / "none", "cannot be read: No such file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "fifo", "not a regular file"),
    ):
        with pytest.raises(StartupError, match=said):
            Tokens.load(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = private(tmp_path / "tokens", GOOD)
    os.chown(path, 65534, 65534)
    with pytest.raises(StartupError, match="belongs to uid 65534"):
        Tokens.load(path)


def test_a_certificate_and_a_key_that_do_not_fit_are_refused_by_the_names_of_the_settings(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    (cert, key), (_, other) = authority.issue("one"), authority.issue("other")
    access = Access.load(cert, key, None)
    assert access.certificate == (key.read_bytes(), cert.read_bytes())
    assert access.tls is not None
    assert access.tls.minimum_version >= ssl.TLSVersion.TLSv1_2
    junk = private(tmp_path / "junk", b"\x00" * 100)
    cert_as_key = private(tmp_path / "cert_as_key", cert.read_bytes())
    for pair in ((cert, other), (junk, key), (cert, junk), (key, cert_as_key)):
        with pytest.raises(StartupError, match=r"server.tls_cert, server.tls_key: .* are not a PEM certificate"):
            Access.load(*pair, None)
    for pair, name in (((tmp_path / "none", key), "tls_cert"), ((cert, tmp_path / "none"), "tls_key")):
        with pytest.raises(StartupError, match=f"server.{name}: .* cannot be read: No such file"):
            Access.load(*pair, None)
    with pytest.raises(StartupError, match=r"server\.tls_key"):
        Access.load(cert, tmp_path, None)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_a_key_that_others_may_read_or_write_is_refused_as_a_file_of_tokens_is(tmp_path: Path, mode: int) -> None:
    cert, key = Authority(tmp_path).issue("one")
    key.chmod(mode)
    with pytest.raises(ConfigError, match=f"server.tls_key: {key} has mode {mode:04o}.*chmod 0600"):
        Access.load(cert, key, None)


def test_a_certificate_out_of_its_time_is_refused_with_the_date(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with pytest.raises(ConfigError, match=r"server.tls_cert: .* expired at \d{4}-\d\d-\d\dT[\d:]+Z: renew it"):
        Access.load(*authority.issue("old", valid=(-3, -0.01)), None)
    with pytest.raises(
        StartupError, match=r"is not valid before \d{4}-\d\d-\d\dT[\d:]+Z, and by this .* clock"
    ) as caught:
        Access.load(*authority.issue("new", valid=(1, 3)), None)
    assert caught.value.exit_status == 1, "the clock of a machine that boots may be set in a moment"


def test_a_certificate_that_expires_within_two_weeks_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    Access.load(*authority.issue("long", valid=(-1, 15)), None)
    assert "expires" not in caplog.text
    Access.load(*authority.issue("short", valid=(-1, 13.5)), None)
    assert re.search(r"short.pem.*'days': 13.*the certificate expires soon", caplog.text)


def test_of_a_chain_only_the_daemon_s_own_certificate_must_be_in_its_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A root that a chain still carries may have expired, and clients trust another way."""
    authority = Authority(tmp_path)
    (cert, key), (old, _) = authority.issue("one", valid=(-1, 30)), authority.issue("old", valid=(-3, -1))
    cert.write_bytes(cert.read_bytes() + old.read_bytes())
    assert Access.load(cert, key, None).certificate == (key.read_bytes(), cert.read_bytes())
    assert "a certificate of the chain is out of its time" in caplog.text


# -- what a token allows, on a daemon that all may reach


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    directory = tmp_path_factory.mktemp("guarded")
    with running(host__size="16MiB", server__grpc="0.0.0.0:0", **guarded(directory)) as daemon:
        yield daemon


@pytest.fixture
def channel(node: RunningDaemon) -> Iterator[Any]:
    ca = Path(node.settings["server.tls_cert"]).with_name("ca.pem").read_bytes()
    address = f"localhost:{node.grpc_endpoint.rpartition(':')[2]}"
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(ca)) as channel:
        yield channel


def bearer(name: str, *more: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token(name)}"), *more)


def opened(stub: Any, metadata: Any) -> int:
    request = pb.OpenNamespaceRequest(digest=block("ns", 32), block_bytes=BLOCK, label="auth")
    number: int = stub.OpenNamespace(request, metadata=metadata, timeout=10).namespace_id
    return number


REQUESTS: dict[str, Any] = {
    "OpenNamespace": pb.OpenNamespaceRequest(digest=block("ns", 32), block_bytes=BLOCK),
    "Match": pb.MatchRequest(namespace_id=1),
    "Touch": pb.TouchRequest(),
    "Remove": pb.RemoveRequest(namespace_id=1),
    "Pin": pb.PinRequest(namespace_id=1, ttl_s=1),
    "Unpin": pb.UnpinRequest(namespace_id=1),
    "Clear": pb.ClearRequest(namespace_id=1),
    "Stats": pb.StatsRequest(),
    "Health": pb.HealthRequest(),
    "Reserve": pb.ReserveRequest(namespace_id=1, count=1),
    "Commit": pb.CommitRequest(namespace_id=1),
    "Abort": pb.AbortRequest(),
    "Acquire": pb.AcquireRequest(namespace_id=1),
    "Release": pb.ReleaseRequest(),
    "Load": pb.LoadRequest(namespace_id=1),
    "Devices": pb.DevicesRequest(),
    "Device": pb.DeviceRequest(device="GPU-1", generation=1),
    "Prefetch": pb.PrefetchRequest(namespace_id=1),
    "Ticket": pb.TicketRequest(ticket=1),
    "Inspect": pb.InspectRequest(session=1),
    "Evict": pb.EvictRequest(size_bytes=1),
    "EndSession": pb.EndSessionRequest(session=1),
    "Flush": pb.FlushRequest(),
    "Verify": pb.VerifyRequest(),
    "Get": pb.GetRequest(namespace_id=1),
    "Put": pb.PutChunk(),
}


def test_the_requests_are_all_there_are() -> None:
    assert set(REQUESTS) == set(pb.DESCRIPTOR.services_by_name["KVStore"].methods_by_name)


@pytest.mark.parametrize("said", ["nothing", "an unknown token", "half a token", "another scheme"])
@pytest.mark.parametrize("name", [*REQUESTS, "Nothing"])
def test_every_call_needs_a_token(channel: Any, name: str, said: str) -> None:
    header = {
        "an unknown token": "Bearer 0123456789abcdef",
        "half a token": f"Bearer {token('operator')[:16]}",
        "another scheme": f"Basic {token('operator')}",
    }
    metadata = (("authorization", header[said]),) if said in header else ()
    message = REQUESTS[name].SerializeToString() if name in REQUESTS else b""
    with refused(Code.UNAUTHENTICATED, "authorization: Bearer TOKEN"):
        channel.stream_unary(f"/kvstored.v1.KVStore/{name}")(iter([message]), metadata=metadata, timeout=10)


def test_a_session_token_is_no_token(channel: Any, node: RunningDaemon) -> None:
    with Wire(node.socket, hello=False) as wire:
        hello = wire.call(hello=pb.HelloRequest(protocol=PROTOCOL, client="x")).hello
        bound = (("kvstored-session", hello.token.hex()),)
        stub = KVStoreStub(channel)
        with refused(Code.UNAUTHENTICATED, "asks for a token"):
            stub.Health(pb.HealthRequest(), metadata=bound, timeout=10)
        assert stub.Health(pb.HealthRequest(), metadata=bearer("engine", *bound), timeout=10).healthy
        with refused(Code.UNAUTHENTICATED, "for tenant 'other'"):
            stub.Health(pb.HealthRequest(), metadata=bearer("other", *bound), timeout=10)
        wire.leave()


def test_health_is_open_to_a_load_balancer_and_reflection_is_not(channel: Any) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=10).status == 1
    watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=10)
    assert next(watch).status == 1
    watch.cancel()
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    with refused(Code.UNAUTHENTICATED):
        list(reflection.ServerReflectionInfo(iter([ask]), timeout=10))
    assert list(reflection.ServerReflectionInfo(iter([ask]), metadata=bearer("engine"), timeout=10))


def test_a_token_is_for_its_tenant(channel: Any) -> None:
    stub = KVStoreStub(channel)
    of = {name: (("kvstored-tenant", name),) for name in ("default", "other", "third")}
    assert opened(stub, bearer("engine"))
    assert opened(stub, bearer("engine", *of["default"]))
    assert opened(stub, bearer("other", *of["other"]))
    for any_tenant in of.values():
        assert opened(stub, bearer("everybody", *any_tenant))
    for name, tenant in (("engine", "other"), ("other", "default"), ("engine", "Default")):
        metadata = bearer(name, ("kvstored-tenant", tenant))
        with refused(Code.UNAUTHENTICATED, "this token is for tenant"):
            opened(stub, metadata)
        with refused(Code.UNAUTHENTICATED):
            stub.Put(iter(put_messages(1, [block("k", 32)], [bytes(BLOCK)])), metadata=metadata, timeout=10)
        with refused(Code.UNAUTHENTICATED):
            list(stub.Get(pb.GetRequest(namespace_id=1), metadata=metadata, timeout=10))


def test_who_names_no_tenant_is_of_that_of_its_token_and_asks_about_it(channel: Any, node: RunningDaemon) -> None:
    stub, digest = KVStoreStub(channel), block("unnamed", 32)
    opening = pb.OpenNamespaceRequest(digest=digest, block_bytes=BLOCK, label="unnamed")
    stub.OpenNamespace(opening, metadata=bearer("other"), timeout=10)
    look = pb.InspectRequest(namespace=digest)
    assert stub.Inspect(look, metadata=bearer("head"), timeout=10).namespace.stats.tenant == "other"
    assert not stub.Inspect(look, metadata=bearer("operator"), timeout=10).HasField("namespace")
    assert stub.Evict(pb.EvictRequest(namespace=digest), metadata=bearer("head"), timeout=10).blocks == 0
    with refused(Code.UNAUTHENTICATED, "this token is for tenant 'other', and not for all of them: name it"):
        stub.Evict(pb.EvictRequest(all=True), metadata=bearer("head"), timeout=10)


def test_administration_needs_an_administrators_token(channel: Any) -> None:
    stub = KVStoreStub(channel)
    calls = {name: REQUESTS[name] for name in ("Inspect", "Evict", "EndSession")}
    for name, request in calls.items():
        for who in ("engine", "everybody"):
            with refused(Code.UNAUTHENTICATED, "admin = true"):
                getattr(stub, name)(request, metadata=bearer(who), timeout=10)
        getattr(stub, name)(request, metadata=bearer("operator"), timeout=10)


def test_an_administrator_of_one_tenant_has_nothing_to_do_with_others(channel: Any, node: RunningDaemon) -> None:
    stub, key = KVStoreStub(channel), block("kept", 32)
    blocks = put_messages(opened(stub, bearer("other", ("kvstored-tenant", "other"))), [key], [bytes(BLOCK)])
    stub.Put(iter(blocks), metadata=bearer("other", ("kvstored-tenant", "other")), timeout=10)
    with Wire(node.socket, tenant="other") as wire:
        sessions = wire.call(stats=pb.StatsRequest()).stats.sessions
        (theirs,) = [session.id for session in sessions if session.tenant == "other"]
        keys = pb.EvictKeys(keys=[key])
        for name, request in (
            ("Evict", pb.EvictRequest(all=True)),
            ("Evict", pb.EvictRequest(size_bytes=1)),
            ("Evict", pb.EvictRequest(tenant="other", all=True)),
            ("Evict", pb.EvictRequest(tenant="other", keys=keys)),
            ("Evict", pb.EvictRequest(tenant="other", namespace=block("ns", 32))),
            ("Inspect", pb.InspectRequest(tenant="other", key=key)),
            ("Inspect", pb.InspectRequest(tenant="other", namespace=block("ns", 32))),
            ("Inspect", pb.InspectRequest(session=theirs)),
            ("EndSession", pb.EndSessionRequest(session=theirs)),
        ):
            with refused(Code.UNAUTHENTICATED, "this token is for tenant 'default'"):
                getattr(stub, name)(request, metadata=bearer("foreman"), timeout=10)
        found = stub.Inspect(pb.InspectRequest(tenant="other", key=key), metadata=bearer("operator"), timeout=10)
        segment = pb.InspectRequest(segment=found.key.copies[0].segment)
        with refused(Code.UNAUTHENTICATED, "this token is for tenant 'default'"):
            stub.Inspect(segment, metadata=bearer("foreman"), timeout=10)
        assert stub.Evict(pb.EvictRequest(keys=keys), metadata=bearer("foreman"), timeout=10).absent == 1
        assert wire.call(health=pb.HealthRequest()).health.healthy
        wire.leave()


def test_plain_text_is_not_spoken(node: RunningDaemon) -> None:
    address = f"127.0.0.1:{node.grpc_endpoint.rpartition(':')[2]}"
    with grpc.insecure_channel(address) as plain, refused(Code.UNAVAILABLE):
        KVStoreStub(plain).Health(pb.HealthRequest(), metadata=bearer("operator"), timeout=10)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_of_today_is_spoken(node: RunningDaemon, version: ssl.TLSVersion) -> None:
    assert handshake(node, version).startswith("TLSv1")


def test_tls_of_yesterday_is_not(node: RunningDaemon) -> None:
    with pytest.warns(DeprecationWarning, match="TLSv1_1"), pytest.raises((ssl.SSLError, ConnectionError)):
        handshake(node, ssl.TLSVersion.TLSv1_1)


def handshake(node: RunningDaemon, version: ssl.TLSVersion) -> str:
    """What version was agreed on."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(Path(node.settings["server.tls_cert"]).with_name("ca.pem"))
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.set_alpn_protocols(["h2"])
    context.minimum_version = context.maximum_version = version
    port = int(node.grpc_endpoint.rpartition(":")[2])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as sock,
        context.wrap_socket(sock, server_hostname="localhost") as tls,
    ):
        return tls.version() or ""


def test_no_token_is_logged(node: RunningDaemon) -> None:
    said = node.output()
    assert not any(token(name) in said for name in ("engine", "operator"))
    assert stat.S_IMODE(Path(node.settings["server.tokens"]).stat().st_mode) == 0o600


# -- without tokens, on this machine


@contextlib.contextmanager
def loopback(**settings: str) -> Iterator[Any]:
    """A stub of a daemon on 127.0.0.1, in plain text."""
    with (
        running(host__size="16MiB", server__grpc="127.0.0.1:0", **settings) as node,
        grpc.insecure_channel(node.grpc_endpoint.removeprefix("grpc://")) as channel,
    ):
        yield KVStoreStub(channel)


def test_on_loopback_without_tokens_ordinary_calls_work_and_administration_does_not() -> None:
    with loopback() as stub:
        number = opened(stub, ())
        stub.Put(iter(put_messages(number, [block("k", 32)], [bytes(BLOCK)])), timeout=10)
        for name in ("Inspect", "Evict", "EndSession"):
            with refused(Code.UNAUTHENTICATED, "administration over TCP needs a token"):
                getattr(stub, name)(REQUESTS[name], timeout=10)
        assert stub.Clear(pb.ClearRequest(namespace_id=number), timeout=10).removed == 1


def test_over_a_unix_socket_administration_works_without_tokens_and_with(tmp_path: Path) -> None:
    tokens = str(write_tokens(tmp_path / "tokens"))
    for more in ({}, {"server__tokens": tokens}):
        with running(host__size="16MiB", server__grpc=f"unix:{tmp_path}/s", **more):
            assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
            with grpc.insecure_channel(f"unix:{tmp_path}/s") as channel:
                for name in ("Inspect", "Evict", "EndSession"):
                    getattr(KVStoreStub(channel), name)(REQUESTS[name], timeout=10)


def test_on_loopback_tokens_are_asked_for_where_there_are_any(tmp_path: Path) -> None:
    with loopback(server__tokens=str(write_tokens(tmp_path / "tokens"))) as stub:
        with refused(Code.UNAUTHENTICATED):
            stub.Clear(pb.ClearRequest(namespace_id=1), timeout=10)
        assert stub.Health(pb.HealthRequest(), metadata=bearer("engine"), timeout=10).healthy
        stub.Evict(REQUESTS["Evict"], metadata=bearer("operator"), timeout=10)
