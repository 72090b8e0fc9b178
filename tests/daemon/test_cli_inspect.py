"""`kvstore-cli inspect` against a real daemon: every kind, for people and for programs, and the end of a session."""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.message import Message

from kvstore.cli.connection import EXIT_NOT_WELL, EXITS
from kvstore_client import Client, Namespace
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.daemon.cli import NOWHERE, Terminal, cli, usage, within
from tests.nodes import running
from tests.rules.processes import session
from tests.wire import Wire

HOSTILE = '\x1b[2J\x1b]0;owned\x07\r\n[red]{"\u202egnp'


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    with running(host__size="16MiB") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def client(node: RunningDaemon) -> Iterator[Client]:
    with Client(node.endpoint, name="holder") as client:
        yield client


@pytest.fixture(scope="module")
def ns(client: Client) -> Namespace:
    return client.raw_namespace("shown", 4096)


@pytest.fixture(scope="module")
def keys(ns: Namespace) -> list[bytes]:
    keys = [ns.key(b"%d" % i) for i in range(3)]
    assert ns.put(keys, bytes(3 * 4096)).stored == 3
    return keys


def lines(text: str) -> dict[str, str]:
    """The lines of name and value."""
    pairs = (line.strip().split("  ", 1) for line in text.splitlines())
    return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}


def inspected(node: RunningDaemon, kind: str, name: object) -> tuple[dict[str, str], dict[str, Any]]:
    """The same for people and for programs."""
    people = cli("--endpoint", node.endpoint, "inspect", kind, name)
    programs = cli("inspect", kind, name, "--json", "--endpoint", node.endpoint)
    assert (people.returncode, people.stderr) == (programs.returncode, programs.stderr) == (0, "")
    found = json.loads(programs.stdout)
    assert list(found) == [kind]
    return lines(people.stdout), found[kind]


def schema(kind: type[Message]) -> set[str]:
    return {field.name for field in kind.DESCRIPTOR.fields}


def test_a_key_is_shown(node: RunningDaemon, ns: Namespace, keys: list[bytes]) -> None:
    shown, found = inspected(node, "key", keys[1].hex())
    assert found.keys() == schema(pb.KeyInfo)
    assert found["namespace"].keys() == schema(pb.NamespaceStats)
    assert found["copies"][0].keys() == schema(pb.Copy)
    assert (found["key"], found["parent"], found["children"]) == (keys[1].hex(), keys[0].hex(), [keys[2].hex()])
    assert (shown["parent"], shown["children"], shown["place in its chain"]) == (keys[0].hex(), "1", "1")
    assert shown["namespace"] == f"{ns.digest.hex()} (shown)"
    assert shown["host"].split() == ["1", str(found["copies"][0]["slot"]), "4.0", "KiB"]
    assert (shown["pinned"], shown["ends"], shown["leases"]) == ("no", "never", "0")


def test_a_namespace_is_shown_by_the_beginning_of_its_digest(
    node: RunningDaemon, ns: Namespace, keys: list[bytes]
) -> None:
    shown, found = inspected(node, "namespace", ns.digest.hex()[:8])
    assert found.keys() == schema(pb.NamespaceInfo)
    assert (found["stats"]["digest"], found["stats"]["blocks"]) == (ns.digest.hex(), len(keys))
    assert (found["roots"], found["deepest"]) == (1, 2)
    assert shown["longest chain"] == "3"


def test_a_session_and_a_segment_are_shown(
    node: RunningDaemon, client: Client, ns: Namespace, keys: list[bytes]
) -> None:
    with ns.acquire(keys[:1]):
        holder = session(client, "holder")
        assert holder is not None
        shown, found = inspected(node, "session", holder["id"])
        assert found.keys() == schema(pb.SessionInfo)
        assert (found["stats"]["client"], found["stats"]["leased_slots"]) == ("holder", 1)
        place = f"{found['leased'][0] >> 32}:{found['leased'][0] & 0xFFFFFFFF}"
        assert shown["leased"] == f"1 at {place}"
        shown, found = inspected(node, "segment", found["leased"][0] >> 32)
        assert found.keys() == schema(pb.SegmentInfo)
        assert holder["id"] in found["sessions"]
        assert shown["leased"] == str(found["leased"]) == "1"


