"""`kvstore-cli evict` against a real daemon: what goes, what it asks before, and what it says."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_client import Client, Namespace
from kvstored.v1 import KEYS_MAX
from tests.conftest import RunningDaemon, eventually
from tests.daemon.cli import Terminal, cli, in_file, usage
from tests.nodes import running, totals

BLOCK = 4096
BLOCKS = 100


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    with running(host__size="64MiB") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def client(node: RunningDaemon) -> Iterator[Client]:
    with Client(node.endpoint) as client:
        yield client


@pytest.fixture
def ns(client: Client) -> Iterator[Namespace]:
    """A namespace with BLOCKS blocks, all there are."""
    ns = client.raw_namespace("blocks", BLOCK)
    ns.put(keys(ns), bytes(BLOCKS * BLOCK))
    yield ns
    ns.clear()


def keys(ns: Namespace, count: int = BLOCKS) -> list[bytes]:
    return [ns.key(b"%d" % i) for i in range(count)]


def evict(node: RunningDaemon, *arguments: object, stdin: str = "") -> tuple[int, dict[str, Any], str]:
    """Without a terminal: exit status, what it says to programs, and its messages."""
    done = cli("evict", *arguments, "--json", "--endpoint", node.endpoint, stdin=stdin)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def said(blocks: int, held: int = 0, absent: int = 0, pinned: int = 0, leased: int = 0) -> dict[str, Any]:
    return {
        "blocks": blocks,
        "size_bytes": blocks * BLOCK,
        "held": held,
        "absent": absent,
        "held_bytes": held * BLOCK,
        "pinned": pinned,
        "pinned_bytes": pinned * BLOCK,
        "leased": leased,
        "leased_bytes": leased * BLOCK,
        "ssd_blocks": 0,
        "ssd_bytes": 0,
        "gpu_blocks": 0,
        "gpu_bytes": 0,
        "not_on_disk_yet": "",
        "ssd_not_known": "",
    }


def left(client: Client) -> int:
    return totals(client.stats())["blocks"]


# -- what goes


def test_keys_go_and_what_is_absent_is_told(node: RunningDaemon, client: Client, ns: Namespace) -> None:
    some = [key.hex() for key in keys(ns)[-2:]]
    done = evict(node, "--key", some[0], "--key", some[1], "--key", "00" * 32)
    assert done == (0, said(2, absent=1), "")
    assert left(client) == BLOCKS - 2


def test_keys_that_are_all_absent_are_exit_3(node: RunningDaemon, client: Client, ns: Namespace) -> None:
    status, done, message = evict(node, "--key", "00" * 32)
    assert (status, done) == (3, said(0, absent=1))
    assert "none of these keys is here" in message


def test_keys_come_from_a_file_or_a_pipe_in_messages_that_fit(
    node: RunningDaemon, client: Client, ns: Namespace, tmp_path: Path
) -> None:
    absent = [key.hex() for key in keys(client.raw_namespace("absent", BLOCK), KEYS_MAX)]
    names = in_file(tmp_path, [*absent, "", f"  {keys(ns)[99].hex()}  ", keys(ns)[98].hex()])
    assert evict(node, "--keys-from", names, "--yes") == (0, said(2, absent=KEYS_MAX), "")
    done = evict(node, "--keys-from", "-", "--key", keys(ns)[97].hex(), stdin=f"{keys(ns)[96].hex()}\n")
    assert done == (0, said(2), "")


def test_a_namespace_goes_by_the_beginning_of_its_digest(node: RunningDaemon, client: Client, ns: Namespace) -> None:
    other = client.raw_namespace("other", BLOCK)
    other.put(keys(other, 3), bytes(3 * BLOCK))
    assert evict(node, "--namespace", ns.digest.hex()[:8], "--yes") == (0, said(BLOCKS), "")
    assert other.match(keys(other, 3)).blocks == 3
    assert evict(node, "--namespace", other.digest.hex(), "--yes") == (0, said(3), "")
    status, _, message = evict(node, "--namespace", "00" * 4)
    assert status == 3
    assert "there is no namespace 00000000" in message


def test_bytes_are_freed_as_the_configuration_writes_them(node: RunningDaemon, client: Client, ns: Namespace) -> None:

    def granted() -> int:
        return sum(row["granted_slots"] for row in client.stats()["sessions"])

    eventually(lambda: not granted(), what="granted slots to go back")
    before = client.stats()["host"]["used_bytes"]
    assert evict(node, "--bytes", "17 KB") == (0, said(5), "")
    assert before - client.stats()["host"]["used_bytes"] == 5 * BLOCK
    assert ns.match(keys(ns)).blocks == BLOCKS - 5, "a chain loses its end"


def test_all_of_one_tenant_is_of_no_other(node: RunningDaemon, client: Client, ns: Namespace) -> None:
    with Client(node.endpoint, tenant="other") as other:
        theirs = other.raw_namespace("theirs", BLOCK)
        theirs.put(keys(theirs, 4), bytes(4 * BLOCK))
        assert evict(node, "--all", "--tenant", "other", "--yes") == (0, said(4), "")
        theirs.put(keys(theirs, 4), bytes(4 * BLOCK))
        assert evict(node, "--namespace", theirs.digest.hex(), "--yes")[0] == 3, "it is not of the default tenant"
        assert evict(node, "--all", "--yes") == (0, said(BLOCKS + 4), "")


def test_held_blocks_stay_and_are_told(node: RunningDaemon, client: Client, ns: Namespace) -> None:
    ns.pin(keys(ns)[:3], ttl_s=60)
    with ns.acquire(keys(ns)[2:5]) as lease:
        assert evict(node, "--all", "--yes") == (0, said(BLOCKS - 5, held=5, pinned=3, leased=3), "")
        for form in (("--all",), ("--bytes", "1GiB"), ("--namespace", ns.digest.hex()), ("--key", keys(ns)[2].hex())):
            done = cli("evict", *form, "--yes", "--endpoint", node.endpoint)
            assert done.returncode == 0
            first, pinned, leased = done.stdout.splitlines()
            held = 1 if form[0] == "--key" else 5
            assert f"{held} left ({4 * held}.0 KiB) because they are leased or pinned" in first
            assert pinned.startswith(
                f"pinned: {min(held, 3)} ({4 * min(held, 3)}.0 KiB), until the time of each pin is"
            )
            assert "ns.unpin(keys)" in pinned
            assert leased.startswith(f"leased: {min(held, 3)} ({4 * min(held, 3)}.0 KiB), until the sessions")
            (holder,) = [s["id"] for s in client.stats()["sessions"] if s["leased_slots"]]
            assert f": {holder} (pid-{os.getpid()}, process {os.getpid()}) (`kvstore-cli inspect session ID`)" in leased
        assert bytes(lease.views[2]) == bytes(BLOCK)
        assert ns.match(keys(ns)).blocks == 5
    ns.unpin(keys(ns))


def test_people_are_told_in_a_sentence(node: RunningDaemon, ns: Namespace) -> None:
    done = cli("evict", "--key", keys(ns)[99].hex(), "--endpoint", node.endpoint)
    assert done.stdout == ("freed 4.0 KiB: 1 blocks dropped, 0 left because they are leased or pinned, 0 not here\n")


# -- what it asks


def test_a_tenth_is_not_much_and_more_is(node: RunningDaemon, client: Client, ns: Namespace) -> None:
    assert evict(node, "--bytes", f"{BLOCKS * BLOCK // 10}B") == (0, said(10), "")
    status, done, message = evict(node, "--bytes", f"{BLOCKS * BLOCK // 10}B")
    assert (status, done) == (2, {}), "ten of ninety are more"
    assert "up to 10 blocks (40.0 KiB, 11.1 % of all)" in message
    assert "add --yes" in message
    for form in (("--namespace", ns.digest.hex()), ("--all",), ("--keys-from", "-")):
        status, done, message = evict(node, *form, stdin="\n".join(key.hex() for key in keys(ns)))
        assert (status, done) == (2, {})
        assert "up to 90 blocks (360 KiB, 100.0 % of " in message
    assert left(client) == 90


def test_everything_is_asked_about_even_where_there_is_nothing(node: RunningDaemon, client: Client) -> None:
    assert left(client) == 0
    assert evict(node, "--all")[0] == 2
    assert evict(node, "--all", "--yes") == (0, said(0), "")


@pytest.mark.parametrize(("answer", "status"), [("n", 1), ("", 1), ("y", 0)])
def test_at_a_terminal_it_asks(node: RunningDaemon, client: Client, ns: Namespace, answer: str, status: int) -> None:
    terminal = Terminal("evict", "--bytes", "100KiB", "--endpoint", node.endpoint, "--json", out=False)
    assert "This drops up to 25 blocks (100 KiB, 25.0 % of all)" in terminal.until("[y/N]")
    terminal.type(f"{answer}\n")
    assert terminal.process.stdout is not None
    out = terminal.process.stdout.read()
    assert terminal.end() == status
    assert left(client) == (75 if status == 0 else BLOCKS)
    assert (json.loads(out) if out else None) == (said(25) if status == 0 else None), "the question is not in the JSON"


# -- wrong usage


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "is wanted"),
        (("--all", "--bytes", "1GiB"), "is wanted"),
        (("--key", "00" * 32, "--namespace", "00" * 32), "is wanted"),
        (("--key", "00"), "64 hexadecimal digits"),
        (("--key", "AB" * 32), "0-9 and a-f"),
        (("--key", " " + "00" * 32), "0-9 and a-f"),
        (("--namespace", "ABCDEF01"), "0-9 and a-f"),
        (("--all", "--tenant", ""), "--tenant is given, and empty"),
        (("--namespace", "0000"), "hexadecimal digits"),
        (("--bytes", "10"), "a number without a unit"),
        (("--bytes", "much"), "not a size"),
        (("--bytes", "0"), "not above 0"),
        (("--bytes", "99999999999999TiB"), "not above 0 and below"),
        (("--keys-from", "/nowhere/keys"), "No such file"),
        (("--keys-from", "/dev/null"), "there is no key in /dev/null"),
    ],
    ids=str,
)
def test_wrong_usage_is_exit_2_without_a_daemon(arguments: tuple[str, ...], why: str) -> None:
    done = usage("evict", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert why in done.stderr.replace("\n", " ")


def test_a_line_that_is_no_key_is_named(tmp_path: Path) -> None:
    path = in_file(tmp_path, ["00" * 32, "\x1b[2Jnonsense" + "x" * 500])
    done = usage("evict", "--keys-from", path)
    assert done.exit_code == 2
    assert "keys, line 2: key" in done.stderr
    assert "\x1b" not in done.stderr


def test_no_daemon_is_exit_1() -> None:
    done = cli("evict", "--all", "--yes", "--endpoint", "unix:///nowhere/kvstored.sock")
    assert (done.returncode, done.stdout) == (1, "")
