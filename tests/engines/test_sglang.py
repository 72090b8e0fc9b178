"""SGLang: its own factory and host pools over our backend. Pages come back exactly or not at all; nothing raises."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunningDaemon, eventually
from tests.engines.engine_process import EngineProcess, python_of

RIG = Path(__file__).with_name("sglang_rig.py")
START_S = 120.0
PAGES = 8
YES, NO = [True] * PAGES, [False] * PAGES


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    log = tmp_path_factory.mktemp("sglang") / "log"
    process = EngineProcess(python_of("KVSTORED_SGLANG_PYTHON"), RIG, log)
    try:
        process.call("hashes", 1, timeout_s=START_S)
        yield process
    finally:
        process.close()


class Rig:
    """Backends in SGLang's process, over one daemon."""

    def __init__(self, process: EngineProcess, endpoint: str) -> None:
        self.call = process.call
        self.endpoint = endpoint

    def start(self, name: str, pool: Any = None, config: Any = None) -> str:
        self.call("start", name, self.endpoint, pool, config)
        return name

    def hashes(self, pages: int = PAGES, seed: int = 0, page: int = 16) -> list[str]:
        names: list[str] = self.call("hashes", pages, seed, page)
        return names


@pytest.fixture
def rig(process: EngineProcess, daemon: RunningDaemon) -> Iterator[Rig]:
    yield Rig(process, daemon.endpoint)
    process.call("close_all")


LAYOUTS = [
    ("mha", "page_first"),
    ("mha", "page_first_direct"),
    ("mha", "page_head"),
    ("mha", "layer_first"),
    ("mla", "page_first"),
    ("mla", "page_first_direct"),
    ("mla", "layer_first"),
]


# -- what comes back


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_pages_of_every_layout_come_back_exactly(rig: Rig, kind: str, layout: str, dtype: str) -> None:
    pool = {"kind": kind, "layout": layout, "dtype": dtype}
    keys = rig.hashes()
    one, other = rig.start("one", pool), rig.start("other", pool)
    rig.call("fill", one, 1)
    assert rig.call("exists", one, keys) == 0
    assert rig.call("get", one, keys) == NO
    assert rig.call("put", one, keys) == YES
    assert rig.call("exists", one, keys) == PAGES

    rig.call("fill", other, 1)
    rig.call("wipe", other)
    assert rig.call("get", other, keys, 3) == YES
    assert rig.call("same", other, 1, PAGES, 3, 0) == YES
    assert rig.call("same", other, 1, 3, 0, 0) == [False] * 3  # and nothing else was written


def test_a_page_elsewhere_in_the_pool_is_the_same_page(rig: Rig) -> None:
    keys = rig.hashes()
    one = rig.start("one")
    rig.call("fill", one, 1)
    assert rig.call("put", one, keys, 5) == YES
    rig.call("wipe", one)
    assert rig.call("get", one, keys, 11) == YES
    assert rig.call("same", one, 1, PAGES, 11, 5) == YES


def test_the_leading_run_is_found_and_the_rest_is_not(rig: Rig) -> None:
    keys, longer = rig.hashes(), rig.hashes(12)
    one = rig.start("one")
    rig.call("fill", one, 1)
    rig.call("put", one, keys)
    assert keys == longer[:PAGES]
    assert rig.call("exists", one, longer) == PAGES
    assert rig.call("get", one, longer) == YES + [False] * 4
    assert rig.call("exists", one, [*rig.hashes(1, seed=9), *keys]) == 0
    assert rig.call("put", one, longer) == YES + [True] * 4
    assert rig.call("exists", one, longer) == 12


def test_pages_that_are_there_are_not_written_again(rig: Rig, daemon: RunningDaemon) -> None:
    keys = rig.hashes()
    one = rig.start("one")
    rig.call("fill", one, 1)
    rig.call("put", one, keys)
    rig.call("fill", one, 2)
    assert rig.call("put", one, keys) == YES
    rig.call("wipe", one)
    rig.call("get", one, keys)
    assert rig.call("same", one, 1, PAGES) == YES


def test_a_batch_that_goes_on_names_what_is_before_it(rig: Rig) -> None:
    keys = rig.hashes()
    one = rig.start("one")
    rig.call("fill", one, 1)
    assert rig.call("put", one, keys[:4]) == [True] * 4
    assert rig.call("put", one, keys[4:], 4, keys[:4]) == [True] * 4
    rig.call("wipe", one)
    assert rig.call("get", one, keys) == YES
    assert rig.call("same", one, 1, PAGES) == YES