@pytest.mark.parametrize(
    ("kind", "name"),
    [("key", "00" * 32), ("key", "00" * 4), ("namespace", "00" * 4), ("session", 0), ("segment", 2**32 - 1)],
)
def test_what_is_not_there_is_exit_3(node: RunningDaemon, kind: str, name: object) -> None:
    done = cli("--endpoint", node.endpoint, "inspect", kind, name, "--json")
    assert (done.returncode, json.loads(done.stdout)) == (3, {})
    assert f"there is no {kind} {name}. " in done.stderr
    assert {"key": "--tenant", "namespace": "kvstore-cli stats", "session": "kvstore-cli stats"}.get(
        kind, "kvstore-cli inspect"
    ) in done.stderr, "and where to look instead"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("key",),
        ("block", "00"),
        ("key", "00" * 3),
        ("key", "00" * 33),
        ("key", "0" * 9),
        ("key", "0x" + "00" * 31),
        ("key", "zz" * 32),
        ("key", "AB" * 32),
        ("key", "00 " * 32),
        ("key", " " + "00" * 32),
        ("key", "00" * 32 + "\n"),
        ("key", "\u0660\u0660" * 32),
        ("namespace", "ABCDEF01"),
        ("namespace", "abcdef01 "),
        ("namespace", "000000"),
        ("namespace", "000000000"),
        ("session", "-1"),
        ("session", "9" * 30),
        ("session", "2" * 20),
        ("session", "007"),
        ("session", " 7"),
        ("session", "+7"),
        ("session", "1_0"),
        ("session", "7\n"),
        ("segment", "0x1"),
        ("session", "\u0663"),
        ("segment", 2**32),
        ("segment", 1, "--end"),
    ],
    ids=str,
)
def test_wrong_usage_is_exit_2_without_a_daemon(arguments: tuple[object, ...]) -> None:
    done = usage("inspect", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Usage: kvstore-cli inspect" in done.stderr


def test_no_daemon_is_exit_1() -> None:
    done = cli("--endpoint", "unix:///nowhere/kvstored.sock", "inspect", "session", "1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no kvstored answers on unix:///nowhere/kvstored.sock" in done.stderr


def test_an_ambiguous_namespace_is_exit_2_and_names_the_candidates(node: RunningDaemon) -> None:
    digests = [b"twin" + bytes([i]) * 28 for i in (1, 2)]
    with Wire(node.socket) as wire:
        for digest in digests:
            wire.call(open_namespace=pb.OpenNamespaceRequest(digest=digest, block_bytes=4096, label=HOSTILE))
    done = cli("--endpoint", node.endpoint, "inspect", "namespace", b"twin".hex())
    assert done.returncode == 2
    assert all(digest.hex() in done.stderr for digest in digests)
    assert all(c.isprintable() or c == "\n" for c in done.stderr)


def test_a_key_is_shown_by_its_beginning_where_no_other_begins_so(
    node: RunningDaemon, ns: Namespace, keys: list[bytes]
) -> None:
    for digits in (8, 10, 62):
        assert inspected(node, "key", keys[1].hex()[:digits])[1]["key"] == keys[1].hex()
    assert cli("inspect", "key", keys[1].hex()[:8], "--tenant", "other", "--endpoint", node.endpoint).returncode == 3


def test_an_ambiguous_key_is_exit_2_and_names_ten_candidates(node: RunningDaemon, client: Client) -> None:
    alike = [b"like" + bytes([i]) * 28 for i in range(1, 13)]
    ns = client.raw_namespace("alike", 4096)
    ns.put(alike, bytes(len(alike) * 4096))
    for prefix in ("like", "like\1"):
        done = cli("--endpoint", node.endpoint, "inspect", "key", prefix.encode().hex())
        if prefix == "like":
            assert (done.returncode, done.stdout) == (2, "")
            assert sum(key.hex() in done.stderr for key in alike) == 10
            assert done.stderr.endswith(", ...\n")
        else:
            assert (done.returncode, alike[0].hex() in done.stdout) == (0, True)
    ns.remove(alike[2:])
    done = cli("--endpoint", node.endpoint, "inspect", "key", b"like".hex())
    assert done.returncode == 2
    assert done.stderr.endswith(f" begins several keys: {alike[0].hex()}, {alike[1].hex()}\n")
    ns.clear()


def test_hostile_names_neither_steer_the_terminal_nor_break_the_json(node: RunningDaemon) -> None:
    with Wire(node.socket, hello=False) as wire:
        hello = pb.HelloRequest(protocol=1, client=HOSTILE)
        wire.call(hello=hello)
        sessions = json.loads(cli("stats", "--json", "--endpoint", node.endpoint).stdout)["sessions"]
        (number,) = [s["id"] for s in sessions if "owned" in s["client"]]
        shown, found = inspected(node, "session", number)
        assert "[red]{" in found["stats"]["client"]
        assert shown["client"].isprintable()
        assert "[red]{" in shown["client"]


def test_the_exit_statuses_are_in_every_help() -> None:
    for command in ("stats", "inspect", "evict", "--help"):
        text = " ".join(cli(command, "--help").stdout.split())
        assert "0 done; 1 the daemon cannot be reached or refuses" in text
        assert "2 wrong usage; 3 not found" in text
        assert all(f"{status} {meaning}" in text for status, meaning in EXITS.items())


def test_every_command_has_every_exit_status(node: RunningDaemon, ns: Namespace, keys: list[bytes]) -> None:
    """The table of them is one, in every --help; this is that it is true."""
    at, nowhere = ("--endpoint", node.endpoint), ("--endpoint", NOWHERE)
    runs: dict[int, list[tuple[object, ...]]] = {
        0: [
            ("stats", *at),
            ("inspect", "key", keys[0].hex(), *at),
            ("evict", "--bytes", "1B", "--tenant", "default", "--yes", *at),
            ("evict", "--namespace", ns.digest.hex(), "--yes", *at),
            ("evict", "--all", "--yes", *at),
        ],
        1: [("stats", *nowhere), ("inspect", "session", 1, *nowhere), ("evict", "--all", "--yes", *nowhere)],
        2: [
            ("stats", "--watch", "0", *at),
            ("stats", "--endpoint", "nonsense"),
            ("inspect", "key", "0", *at),
            ("inspect", "key", keys[0].hex(), "--tenant", "no such", *at),
            ("evict", *at),
            ("evict", "--all", *at),
            ("evict", "--all", "--yes", "--tenant", "no such", *at),
            ("evict", "--all", "--yes", "--tenant", "", *at),
        ],
        3: [
            ("inspect", "key", "00" * 4, *at),
            ("inspect", "session", 0, "--end", "--yes", *at),
            ("evict", "--key", "00" * 32, *at),
            ("evict", "--key", "00" * 32, "--tenant", "nobody", *at),
            ("evict", "--namespace", "00" * 4, *at),
            ("evict", "--namespace", "00" * 4, "--tenant", "nobody", *at),
            ("evict", "--bytes", "1GiB", "--tenant", "nobody", *at),
            ("evict", "--all", "--tenant", "nobody", *at),
            ("evict", "--all", "--tenant", "nobody", "--yes", "--json", *at),
        ],
    }
    assert runs.keys() == EXITS.keys() - {EXIT_NOT_WELL}, "of an SSD that is not well: test_ssd_operation.py"
    for status, commands in runs.items():
        for command in commands:
            done = within(*command)
            assert done.exit_code == status, (command, done.stderr)
            assert bool(done.stderr) == (status != 0)
    ns.put(keys, bytes(3 * 4096))


# -- ending a session


def victim(node: RunningDaemon, client: Client) -> tuple[Wire, int]:
    wire = Wire(node.socket)
    found = session(client, "wire")
    assert found is not None
    return wire, found["id"]


def test_a_session_is_ended_when_asked_for_with_yes(node: RunningDaemon, client: Client) -> None:
    wire, number = victim(node, client)
    with wire:
        done = cli("inspect", "session", number, "--end", "--yes", "--json", "--endpoint", node.endpoint)
        assert (done.returncode, json.loads(done.stdout)) == (0, {"found": True, "quarantined": 0})
        assert wire.last_words() == "an administrator ended this session"
    eventually(lambda: session(client, "wire") is None)
    assert cli("inspect", "session", number, "--end", "--yes", "--endpoint", node.endpoint).returncode == 3


def test_the_end_of_a_session_is_told_as_what_it_is(node: RunningDaemon) -> None:
    """An administrator who ended one found its client there again at once, with all that it had held."""
    with Client(node.endpoint, name="comes-back") as back:
        ns = back.raw_namespace("kept", 4096)
        ns.put([ns.key(b"one")], bytes(4096))
        with ns.acquire([ns.key(b"one")]):
            before = session(back, "comes-back")
            assert before is not None
            end = ("inspect", "session", before["id"], "--end", "--yes", "--endpoint", node.endpoint)
            done = cli(*end)
            assert (done.returncode, done.stderr) == (0, "")
            process = f"process {os.getpid()}"
            assert done.stdout.startswith(f"ended session {before['id']}: its connection is closed\n")
            assert f"What {process} may still look at or write to" in done.stdout
            assert "1 leased" in done.stdout
            assert "connects again at its next call, under another number" in done.stdout
            assert f"To keep it away, end {process}." in done.stdout
            again = cli(*end)
            assert (again.returncode, again.stdout) == (3, "")
            assert f"there is no session {before['id']}" in again.stderr
            after = eventually(lambda: session(back, "comes-back"))
            assert after["id"] != before["id"], "as was said"
            assert after["leased_slots"] == 1
        ns.clear()


def test_without_a_terminal_a_session_is_not_ended_unasked(node: RunningDaemon, client: Client) -> None:
    wire, number = victim(node, client)
    with wire:
        done = cli("inspect", "session", number, "--end", "--endpoint", node.endpoint, stdin="y\n")
        assert done.returncode == 2
        assert "add --yes" in done.stderr
        wire.call(health=pb.HealthRequest())
    eventually(lambda: session(client, "wire") is None)


def test_a_session_that_has_ended_is_not_ended_again_while_its_process_lives(
    node: RunningDaemon, client: Client, ns: Namespace
) -> None:
    with Wire(node.socket, hello=False) as wire:
        wire.call(hello=pb.HelloRequest(protocol=1, client="stays"))
        opened = wire.call(open_namespace=pb.OpenNamespaceRequest(digest=ns.digest, block_bytes=4096))
        wire.call(segments=pb.SegmentsRequest(ids=opened.open_namespace.segments))
        wire.call(reserve=pb.ReserveRequest(namespace_id=opened.open_namespace.namespace_id, count=1))
        stays = session(client, "stays")
        assert stays is not None
        end = ("inspect", "session", stays["id"], "--end", "--yes", "--endpoint", node.endpoint)
        done = cli(*end)
        assert (done.returncode, "(1 granted slots)" in done.stdout) == (0, True)
    again = cli(*end)
    assert (again.returncode, again.stdout) == (3, "")
    assert f"there is no session {stays['id']} any more" in again.stderr
    assert f"when process {os.getpid()}, if it lives, exits" in again.stderr


@pytest.mark.parametrize(("answer", "status"), [("n", 1), ("", 1), ("y", 0)])
def test_at_a_terminal_it_asks(node: RunningDaemon, client: Client, answer: str, status: int) -> None:
    wire, number = victim(node, client)
    with wire:
        terminal = Terminal("inspect", "session", number, "--end", "--endpoint", node.endpoint)
        assert f"This ends session {number} of 'wire'" in terminal.until("[y/N]")
        terminal.type(f"{answer}\n")
        terminal.until("nothing was changed" if status else "ended session")
        assert terminal.end() == status
        if status:
            wire.call(health=pb.HealthRequest())
        else:
            assert wire.last_words() == "an administrator ended this session"
    eventually(lambda: session(client, "wire") is None)
