"""The parts of vLLM's connector by themselves: copies, hits, names of weights, settings, figures."""

import itertools
import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore_client import InvalidArgument
from tests.conftest import RunningDaemon
from tests.engines.vllm_models import write_llama

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM imports says that it is deprecated
    from vllm.config import CacheConfig, ModelConfig
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    from kvstore_client.connectors.vllm.connector import client_of
    from kvstore_client.connectors.vllm.copies import GroupMemory, expect_read_only_views, memory_of, rows_of
    from kvstore_client.connectors.vllm.figures import Stats, Tally, length_of
    from kvstore_client.connectors.vllm.groups import need_of, obstacle
    from kvstore_client.connectors.vllm.handoff import answer_to, promised_by, tail_name
    from kvstore_client.connectors.vllm.hits import MISS, Hit, Need, longest
    from kvstore_client.connectors.vllm.layered import LayeredLoad
    from kvstore_client.connectors.vllm.messages import Load, Report, Run, Space, Stored
    from kvstore_client.connectors.vllm.settings import Settings, settings_of
    from kvstore_client.connectors.vllm.spaces import Adapters, adapter_weights, arguments_digest, weights_of


@pytest.mark.parametrize("tokens", [16, 32, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_block_goes_out_and_comes_back_in_any_place_bit_by_bit(tokens: int, dtype: torch.dtype) -> None:
    layers = [torch.randint(0, 255, (9, 2, tokens, 128), dtype=torch.uint8).to(dtype) for _ in range(3)]
    before = [layer.clone() for layer in layers]
    expect_read_only_views()
    memory = GroupMemory([rows_of("layer", layer, 9) for layer in layers], ["a", "b", "c"])
    assert memory.block_bytes == sum(layer[0].nbytes for layer in layers)
    store = [bytearray(memory.block_bytes) for _ in range(3)]
    memory.drain([7, 2, 5], [memoryview(block) for block in store])
    expected = b"".join(layer[2].contiguous().view(torch.uint8).numpy().tobytes() for layer in layers)
    assert bytes(store[1]) == expected, "a block in the store is [layer][bytes of its block]"
    begun: list[int] = []
    views = [memoryview(bytes(block)) for block in store]
    memory.fill([0, 1, 8], views)
    memory.fill_by_rows([3, 4, 6], views, begun.append)
    assert begun == [1, 2, 3]
    for layer, old in zip(layers, before, strict=True):
        for target, source in ((0, 7), (1, 2), (8, 5), (3, 7), (4, 2), (6, 5)):
            assert torch.equal(layer[target], old[source])
        for untouched in (2, 5, 7):
            assert torch.equal(layer[untouched], old[untouched])


def test_blocks_that_the_engine_splits_for_its_kernels_are_one_row() -> None:
    layer = torch.arange(8 * 4 * 16, dtype=torch.int32).reshape(8, 4, 16)
    rows = rows_of("layer", layer, 4)
    assert rows.shape == (4, 2 * 4 * 16 * 4)
    assert torch.equal(rows[1].view(torch.int32), layer[2:4].reshape(-1))


def test_memory_whose_blocks_are_not_one_run_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match=r"layers\.7.*not 9 blocks first"):
        rows_of("layers.7", torch.zeros(2, 9, 16), 9)
    with pytest.raises(InvalidArgument, match="not one run of memory"):
        rows_of("layers.7", torch.zeros(9, 16, 4).transpose(1, 2), 9)
    elsewhere = rows_of("layers.7", torch.zeros(9, 16, device="meta"), 9)
    with pytest.raises(InvalidArgument, match="on meta; kvstored copies memory of NVIDIA GPUs and of the host"):
        memory_of([elsewhere], ["layers.7"])


def present(stored: dict[tuple[int, int], set[int]]):  # type: ignore[no-untyped-def]
    def leading(rank: int, group: int, first: int, end: int) -> tuple[int, bool]:
        blocks = stored[rank, group]
        return next((i - first for i in range(first, end) if i not in blocks), end - first), False

    return leading


def test_a_prefix_is_as_long_as_what_every_rank_has() -> None:
    stored = {(0, 0): set(range(10)), (1, 0): set(range(6))}
    assert longest([Need(16)], 2, 0, 160, 16, present(stored)) == Hit(96, slow=False)
    assert longest([Need(16)], 2, 96, 160, 16, present(stored)) == MISS
    assert longest([Need(16)], 2, 32, 80, 16, present(stored)) == Hit(80, slow=False)


def test_a_window_needs_only_what_reaches_into_it_and_every_prefix_is_tried() -> None:
    """Against the plain definition, for all that may be stored of five blocks."""
    needs = [Need(16), Need(16, window=33)]
    for kept in itertools.product([False, True], repeat=5):
        windowed = {i for i, there in enumerate(kept) if there}
        found = longest(needs, 1, 0, 80, 16, present({(0, 0): set(range(5)), (0, 1): windowed}))
        good = [end for end in range(1, 6) if all(i in windowed for i in range(max(end - 2, 0), end))]
        assert found.tokens == 16 * max(good, default=0), kept


def test_a_state_ends_exactly_where_the_prefix_does_or_it_is_none() -> None:
    """Against the plain definition, for all that may be stored of five blocks, and for blocks of two sizes."""
    for scale in (1, 2):
        needs = [Need(16), Need(16 * scale, state=True)]
        for kept in itertools.product([False, True], repeat=5):
            states = {i for i, there in enumerate(kept) if there}
            found = longest(needs, 1, 0, 80, 16, present({(0, 0): set(range(5)), (0, 1): states}))
            good = [16 * scale * (i + 1) for i in states if 16 * scale * (i + 1) <= 80]
            assert found.tokens == max(good, default=0), (scale, kept)
    shorter = present({(0, 0): set(range(3)), (0, 1): {1, 4}})
    assert longest([Need(16), Need(16, state=True)], 1, 0, 80, 16, shorter) == Hit(32, slow=False)
    assert longest([Need(16), Need(16, state=True)], 1, 32, 80, 16, shorter) == MISS


def test_weights_have_another_name_when_a_byte_of_a_sample_or_a_size_changes(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(100_000))
    name = weights_of(str(tmp_path))
    assert weights_of(str(tmp_path)) == name
    for at in (0, 50_000, 99_999):
        changed = bytearray(100_000)
        changed[at] = 1
        file.write_bytes(changed)
        assert weights_of(str(tmp_path)) != name
    file.write_bytes(bytes(100_001))
    assert weights_of(str(tmp_path)) != name
    assert weights_of("some/model-of-a-hub") == "some/model-of-a-hub"


def test_what_decides_beside_weights_is_in_their_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(10_000))
    names = [adapter_weights(str(tmp_path))]
    for alpha in (1, 64):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": alpha}))
        names.append(adapter_weights(str(tmp_path)))
    for name in ("preprocessor_config.json", "hf_quant_config.json", "modeling_own.py"):
        (tmp_path / name).write_text("{}")
        names.append(adapter_weights(str(tmp_path)))
    assert len(set(names)) == len(names) == 6
    (tmp_path / "README.md").write_text("of no effect")
    assert adapter_weights(str(tmp_path)) == names[-1]


