"""The daemon is killed again and again while clients put, remove, prefetch and read: what was said stays true.

No wrong byte at any moment; no block that was removed comes back; every block that was
acknowledged as durable, and not removed since, is there after every start; and in the end files,
catalogue, `du` and `stats` agree.
Which moments the kills meet follows from the seed, which is printed, and from the machine.
Of either layout of the SSD.
"""

import json
import os
import random
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore.tiers.ssd.format import EXTENTS, ROCKSDB
from kvstore_client import Client, Namespace
from tests.conftest import START_S, RunningDaemon, eventually
from tests.faults.conftest import Program
from tests.faults.tiers import catalogue, du, pieces
from tests.nodes import block

KILLS = {EXTENTS: 78, ROCKSDB: 39}
SIZES = {EXTENTS: "256MiB", ROCKSDB: "128MiB"}
"""Of the second so little that garbage is collected while the daemon is killed."""

CHECKED_EVERY = 13
BLOCK = 16 << 10
CHAINS, LENGTH = 120, 16
"""Of each client: 30 MiB, so that nothing need be evicted from the SSD, and most is from memory."""

SAMPLE = 400
MOMENT_S = 0.3
"""A life's length, from its start or from when it serves."""

CLIENT = """
import json, os, random, sys, threading, time
import numpy as np
from kvstore_client import Client, KVStoreError
from kvstore_client.removals import Removals
from tests.nodes import block

endpoint, seed, log, me, chains, length, size = sys.argv[1:5] + [int(number) for number in sys.argv[5:8]]
rng = random.Random(f"{seed} {me}")
log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
client = Client(endpoint, name=me, timeout_s=2.0)
ns = client.raw_namespace("killed", size)
keys_of = [[ns.key(f"{me} {c} {i}".encode()) for i in range(length)] for c in range(chains)]
out = np.empty((length, size), np.uint8)
done = dict.fromkeys(("durable", "put", "read", "hits", "prefetched", "removed", "refused"), 0)
tickets = []
gone = set()  # removed, and not stored again: no kill brings them back

def note(kind, keys):
    os.write(log, "".join(f"{kind} {key.hex()}\\n" for key in keys).encode())

def put(keys, durable):
    gone.difference_update(keys)
    result = ns.put(keys, [block(key, size) for key in keys], durable=durable)
    good = not result.rejected and result.error is None
    if durable and good:
        note("D", keys)
    done["durable" if durable else "put"] += good
    done["refused"] += not good

def read(keys):
    found = ns.get_into(keys, list(out[: len(keys)]))
    done["read"] += 1
    done["hits"] += found
    for key, got in zip(keys[:found], out):
        if key in gone:
            print(f"BACK is {key.hex()}, which was removed", flush=True)
            os._exit(5)
        if got.tobytes() != block(key, size):
            print(f"WRONG bytes under {key.hex()}", flush=True)
            os._exit(3)

unsure = []
Removals.said = lambda self, why: unsure.append(why) if why else None

def remove(keys):
    note("R", keys)
    unsure.clear()
    done["removed"] += ns.remove(keys)
    if not unsure:  # else the answer says that they may be back
        gone.update(keys)

def prefetch(keys):
    tickets.append(ns.prefetch(keys, deadline_s=1.0))
    done["prefetched"] += 1
    if len(tickets) > 4:
        old = tickets.pop(0)
        old.cancel() if rng.random() < 0.5 else old.wait()

pause = threading.Event()
print("begun", flush=True)
while not over.is_set():
    chain = rng.choice(keys_of)
    some = chain[: rng.randint(1, length)]
    what = rng.random()
    began = time.monotonic()
    try:
        if what < 0.35:
            put(some, True)
        elif what < 0.5:
            put(some, False)
        elif what < 0.8:
            read(chain if what < 0.7 else [rng.choice(chain)])
        elif what < 0.9:
            prefetch(chain)
        else:
            at = rng.randint(0, length - 1)
            remove(chain[at : at + 3])
    except KVStoreError as e:
        done["refused"] += 1
        pause.wait(0.01)
    if client.health().reachable is False:
        pause.wait(0.01)
    took = time.monotonic() - began
    if took > 40:
        print(f"HUNG for {took:.1f} s", flush=True)
        os._exit(4)
client.close()
print(json.dumps(done), flush=True)
"""


class Killed(RunningDaemon):
    """A daemon that is started without a wait for anything."""

    def launch(self) -> None:
        with self._log_path.open("ab") as log:
            self._log_start = log.tell()
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def serves(self) -> None:
        eventually(lambda: self._ready() or self.process.poll() is not None, START_S, "the daemon to be ready")
        assert self.process.poll() is None, f"kvstored ended with {self.process.returncode}:\n{self.output()}"


def promised(logs: list[Path]) -> set[bytes]:
    """Keys acknowledged as durable, and not asked to be removed since."""
    keys: set[bytes] = set()
    for log in logs:
        for line in log.read_text().splitlines():
            kind, _, key = line.partition(" ")
            if kind == "D":
                keys.add(bytes.fromhex(key))
            else:
                keys.discard(bytes.fromhex(key))
    return keys


def missing(ns: Namespace, keys: list[bytes]) -> list[bytes]:
    """Those of them that cannot be read; fails at the first wrong byte."""
    at, lost, out = 0, [], np.empty((64, BLOCK), np.uint8)
    while at < len(keys):
        part = keys[at : at + len(out)]
        found = ns.get_into(part, list(out[: len(part)]))
        for key, got in zip(part[:found], out, strict=False):
            assert got.tobytes() == block(key, BLOCK), f"wrong bytes under {key.hex()}"
        at += found
        if found < len(part):
            lost.append(keys[at])
            at += 1
    return lost