def test_without_the_zero_copy_calls_pages_come_back_as_well(rig: Rig) -> None:
    keys = rig.hashes()
    config = {"extra_config": {"interface_v1": 0}}
    one = rig.start("one", None, config)
    rig.call("fill", one, 1)
    assert rig.call("get_flat", one, keys) == NO
    assert rig.call("put_flat", one, keys)
    rig.call("wipe", one)
    assert rig.call("exists", one, keys) == PAGES
    assert rig.call("get_flat", one, keys) == YES
    assert rig.call("same", one, 1, PAGES) == YES
    assert rig.call("one_by_one", one, "another") == [False, True, True, True, True]


# -- whose it is


def test_what_another_model_rank_or_layout_stored_is_not_found(rig: Rig) -> None:
    keys = rig.hashes()
    plain = {"dtype": "bfloat16"}
    one = rig.start("one", plain, {"tp_size": 2, "pp_size": 2})
    rig.call("fill", one, 1)
    rig.call("put", one, keys)
    both = {"tp_size": 2, "pp_size": 2}
    others: dict[str, tuple[Any, Any]] = {
        "rank": (plain, {**both, "tp_rank": 1}),
        "ranks": (plain, {"tp_size": 4, "pp_size": 2}),
        "stage": (plain, {**both, "pp_rank": 1}),
        "stages": (plain, {"tp_size": 2}),
        "context": (plain, {**both, "attn_cp_size": 2}),
        "model": (plain, {**both, "model_name": "other"}),
        "revision": (plain, {**both, "extra_config": {"revision": "2"}}),
        "salt": (plain, {**both, "extra_config": {"salt": "2"}}),
        "calls": (plain, {**both, "extra_config": {"interface_v1": 0}}),
        "layout": ({**plain, "layout": "layer_first"}, both),
        "order": ({**plain, "layout": "page_first_direct"}, both),
        "dtype": ({"dtype": "float16"}, both),
        "page": ({**plain, "page": 32}, both),
        "heads": ({**plain, "heads": 4}, both),
    }
    found = {}
    for name, (pool, config) in others.items():
        rig.start(name, pool, config)
        found[name] = rig.call("exists", name, keys)
    assert found == dict.fromkeys(others, 0)
    assert rig.call("exists", rig.start("same", plain, both), keys) == PAGES


def test_what_an_engine_with_other_arguments_stored_is_not_found(rig: Rig, tmp_path: Path) -> None:
    keys = rig.hashes()
    found = []
    different = [{"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e5m2"}, {"context_length": 512}]
    for i, arguments in enumerate([{}, *different, {}]):
        rig.call("in_an_engine", str(tmp_path), arguments)
        name = rig.start(f"engine {i}")
        found.append(rig.call("exists", name, keys))
        rig.call("put", name, keys)
    assert found == [0, 0, 0, 0, PAGES]


def test_arguments_that_name_pages_are_arguments_of_this_release(rig: Rig, tmp_path: Path) -> None:
    assert rig.call("unknown_arguments", str(tmp_path)) == []


def test_random_weights_are_not_those_of_the_model(rig: Rig, tmp_path: Path) -> None:
    keys = rig.hashes()
    rig.call("in_an_engine", str(tmp_path), {"load_format": "dummy"})
    rig.call("put", rig.start("dummy"), keys)
    rig.call("in_an_engine", str(tmp_path), {})
    assert rig.call("exists", rig.start("real"), keys) == 0


def test_another_model_that_is_served_under_the_same_name_finds_nothing(rig: Rig, tmp_path: Path) -> None:
    keys = rig.hashes()
    found = []
    for i, path in enumerate(["one", "other", "one"]):
        (tmp_path / path).mkdir(exist_ok=True)
        rig.call("in_an_engine", str(tmp_path / path), {"served_model_name": "ours"})
        name = rig.start(f"engine {i}")
        found.append(rig.call("exists", name, keys))
        rig.call("put", name, keys)
    assert found == [0, 0, PAGES]


@pytest.mark.parametrize("calls", ["put", "put_flat"])
@pytest.mark.parametrize("field", ["weight_version", "model_path"])
def test_weights_given_to_a_running_engine_leave_their_pages_behind(
    rig: Rig, tmp_path: Path, field: str, calls: str
) -> None:
    keys, more = rig.hashes(), rig.hashes(seed=2)
    rig.call("in_an_engine", str(tmp_path), {})
    one = rig.start("one", None, {"extra_config": {"interface_v1": int(calls == "put")}})
    stored: Any = YES if calls == "put" else True
    assert rig.call(calls, one, keys) == stored
    was = {"weight_version": "default", "model_path": str(tmp_path)}[field]
    rig.call("other_weights", field, "other")
    # Pages that wait to be stored are of the weights before, until SGLang asks for pages again.
    assert rig.call(calls, one, more) != stored
    assert (rig.call("exists", one, keys), rig.call("exists", one, more)) == (0, 0)
    assert rig.call(calls, one, more) == stored
    assert rig.call("exists", one, more) == PAGES
    rig.call("other_weights", field, was)
    assert (rig.call("exists", one, keys), rig.call("exists", one, more)) == (PAGES, 0)
    rig.call("clear", one)
    assert rig.call("exists", one, keys) == 0