def test_an_adapter_that_is_no_directory_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub's may be any commit of it. A home directory is spelt out as vLLM does."""
    adapters = Adapters(SimpleNamespace(lora_dtype=torch.bfloat16))
    assert adapters.name(None) == ""
    assert adapters.name(SimpleNamespace(lora_int_id=1, lora_name="hub", lora_path="org/adapter")) is None
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "adapter_model.safetensors").write_bytes(bytes(100))
    monkeypatch.setenv("HOME", str(tmp_path))
    at_home = SimpleNamespace(lora_int_id=2, lora_name="a", lora_path="~/mine")
    elsewhere = SimpleNamespace(lora_int_id=3, lora_name="a", lora_path=str(tmp_path / "mine"))
    assert adapters.name(at_home) == adapters.name(elsewhere)
    assert Adapters(SimpleNamespace(lora_dtype=torch.float32)).name(at_home) != adapters.name(at_home)


def test_arguments_of_the_engine_that_decide_about_bytes_name_its_blocks(tmp_path: Path) -> None:
    write_llama(tmp_path / "llama", [])

    def digest(**arguments: Any) -> str:
        common = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 1024}
        return arguments_digest(ModelConfig(model=str(tmp_path / "llama"), **{**common, **arguments}))

    plain = digest()
    assert digest() == plain
    assert digest(served_model_name="other", enforce_eager=True, max_logprobs=3) == plain
    different = [digest(max_model_len=2048), digest(model_impl="transformers"), digest(code_revision="1")]
    assert len({plain, *different}) == 4
    (tmp_path / "llama").rename(tmp_path / "moved")
    moved = ModelConfig(model=str(tmp_path / "moved"), skip_tokenizer_init=True, dtype="float32", max_model_len=1024)
    assert arguments_digest(moved) == plain, "the place of the files says nothing"
    moved.quantization_config = lambda layer: layer
    assert arguments_digest(moved) != arguments_digest(moved), "what cannot be named is nobody else's"


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"endpont": "unix:///x"}, "has no 'endpont' (did you mean 'endpoint'?); it may have endpoint,"),
        ({"endpoint": "grpc://host:1"}, "expected unix:///path"),
        ({"load_s": 0}, "load_s=0.0 is not a number of seconds above 0"),
        ({"min_tokens": "many"}, "min_tokens='many' is not a int"),
        ({"pinned": 2.0}, "pinned=2.0 is not a fraction"),
        ({"layers": 1}, "layers=1 is not a bool"),
    ],
)
def test_settings_that_are_none_are_refused_with_what_is_allowed(extra: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        settings_of(extra)


def test_reports_of_several_ranks_add_up_to_what_all_of_them_have() -> None:
    one = Report({1: Stored(1, (4, 2), (0, 2))}, {"a": (3,)})
    two = Report({1: Stored(1, (3, 5), (1, 0)), 2: Stored(1, (1,), (0,))}, {"a": (1,), "b": (0,)})
    both = one.aggregate(two)
    assert both.saves == {1: Stored(2, (3, 2), (1, 2)), 2: Stored(1, (1,), (0,))}
    assert both.failed == {"a": (1,), "b": (0,)}


def test_figures_are_taken_once_and_add_up() -> None:
    tally = Tally()
    tally.add("load_blocks", 3)
    tally.took("load_seconds", 1000, 0.5)
    taken = tally.take()
    assert taken is not None
    assert tally.take() is None
    other = Stats({"load_blocks": 1, "load_seconds": {"<=2048": [0.25]}})
    assert taken.aggregate(other).data == {"load_blocks": 4, "load_seconds": {"<=2048": [0.5, 0.25]}}
    assert taken.reduce() == {"load_blocks": 4, "worst_load_seconds": 0.5}
    assert (length_of(512), length_of(513), length_of(10**6)) == ("<=512", "<=2048", ">131072")


def test_a_layered_load_that_was_given_up_may_not_begin() -> None:
    load = LayeredLoad(Load("a", 10, Space(), [Run(0, 0, b"", [b"x"], [1])], layered=True))
    load.wait(1, until=0.0)
    assert not load.begin(1)
    load.end()
    assert load.blocks == 0


def test_tails_have_names_that_no_other_tail_and_no_block_has() -> None:
    names = {tail_name(parent, tokens) for parent in (b"", b"a" * 32, b"b" * 32) for tokens in ([1], [2], [1, 2])}
    assert len(names) == 9
    assert promised_by(answer_to(77)) == 77
    assert promised_by({"do_remote_prefill": True, "stored_tokens": True}) == 0


ATTENTION = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
FULL = FullAttentionSpec(**ATTENTION)
WINDOW = SlidingWindowSpec(**ATTENTION, sliding_window=100)
STATE = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")
CHUNKED = ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=64)


