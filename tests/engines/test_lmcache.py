"""LMCache: its server and storage manager over our plugins. Chunks come back exactly or not at all; none raises."""

import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_client import Client
from tests.conftest import RunningDaemon, eventually
from tests.engines.engine_process import EngineProcess, environment, python_of

PYTHON = python_of("KVSTORED_LMCACHE_PYTHON")
LMCACHE = PYTHON.with_name("lmcache")
RIG = Path(__file__).with_name("lmcache_rig.py")
IMPORT_S, SERVER_S, BENCH_S, STOP_S = 120.0, 90.0, 120.0, 30.0
OBJECT_BYTES = 2 * 4 * 128 * 64 * 2
YES, NO = [True] * 6, [False] * 6
L2 = {"type": "plugin", "module_path": "kvstore_client.connectors.lmcache.l2", "class_name": "KVStoreL2Adapter"}


def quiet_environment() -> dict[str, str]:
    return {**environment(), "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    process = EngineProcess(PYTHON, RIG, tmp_path_factory.mktemp("lmcache") / "log")
    try:
        process.call("notices", timeout_s=IMPORT_S)
        yield process
    finally:
        process.close()


@pytest.fixture
def call(process: EngineProcess) -> Iterator[Callable[..., Any]]:
    yield process.call
    process.call("close_all")


@pytest.fixture
def adapter(call: Callable[..., Any], daemon: RunningDaemon) -> str:
    """An L2 adapter over `daemon`."""
    call("adapter", "one", daemon.endpoint, {})
    return "one"


# -- the L2 adapter: tasks


def test_objects_come_back_exactly_in_another_adapter(
    call: Callable[..., Any], daemon: RunningDaemon, adapter: str
) -> None:
    assert call("look_up", adapter, 6, {}) == NO
    assert call("load", adapter, 6, 1, {}) == [NO, YES]
    assert call("store", adapter, 6, 1, {}) == [True, 6 * OBJECT_BYTES]
    call("adapter", "other", daemon.endpoint, {})
    assert call("look_up", "other", 6, {}) == YES
    assert call("load", "other", 6, 1, {}) == [YES, YES]
    assert call("store", "other", 6, 2, {}) == [True, 0]  # they are there already
    assert call("load", "other", 6, 1, {}) == [YES, YES]


def test_every_object_is_looked_for_also_behind_a_gap(call: Callable[..., Any], adapter: str) -> None:
    call("store", adapter, 2, 1, {})
    call("store", adapter, 1, 7, {"first": 4})
    there = [True, True, False, False, True, False]
    assert call("look_up", adapter, 6, {}) == there
    assert call("look_up", adapter, 6, {"undescribed": True}) == there
    loaded, right = call("load", adapter, 6, 1, {})
    assert loaded == there
    assert right == [True, True, True, True, False, True]  # the fifth was stored as the first of another seed
    assert call("load", adapter, 1, 7, {"first": 4}) == [[True], [True]]


def test_what_is_stored_under_another_identity_is_not_found(
    call: Callable[..., Any], daemon: RunningDaemon, adapter: str
) -> None:
    call("store", adapter, 6, 1, {})
    others: list[dict[str, Any]] = [
        {"model_name": "other"},
        {"kv_rank": 2},
        {"object_group_id": 1},
        {"cache_salt": "user"},
        {"dtype": "float16"},
        {"shape": [2, 4, 64, 128]},
        {"first": 100},
    ]
    for other in others:
        assert call("look_up", adapter, 6, other) == NO, other
        assert call("load", adapter, 6, 1, other)[0] == NO, other
    call("adapter", "revised", daemon.endpoint, {"revision": "2"})
    assert call("look_up", "revised", 6, {}) == NO
    assert call("look_up", adapter, 6, {}) == YES


def test_the_descriptors_differ(call: Callable[..., Any], daemon: RunningDaemon) -> None:
    fds = call("adapter", "one", daemon.endpoint, {}) + call("adapter", "other", daemon.endpoint, {})
    assert len(set(fds)) == 6


def leased(client: Client) -> int:
    return sum(pool["leased"] for pool in client.stats()["pools"])


def test_a_lock_holds_objects_until_it_is_unlocked(
    call: Callable[..., Any], daemon: RunningDaemon, adapter: str
) -> None:
    call("store", adapter, 6, 1, {})
    with Client(daemon.endpoint) as client:
        assert leased(client) == 0
        call("look_up", adapter, 6, {})
        call("look_up", adapter, 4, {})
        assert leased(client) == 6
        assert call("status", adapter)["locked"] == 6
        call("unlock", adapter, 6, {})
        assert call("status", adapter)["locked"] == 4  # by the second lookup
        call("unlock", adapter, 4, {})
        assert call("status", adapter)["locked"] == 0
        eventually(lambda: leased(client) == 0, what="the leases to end")
        call("unlock", adapter, 6, {})


def test_a_lock_that_nobody_ends_ends_without_another_call(
    call: Callable[..., Any], daemon: RunningDaemon, adapter: str
) -> None:
    call("store", adapter, 6, 1, {})
    usual = call("lock_time", 0.3)
    try:
        assert call("look_up", adapter, 6, {}) == YES
        with Client(daemon.endpoint) as client:
            assert leased(client) == 6
            eventually(lambda: leased(client) == 0, what="the locks to end")
    finally:
        call("lock_time", usual)
    assert call("status", adapter)["locked"] == 0
    assert call("load", adapter, 6, 1, {}) == [YES, YES]


def test_thousands_of_objects_that_are_not_there_are_looked_for_in_time(call: Callable[..., Any], adapter: str) -> None:
    call("store", adapter, 6, 1, {})
    began = time.monotonic()
    assert sum(call("look_up", adapter, 10000, {})) == 6
    assert time.monotonic() - began < 5.0


def test_objects_are_deleted_together_and_a_silent_daemon_is_waited_for_once(
    call: Callable[..., Any], daemon: RunningDaemon, adapter: str
) -> None:
    call("store", adapter, 50, 1, {})
    call("delete", adapter, 20, {})
    assert sum(call("look_up", adapter, 50, {})) == 30
    daemon.pause()
    try:
        began = time.monotonic()
        call("delete", adapter, 50, {})
        assert time.monotonic() - began < 2.5
    finally:
        daemon.resume()


def test_after_close_every_task_is_answered(call: Callable[..., Any], adapter: str) -> None:
    assert call("closed", adapter) == [False, [False], [False], False]


def test_locked_objects_are_not_evicted_and_locks_do_not_stop_stores(
    call: Callable[..., Any], start_daemon: Callable[..., RunningDaemon]
) -> None:
    daemon = start_daemon(host__size="8MiB")  # a quarter: 16 objects
    call("adapter", "one", daemon.endpoint, {})
    call("store", "one", 6, 1, {})
    assert call("look_up", "one", 6, {}) == YES
    for i in range(1, 13):
        assert call("store", "one", 10, i, {"first": 100 * i}) == [True, 10 * OBJECT_BYTES]
    assert call("load", "one", 6, 1, {}) == [YES, YES]
    call("unlock", "one", 6, {})
    # More than may be locked is found all the same, and as much as may be is locked.
    call("store", "one", 40, 3, {"first": 2000})
    found = call("look_up", "one", 40, {"first": 2000})
    assert 8 <= call("status", "one")["locked"] <= 16
    assert call("load", "one", 40, 3, {"first": 2000}) == [found, [True] * 40]
    assert sum(found) > 16


def test_listeners_hear_what_was_stored_read_and_deleted(call: Callable[..., Any], adapter: str) -> None:
    call("store", adapter, 6, 1, {})
    call("store", adapter, 6, 1, {})
    call("load", adapter, 8, 1, {})
    call("delete", adapter, 8, {})
    assert call("look_up", adapter, 6, {}) == NO
    assert call("notices") == [["stored", 6, 6 * OBJECT_BYTES], ["accessed", 6], ["deleted", 6]]


def test_no_task_raises_and_each_is_answered(call: Callable[..., Any], adapter: str) -> None:
    assert call("nonsense", adapter) == [False, [False, False], [False, False]]
    assert call("status", adapter)["failed"] == {"store": 1, "lookup": 1, "load": 1}
    assert call("store", adapter, 6, 1, {})[0]


def test_settings_that_are_not_known_are_refused(call: Callable[..., Any], daemon: RunningDaemon) -> None:
    error = call("adapter_error", daemon.endpoint, {"endpiont": "x"})
    assert error == "InvalidArgument: endpiont: no such setting; there are endpoint, revision, tenant, timeout_s"


def test_a_daemon_that_is_away_is_a_miss_and_comes_back(
    call: Callable[..., Any], daemon: RunningDaemon, adapter: str
) -> None:
    call("store", adapter, 6, 1, {})
    call("look_up", adapter, 6, {})
    daemon.kill()
    assert call("look_up", adapter, 6, {}) == NO
    assert call("load", adapter, 6, 1, {}) == [NO, YES]
    assert call("store", adapter, 6, 1, {}) == [False, 0]
    status = call("status", adapter)
    assert (status["is_healthy"], status["failed"]["store"]) == (False, 1)
    call("unlock", adapter, 6, {})
    daemon.restart()
    eventually(lambda: call("store", adapter, 6, 1, {})[0], what="the adapter to be connected again")
    assert call("load", adapter, 6, 1, {}) == [YES, YES]
    assert call("status", adapter)["is_healthy"]


def test_a_daemon_that_does_not_answer_ends_tasks_in_time(call: Callable[..., Any], daemon: RunningDaemon) -> None:
    call("adapter", "one", daemon.endpoint, {"timeout_s": 0.1})
    call("store", "one", 6, 1, {})
    daemon.pause()
    try:
        began = time.monotonic()
        call("look_up", "one", 6, {})
        assert call("store", "one", 6, 2, {"first": 50}) == [False, 0]
        assert time.monotonic() - began < 2.0
    finally:
        daemon.resume()


def test_lmcaches_own_benchmark_verifies_what_it_stored(start_daemon: Callable[..., RunningDaemon]) -> None:
    daemon = start_daemon(host__size="128MiB")
    adapter = json.dumps({**L2, "adapter_params": {"endpoint": daemon.endpoint}})
    command = [str(LMCACHE), "bench", "l2", "--num-keys", "32", "--no-skip-verify", "--lookup-max-hit-rate", "1.0"]
    done = subprocess.run(
        [*command, "--l2-adapter", adapter],
        cwd=daemon.directory,
        env=quiet_environment(),
        capture_output=True,
        text=True,
        timeout=BENCH_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 32 keys data verified OK." in done.stdout + done.stderr


# -- `lmcache server`


class LMCacheServer:
    """`lmcache server` with our adapter under it, in a directory of the test's."""

    def __init__(self, directory: Path, endpoint: str) -> None:
        self.directory = directory
        self.adapter = json.dumps({**L2, "adapter_params": {"endpoint": endpoint}})
        self.port, self.http = free_port(), free_port()
        self.start()

    def start(self) -> None:
        command = [str(LMCACHE), "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--http-host", "127.0.0.1", "--http-port", str(self.http), "--l1-size-gb", "0.125"]
        command += ["--eviction-policy", "LRU", "--chunk-size", "128", "--supported-transfer-mode", "engine_driven"]
        command += ["--shm-name", f"kvstored_test_{os.getpid()}", "--l2-adapter", self.adapter]
        self.log = self.directory / "lmcache.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.directory, env=quiet_environment(), stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        try:
            eventually(lambda: self.process.poll() is not None or self._answers(), SERVER_S, "lmcache server")
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-4000:]
        except BaseException:
            self.stop()
            raise

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/api/healthcheck", timeout=1) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False

    def stop(self) -> None:
        """As its service manager would, and with force where that takes too long."""
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture
def server(daemon: RunningDaemon) -> Iterator[LMCacheServer]:
    with tempfile.TemporaryDirectory(prefix="kvstored-lmcache-") as directory:
        server = LMCacheServer(Path(directory), daemon.endpoint)
        try:
            yield server
        finally:
            server.stop()


def blocks(client: Client) -> int:
    return sum(pool["blocks"] for pool in client.stats()["pools"])


def test_a_server_restarted_with_an_empty_memory_still_hits(
    call: Callable[..., Any], daemon: RunningDaemon, server: LMCacheServer
) -> None:
    call("connect", "one", server.port)
    assert call("server_retrieve", "one", 11, 1) == [0, None]
    assert call("server_store", "one", 11, 1)
    with Client(daemon.endpoint) as client:
        eventually(lambda: blocks(client) == 4, 20.0, "the server to write behind")
        call("disconnect", "one")
        server.stop()
        server.start()
        call("connect", "two", server.port)
        assert call("server_retrieve", "two", 11, 1) == [4, True]
        assert call("server_retrieve", "two", 12, 1) == [0, None]
        assert call("server_store", "two", 12, 2)
        assert call("server_retrieve", "two", 12, 2) == [4, True]
        eventually(lambda: leased(client) == 0, 10.0, "the locks of lookups to end")
    call("disconnect", "two")


def test_a_server_whose_daemon_dies_goes_on(
    call: Callable[..., Any], daemon: RunningDaemon, server: LMCacheServer
) -> None:
    call("connect", "one", server.port)
    assert call("server_store", "one", 11, 1)
    daemon.kill()
    assert call("server_store", "one", 12, 2)
    assert call("server_retrieve", "one", 12, 2) == [4, True]  # from its own memory
    assert call("server_retrieve", "one", 13, 2) == [0, None]
    daemon.restart()
    assert call("server_store", "one", 14, 3)
    with Client(daemon.endpoint) as client:
        eventually(lambda: blocks(client) >= 4, 20.0, "what is stored from now on to be written behind")
    call("disconnect", "one")


# -- the storage manager


def test_a_storage_manager_gets_from_us_what_its_memory_has_not(
    call: Callable[..., Any], daemon: RunningDaemon
) -> None:
    call("manager", "one", daemon.endpoint, {})
    assert call("manager_found", "one", 4) == 0
    call("manager_put", "one", 4, 1)
    with Client(daemon.endpoint) as client:
        eventually(lambda: blocks(client) == 4, what="the chunks to be written behind")
    call("manager_forget", "one")
    assert call("manager_found", "one", 6) == 4
    assert call("manager_get", "one", 6, 1) == [True] * 4 + [None] * 2


def test_a_chunk_that_is_not_full_comes_back_as_what_it_was(call: Callable[..., Any], daemon: RunningDaemon) -> None:
    call("manager", "one", daemon.endpoint, {})
    call("manager_put", "one", 1, 5, 100)
    with Client(daemon.endpoint) as client:
        eventually(lambda: blocks(client) == 1, what="the chunk to be written behind")
    call("manager_forget", "one")
    assert call("manager_get", "one", 1, 5, 100) == [True]


def test_chunks_that_nobody_waits_for_any_more_are_given_back(
    process: EngineProcess, call: Callable[..., Any], daemon: RunningDaemon
) -> None:
    call("manager", "one", daemon.endpoint, {})
    call("manager_put", "one", 100, 1)
    with Client(daemon.endpoint) as client:
        eventually(lambda: blocks(client) == 100, what="the chunks to be written behind")
    call("manager_forget", "one")
    tries = [call("manager_gives_up", "one", 100) for _ in range(10)]
    assert [left for _, left in tries] == [0] * 10
    assert any(cancelled for cancelled, _ in tries)
    assert "being garbage collected" not in process.log()  # as LMCache says of those that were forgotten
    assert call("manager_get", "one", 100, 1) == [True] * 100


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ({"user": "a@role%b"}, {"user": "a", "role": "b"}),
        ({"user": "a", "role": "b"}, {"user": "a@role%b"}),
        ({"a%b": "c"}, {"a": "b%c"}),
    ],
)
def test_tags_that_are_spelt_alike_are_different_chunks(
    call: Callable[..., Any], daemon: RunningDaemon, stored: dict[str, str], asked: dict[str, str]
) -> None:
    call("manager", "one", daemon.endpoint, {})
    assert call("manager_tags", "one", stored, asked) == [True, False]