def test_a_page_that_all_ranks_share_is_written_by_the_first_and_read_by_all(rig: Rig) -> None:
    keys = rig.hashes()
    pool = {"kind": "mla"}
    ranks = [rig.start(f"rank {i}", pool, {"tp_rank": i, "tp_size": 2}) for i in range(2)]
    rig.call("fill", ranks[0], 1)
    rig.call("fill", ranks[1], 2)
    assert rig.call("put", ranks[1], keys) == YES  # the other rank does it
    assert rig.call("exists", ranks[1], keys) == 0
    assert rig.call("put", ranks[0], keys) == YES
    assert rig.call("exists", ranks[1], keys) == PAGES
    rig.call("fill", ranks[1], 1)
    rig.call("wipe", ranks[1])
    assert rig.call("get", ranks[1], keys) == YES
    assert rig.call("same", ranks[1], 1, PAGES) == YES


# -- several pools


@pytest.fixture
def hybrid(rig: Rig) -> str:
    """KV, and two pools beside it with other sizes."""
    name = rig.start("hybrid")
    rig.call("add_pool", name, "swa", {"heads": 1})
    rig.call("add_pool", name, "indexer", {"heads": 4})
    rig.call("fill", name, 1)
    return name


def test_pages_of_several_pools_come_back_each_into_its_own(rig: Rig, hybrid: str) -> None:
    keys = rig.hashes()
    assert rig.call("put", hybrid, keys) == YES
    transfers = {"swa": {"keys": keys[-2:], "first": 20}, "indexer": {"keys": keys}}
    assert rig.call("get_v2", hybrid, transfers) == {"swa": [False] * 2, "indexer": NO}
    assert rig.call("put_v2", hybrid, transfers) == {"swa": [True] * 2, "indexer": YES}
    rig.call("wipe", hybrid)
    assert rig.call("get_v2", hybrid, transfers) == {"swa": [True] * 2, "indexer": YES}
    assert rig.call("same", hybrid, 1, 2, 20, 20, "swa") == [True] * 2
    assert rig.call("same", hybrid, 1, PAGES, 0, 0, "indexer") == YES
    assert rig.call("same", hybrid, 1, PAGES) == NO  # nobody asked for those


def test_a_prefix_is_as_long_as_every_pool_can_serve(rig: Rig, hybrid: str) -> None:
    keys = rig.hashes()
    everywhere = {"indexer": {"keys": keys}, "swa": {"keys": keys[-2:], "policy": "trailing_pages"}}
    rig.call("put", hybrid, keys)
    assert rig.call("exists_v2", hybrid, keys, {}) == [8, {"kv": 8}, [1, 2, 3, 4, 5, 6, 7, 8]]
    rig.call("put_v2", hybrid, {"indexer": {"keys": keys[:6]}})
    assert rig.call("exists_v2", hybrid, keys, {"indexer": {"keys": keys}}) == [
        6,
        {"kv": 8, "indexer": 6},
        [1, 2, 3, 4, 5, 6],
    ]
    assert rig.call("exists_v2", hybrid, keys, everywhere) == [0, {"kv": 8, "indexer": 6}, []]
    # The window's last two pages at 3, and at 6 to 7: so a prefix may end at 3 (of 2, 3), or at 6 (of 5, 6) or 7.
    rig.call("put_v2", hybrid, {"swa": {"keys": keys[1:3]}})
    rig.call("put_v2", hybrid, {"swa": {"keys": keys[4:7]}})
    assert rig.call("exists_v2", hybrid, keys, everywhere) == [6, {"kv": 8, "indexer": 6, "swa": 7}, [3, 6]]
    rig.call("put_v2", hybrid, {"swa": {"keys": keys[:1]}})
    assert rig.call("exists_v2", hybrid, keys, everywhere)[2] == [1, 2, 3, 6]


# -- never raises, figures, clear


def test_no_call_of_a_running_engine_raises(rig: Rig) -> None:
    one = rig.start("one")
    assert rig.call("nonsense", one) == [
        *([False, False], [False, False], 0),
        *([[False, False]], [[False, False]], 0),
        *(None, False, [None, None], False, True),
    ]