def why_not(*specs: KVCacheSpec, draft: bool = False) -> str:
    """What is in the way of a model with these cache groups."""
    groups = [KVCacheGroupSpec([f"layer {i}"], spec, is_eagle_group=draft) for i, spec in enumerate(specs)]
    config = SimpleNamespace(cache_config=CacheConfig(block_size=16))
    return obstacle(config, KVCacheConfig(num_blocks=9, kv_cache_tensors=[], kv_cache_groups=groups))


def test_layers_whose_blocks_do_not_stay_as_they_are_keep_their_whole_model_out() -> None:
    assert why_not(FULL) == why_not(FULL, WINDOW) == ""
    assert why_not(STATE, FULL) == why_not(FULL, STATE) == ""
    assert "group 1 has states of the mode 'all'" in why_not(FULL, replace(STATE, mamba_cache_mode="all"))
    assert "group 1 has states of tokens that are guessed" in why_not(FULL, replace(STATE, num_speculative_blocks=1))
    assert "group 1 has states of tokens" in why_not(FULL, replace(STATE, num_prefill_checkpoint_blocks=1))
    assert "states only" in why_not(STATE)
    assert "group 0 has ChunkedLocalAttentionSpec" in why_not(CHUNKED, FULL)
    assert "draft layers" in why_not(FULL, draft=True)
    assert need_of(FULL) == Need(16)
    assert need_of(WINDOW) == Need(16, window=100)
    assert need_of(STATE) == Need(16, state=True)


def test_a_daemon_of_another_protocol_leaves_the_engine_without_a_store_and_not_without_a_start(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore_client.session.PROTOCOL", 99)
    with client_of(Settings(endpoint=daemon.endpoint), "engine") as client:
        assert not client.connected
        ns = client.raw_namespace("x", 4096, ahead=False)
        assert ns.match([ns.key(b"a")], wait=False).blocks == 0