def test_a_read_for_which_lmcache_has_no_room_is_a_miss_and_nobody_waits_behind_it(
    call: Callable[..., Any], daemon: RunningDaemon
) -> None:
    call("manager", "one", daemon.endpoint, {})
    call("manager_put", "one", 4, 1)
    with Client(daemon.endpoint) as client:
        eventually(lambda: blocks(client) == 4, what="the chunks to be written behind")
        call("manager_forget", "one")
        assert call("manager_full", "one", 4) == [False] * 4 + [True] * 4
        assert leased(client) == 0


def test_puts_for_a_silent_daemon_hold_none_of_lmcaches_memory_for_long(
    call: Callable[..., Any], daemon: RunningDaemon
) -> None:
    call("manager", "one", daemon.endpoint, {"timeout_s": 0.2})
    daemon.pause()
    try:
        began = time.monotonic()
        assert call("manager_floods", "one", 100) == [1] * 100
        assert time.monotonic() - began < 3.0
    finally:
        daemon.resume()


def test_a_connector_that_is_closed_answers_and_holds_nothing(call: Callable[..., Any], daemon: RunningDaemon) -> None:
    call("manager", "one", daemon.endpoint, {})
    assert call("manager_closed", "one") == [None, None, [None], 0, 1, 1]


def put_again(call: Callable[..., Any]) -> bool:
    """Whether what is put now is there when LMCache's memory is empty."""
    call("manager_put", "one", 4, 1)
    call("manager_forget", "one")
    return bool(call("manager_found", "one", 4) == 4)


def test_a_storage_manager_does_without_a_daemon_that_dies(call: Callable[..., Any], daemon: RunningDaemon) -> None:
    call("manager", "one", daemon.endpoint, {"timeout_s": 0.2})
    call("manager_put", "one", 4, 1)
    with Client(daemon.endpoint) as client:
        eventually(lambda: blocks(client) == 4, what="the chunks to be written behind")
    daemon.kill()
    assert call("manager_found", "one", 4) == 4  # of its own memory
    call("manager_forget", "one")
    assert call("manager_found", "one", 4) == 0
    assert call("manager_get", "one", 4, 1) == [None] * 4
    call("manager_put", "one", 4, 1)
    call("manager_forget", "one")
    daemon.restart()
    eventually(lambda: put_again(call), what="the connector to be connected again")
    assert call("manager_get", "one", 4, 1) == [True] * 4
