"""What the log says of administration: who changed what, who was refused, and nothing of who only looks."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.server.audit import ORIGINS_MAX, REFUSALS_SAID_S, Refusals
from kvstore_client import Client, admin
from kvstored.v1 import PROTOCOL
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition, InvalidArgument, KVStoreError, Unauthenticated
from kvstored.v1.kvstore_pb2_grpc import KVStoreStub
from tests.certificates import TOKENS, token, write_tokens
from tests.conftest import RunningDaemon, eventually
from tests.daemon.cli import cli
from tests.nodes import block, running
from tests.rules.processes import session
from tests.wire import Wire

BLOCK = 4096


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningDaemon]:
    tokens = str(write_tokens(tmp_path / "tokens"))
    with running(
        host__size="16MiB", server__grpc="127.0.0.1:0", server__tokens=tokens, server__log_format="json"
    ) as daemon:
        yield daemon


@pytest.fixture
def stub(node: RunningDaemon) -> Iterator[Any]:
    with grpc.insecure_channel(node.grpc_endpoint.removeprefix("grpc://")) as channel:
        yield KVStoreStub(channel)


def bearer(name: str, tenant: str = "default") -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token(name)}"), ("kvstored-client", "by hand"), ("kvstored-tenant", tenant))


def lines(node: RunningDaemon, logger: str = "kvstored.admin", level: str = "") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in node.output().splitlines() if line.startswith("{")]
    return [line for line in found if line["logger"] == logger and level in ("", line["level"])]


def told(node: RunningDaemon, count: int) -> list[dict[str, Any]]:
    """The lines of the administration, once there are so many."""
    eventually(lambda: len(lines(node)) >= count)
    found = lines(node)
    assert len(found) == count
    return found


# -- what was done


def test_over_the_socket_it_is_told_which_user_and_process_did_what(node: RunningDaemon) -> None:
    with Client(node.endpoint, name="victim") as client:
        ns = client.raw_namespace("x", BLOCK)
        ns.put([ns.key(b"one"), ns.key(b"two")], bytes(2 * BLOCK))
        victim = session(client, "victim")
        assert victim is not None
        with Wire(node.socket) as wire:
            wire.call(evict=pb.EvictRequest(namespace=ns.digest))
            wire.call(end_session=pb.EndSessionRequest(session=victim["id"]))
            wire.call(end_session=pb.EndSessionRequest(session=victim["id"]))
    evicted, ended = told(node, 2)
    who = {"uid": evicted["uid"], "pid": victim["pid"], "client": "wire"}
    assert (evicted["event"], evicted["what"], evicted["tenant"]) == ("evicted as asked", "namespace", "default")
    assert (evicted["namespace"], evicted["outcome"]) == (ns.digest.hex(), "done")
    assert (evicted["blocks"], evicted["size_bytes"], evicted["held"]) == (2, 2 * BLOCK, 0)
    assert (ended["event"], ended["session"], ended["of_client"]) == ("session ended as asked", victim["id"], "victim")
    for line in (evicted, ended):
        assert line["level"] == "info"
        assert who.items() <= line.items()


def test_over_tcp_it_is_told_whose_token_did_what_and_never_the_token(node: RunningDaemon, stub: Any) -> None:
    stub.Evict(pb.EvictRequest(all=True), metadata=bearer("operator"), timeout=10)
    (line,) = told(node, 1)
    assert (line["token_name"], line["token_tenant"], line["client"]) == ("operator", "*", "by hand")
    assert line["peer"].startswith("ipv4:127.0.0.1:")
    assert (line["what"], line["tenant"]) == ("all", "*")
    assert not any(secret in node.output() for secret, _, _ in TOKENS.values())


def test_a_command_that_looks_leaves_no_line_and_one_that_changes_leaves_one(node: RunningDaemon) -> None:
    before = lines(node, "kvstored.session")
    for command in (("stats",), ("inspect", "session", 1), ("inspect", "namespace", "00" * 4)):
        assert cli(*command, "--endpoint", node.endpoint).returncode in (0, 3)
    assert cli("evict", "--all", "--yes", "--endpoint", node.endpoint).returncode == 0
    (line,) = told(node, 1)
    assert line["client"] == "kvstore-cli"
    assert lines(node, "kvstored.session") == before
    with Client(node.endpoint, name="engine"):
        eventually(lambda: len(lines(node, "kvstored.session")) > len(before))


def test_who_looks_for_the_commands_finds_them_at_level_debug() -> None:
    with running(host__size="16MiB", server__log_format="json", server__log_level="debug") as daemon:
        assert cli("stats", "--endpoint", daemon.endpoint).returncode == 0
        said = eventually(lambda: [s for s in lines(daemon, "kvstored.session") if s["event"] == "session opened"])
        assert {(line["level"], line["client"]) for line in said} == {("debug", "kvstore-cli")}


def test_nonsense_has_changed_nothing_and_leaves_no_line(node: RunningDaemon) -> None:
    with Wire(node.socket) as wire:
        with pytest.raises(InvalidArgument):
            wire.call(evict=pb.EvictRequest())
        with pytest.raises(FailedPrecondition, match="has no namespace"):
            wire.call(evict=pb.EvictRequest(namespace=bytes(32)))
        wire.call(evict=pb.EvictRequest(tenant="stranger", all=True))
    (line,) = told(node, 1)
    assert (line["tenant"], line["blocks"]) == ("stranger", 0)


# -- what was refused


def test_a_refusal_in_a_loop_is_one_line_for_each_who_is_refused(node: RunningDaemon, stub: Any) -> None:
    requests: dict[str, Any] = {
        "Inspect": pb.InspectRequest(session=1),
        "Evict": pb.EvictRequest(all=True),
        "EndSession": pb.EndSessionRequest(session=1),
    }
    for metadata in ((), bearer("engine"), bearer("foreman"), bearer("engine", "other")):
        for name, request in requests.items():
            for _ in range(20):
                if name != "Evict" and metadata == bearer("foreman"):
                    continue  # of its own tenant it may
                with pytest.raises(grpc.RpcError) as refused:
                    getattr(stub, name)(request, metadata=metadata, timeout=10)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with Wire(node.socket, hello=False) as wire:
        wire.call(hello=pb.HelloRequest(protocol=PROTOCOL, client="looker", read_only=True))
        for _ in range(20):
            with pytest.raises(FailedPrecondition, match="read-only"):
                wire.call(evict=pb.EvictRequest(all=True))
    found = told(node, 4)
    assert {(line["level"], line["event"], line["refusals"]) for line in found} == {
        ("warning", "administration refused", 1)
    }
    nobody, engine, foreman, looker = found
    assert (nobody["call"], "token_name" in nobody) == ("Inspect", False)
    assert "asks for a token" in nobody["reason"]
    assert (engine["token_name"], engine["call"]) == ("engine", "Inspect")
    assert (foreman["token_name"], foreman["call"]) == ("foreman", "Evict")
    assert "not for all of them" in foreman["reason"]
    assert (looker["client"], looker["call"]) == ("looker", "Evict")
    assert "uid" in looker
    assert not any(secret in node.output() for secret, _, _ in TOKENS.values())


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def refuse(refusals: Refusals, **who: object) -> None:
    error: KVStoreError = Unauthenticated("no")
    with pytest.raises(Unauthenticated), refusals.told("Evict", who):
        raise error


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[object, int]]:
    found: list[Any] = [record.msg for record in caplog.records]
    caplog.clear()
    return [(fields.get("uid", fields.get("peer")), fields["refusals"]) for fields in found]


def test_the_next_line_counts_the_refusals_before_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvstored.admin")
    clock = Clock()
    refusals = Refusals(clock)
    for _ in range(1000):
        refuse(refusals, uid=7)
    refuse(refusals, uid=8)
    refuse(refusals, peer="ipv4:10.0.0.1:1234")
    refuse(refusals, peer="ipv4:10.0.0.1:1235")
    assert said(caplog) == [(7, 1), (8, 1), ("ipv4:10.0.0.1:1234", 1)]
    clock.now += REFUSALS_SAID_S
    refuse(refusals, uid=7)
    refuse(refusals, peer="ipv4:10.0.0.1:1236")
    assert said(caplog) == [(7, 1000), ("ipv4:10.0.0.1:1236", 2)]


def test_origins_that_are_all_different_are_bounded_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvstored.admin")
    clock = Clock()
    refusals = Refusals(clock)
    for number in range(10_000):
        refuse(refusals, uid=number)
    assert len(said(caplog)) == ORIGINS_MAX + 1
    assert len(refusals._origins) == ORIGINS_MAX + 1
    clock.now += REFUSALS_SAID_S
    refuse(refusals, uid=20_000)
    assert said(caplog) == [(20_000, 1)]
    assert len(refusals._origins) <= 2


# -- what a token shows


def test_a_token_for_one_tenant_shows_what_is_of_that_tenant(node: RunningDaemon, stub: Any, tmp_path: Path) -> None:
    with (
        Client(node.endpoint, name="mine") as mine,
        Client(node.endpoint, name="theirs", tenant="other") as theirs,
    ):
        for client in (mine, theirs):
            ns = client.raw_namespace("x", BLOCK)
            ns.put([ns.key(b"one")], [block("one", BLOCK)])
        for name, tenants in (
            ("engine", {"default"}),
            ("foreman", {"default"}),
            ("other", {"other"}),
            ("everybody", {"default", "other"}),
            ("operator", {"default", "other"}),
        ):
            metadata = bearer(name, "other" if name == "other" else "default")
            reply = stub.Stats(pb.StatsRequest(), metadata=metadata, timeout=10)
            for rows in (reply.pools, reply.sessions, reply.indexes, reply.namespaces):
                assert {row.tenant for row in rows} == tenants, name
            assert reply.counters.stored == 2, "what is counted for the whole node is the same for all"
        path = tmp_path / "token"
        path.write_text(token("foreman"))
        for form in (("--all", "--tenant", "other"), ("--bytes", "1B", "--tenant", "nobody"), ("--all",)):
            done = cli("evict", *form, "--yes", "--endpoint", node.grpc_endpoint, "--token-file", path)
            assert (done.returncode, done.stdout) == (1, ""), "whether another tenant is there is not for it to know"
            assert "this token is for tenant 'default'" in done.stderr
        everything = admin.inspect(mine, pb.InspectRequest(tenant="other", namespace=ns.digest))
        assert everything.namespace.stats.blocks == 1, "the socket is the machine's own"
        assert {pool["tenant"] for pool in mine.stats()["pools"]} == {"default", "other"}