def test_what_cannot_work_is_refused_when_it_is_attached(rig: Rig) -> None:
    error = rig.call("attach_error", rig.endpoint, None, {"extra_config": {"endpiont": "x"}})
    assert error.startswith("InvalidArgument: endpiont: no such setting; kvstored's are endpoint, ")
    error = rig.call("attach_error", rig.endpoint, {"layout": "page_unified"})
    assert "InvalidArgument: pages of the kv pool (page_unified) cannot be kept" in error


def test_clear_drops_this_models_pages_only(rig: Rig) -> None:
    keys = rig.hashes()
    one, other = rig.start("one"), rig.start("other", None, {"model_name": "other"})
    for name in (one, other):
        rig.call("put", name, keys)
    rig.call("clear", one)
    assert (rig.call("exists", one, keys), rig.call("exists", other, keys)) == (0, PAGES)


def test_figures_are_those_of_each_transfer_once(rig: Rig) -> None:
    keys = rig.hashes()
    one = rig.start("one")
    rig.call("put", one, keys)
    rig.call("put", one, keys)
    rig.call("get", one, keys[:3])
    assert rig.call("stats", one) == [[3], [PAGES], [True, True]]
    assert rig.call("stats", one) == [[], [], []]
    quiet = rig.start("quiet", None, {"enable_storage_metrics": False})
    rig.call("get", quiet, keys)
    assert rig.call("stats", quiet) == [[], [], []]


# -- the daemon


def test_a_daemon_that_is_away_is_a_miss_and_comes_back(
    process: EngineProcess, start_daemon: Callable[..., RunningDaemon]
) -> None:
    daemon = start_daemon()
    rig = Rig(process, daemon.endpoint)
    keys = rig.hashes()
    try:
        one = rig.start("one")
        rig.call("fill", one, 1)
        assert rig.call("put", one, keys) == YES
        daemon.kill()
        assert rig.call("exists", one, keys) == 0
        assert rig.call("get", one, keys) == NO
        assert rig.call("put", one, keys) == NO
        rig.call("clear", one)
        late = rig.start("late")  # attached while there is no daemon
        assert rig.call("exists", late, keys) == 0
        daemon.restart()
        eventually(lambda: rig.call("put", one, keys) == YES, what="the backend to be connected again")
        assert rig.call("same", one, 1, PAGES) == YES
        assert rig.call("exists", one, keys) == PAGES
    finally:
        process.call("close_all")


def test_pages_outlive_a_restart_of_the_daemon(
    process: EngineProcess, start_daemon: Callable[..., RunningDaemon], tmp_path: Path
) -> None:
    daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__size="256MiB", ssd__write_back="through")
    rig = Rig(process, daemon.endpoint)
    keys = rig.hashes()
    try:
        one = rig.start("one")
        rig.call("fill", one, 1)
        assert rig.call("put", one, keys) == YES
        assert daemon.stop() == 0
        daemon.restart()
        other = rig.start("other")
        eventually(lambda: rig.call("exists", other, keys) == PAGES, 20.0, "the SSD to be read")
        rig.call("fill", other, 1)
        rig.call("wipe", other)
        assert rig.call("get", other, keys) == YES
        assert rig.call("same", other, 1, PAGES) == YES
    finally:
        process.call("close_all")


def test_a_daemon_that_does_not_answer_holds_a_thread_no_longer_than_was_set(rig: Rig, daemon: RunningDaemon) -> None:
    keys = rig.hashes()
    one = rig.start("one", None, {"extra_config": {"timeout_s": 0.1}})
    rig.call("fill", one, 1)
    rig.call("put", one, keys)
    daemon.pause()
    try:
        began = time.monotonic()
        assert rig.call("get", one, keys) == NO
        for seed in range(4, 24):
            assert rig.call("put", one, rig.hashes(PAGES, seed=seed)) == NO
        assert time.monotonic() - began < 1.5
    finally:
        daemon.resume()


def test_a_store_that_is_full_takes_what_it_can(
    process: EngineProcess, start_daemon: Callable[..., RunningDaemon]
) -> None:
    daemon = start_daemon(host__size="4MiB")
    rig = Rig(process, daemon.endpoint)
    try:
        one = rig.start("one")
        rig.call("fill", one, 1)
        for seed in range(12):  # each 0.4 MiB
            keys = rig.hashes(16, seed=seed)
            assert rig.call("put", one, keys) == [True] * 16
            rig.call("wipe", one)
            assert rig.call("get", one, keys) == [True] * 16
            assert rig.call("same", one, 1, 16) == [True] * 16
            rig.call("fill", one, 1)
    finally:
        process.call("close_all")