def check_promises(endpoint: str, logs: list[Path], sample: int, rng: random.Random) -> int:
    """What was promised is there, as soon as all records are known again; how many blocks were looked at."""
    with Client(endpoint, name="judge", timeout_s=10.0) as client:
        ns = client.raw_namespace("killed", BLOCK)
        eventually(lambda: client.stats()["ssd"]["state"] == "open", 30, "the SSD tier to be open")
        keys = sorted(promised(logs))
        keys = rng.sample(keys, min(sample, len(keys)))
        lost: list[bytes] = keys

        def all_there() -> bool:
            nonlocal lost
            lost = missing(ns, lost)
            if lost:  # its owner may have removed it meanwhile
                still = promised(logs)
                lost = [key for key in lost if key in still]
            return not lost

        try:
            eventually(all_there, 10, "blocks that were acknowledged as durable")
        except AssertionError as e:
            raise AssertionError(f"{len(lost)} durable blocks of {len(keys)} are lost, like {lost[0].hex()}") from e
        return len(keys)


@pytest.fixture
def seed() -> int:
    found = int(os.environ.get("KVSTORED_TEST_SEED", "0")) or secrets.randbits(32)
    print(f"KVSTORED_TEST_SEED={found}")
    return found


@pytest.mark.timeout(1500)  # more than a hundred starts
@pytest.mark.parametrize("layout", KILLS)
def test_a_daemon_that_is_killed_at_any_moment_loses_nothing_that_was_durable(
    tmp_path: Path, seed: int, start_program: Callable[..., Program], layout: str
) -> None:
    rng, began, pause = random.Random(seed), time.monotonic(), threading.Event()
    settings = {
        "host.size": "8MiB",
        "ssd.path": str(tmp_path / "ssd"),
        "ssd.size": SIZES[layout],
        "ssd.layout": layout,
        "ssd.free_floor": "1MiB",
        "ssd.write_back": "through",
    }
    daemon = Killed(tmp_path, settings)
    logs = [tmp_path / f"acknowledged-{n}" for n in range(2)]
    try:
        programs = [start_program(CLIENT, daemon.endpoint, seed, log, log.name, CHAINS, LENGTH, BLOCK) for log in logs]
        assert [program.line() for program in programs] == ["begun"] * len(programs)
        checked = 0
        for kill in range(1, KILLS[layout] + 1):
            if rng.random() < 0.7:
                daemon.serves()
            pause.wait(rng.random() * MOMENT_S)
            if kill % CHECKED_EVERY == 0:
                daemon.serves()
                checked += check_promises(daemon.endpoint, logs, SAMPLE, rng)
            if rng.random() < 0.1:
                daemon.process.send_signal(signal.SIGTERM)
                pause.wait(rng.random() * 0.2)
            assert daemon.process.poll() in (None, 0, -signal.SIGTERM), f"kvstored died:\n{daemon.output()}"
            daemon.kill()
            daemon.launch()
        daemon.serves()
        ends = [program.finish() for program in programs]
        said = [program.line() for program in programs]
        assert ends == [0, 0], (said, [program.errors[-2000:] for program in programs])
        work = [json.loads(line) for line in said]
        print(
            f"{layout}: {KILLS[layout]} kills in {time.monotonic() - began:.0f} s; "
            f"{checked} blocks checked between; {work}"
        )
        assert all(min(one.values()) > 0 for one in work), work
        checked = check_promises(daemon.endpoint, logs, CHAINS * LENGTH * len(logs), rng)
        print(f"{checked} durable blocks at the end")
        check_accounts(daemon, tmp_path / "ssd")
    finally:
        daemon.kill()
    lives = (tmp_path / "kvstored.log").read_text()
    for word in ("Traceback", "internal error", "out of use", "set aside", "is damaged"):
        assert word not in lives, next(line for line in lives.splitlines() if word in line)


def check_accounts(daemon: RunningDaemon, path: Path) -> None:
    """What the daemon says, what `du` says and what the catalogue says is one thing."""
    with Client(daemon.endpoint, name="judge") as client:

        def settled() -> dict[str, int]:
            found = client.stats()["ssd"]
            queues = {queue["kind"]: queue for queue in found["queues"]}
            busy = any(queue["waiting"] or queue["running"] for queue in queues.values())
            return found if not busy and abs(found["physical_bytes"] - du(path)) <= 1 << 20 else {}

        ssd = eventually(settled, 20, "the figures of the SSD to be those of `du`")
    assert ssd["evicted"] == 0, "the test has promised more than there is room for"
    assert daemon.stop() == 0
    records, segments = catalogue(path)
    assert len(records) == ssd["blocks"]
    assert ssd["used_bytes"] == len(records) * BLOCK
    assert len({(record.segment, record.slot) for record in records}) == len(records), "two records of one slot"
    assert {record.segment for record in records} <= segments.keys()
    if ssd["layout"] == ROCKSDB:
        slots = {(record.segment, record.slot) for record in records}
        assert {(segment, slot) for segment, _, slot in pieces(path)} == slots, "payload of nobody, or a record without"
        assert sum(row.size_bytes for row in segments.values()) == ssd["file_bytes"]
        return
    files = {file.name: file.stat().st_size for file in path.glob("segment-*.kv")}
    assert sum(files.values()) == sum(row.size_bytes for row in segments.values()) == ssd["file_bytes"]
    assert len(files) == len(segments)
