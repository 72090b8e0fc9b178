"""transformers: what was saved comes back as the same states, or not at all, and never as somebody else's."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from inspect import isabstract, isclass, signature
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache, StaticCache, cache_utils

from kvstore_client import Client, FailedPrecondition, InvalidArgument
from kvstore_client.connectors import parts
from kvstore_client.connectors.transformers import PrefixCache
from tests.conftest import RunningDaemon
from tests.engines import small_llama
from tests.engines.small_llama import FULL, PROMPT, build, compute, continued, prefilled, prompt, same_states

BLOCK_TOKENS = small_llama.BLOCK_TOKENS
CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model() -> Any:
    return build()


def prefix_of(client: Client, model: Any, **arguments: Any) -> PrefixCache:
    return PrefixCache(client, model, **{"block_tokens": BLOCK_TOKENS, **arguments})


# -- what comes back


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_after_a_load_logits_and_tokens_are_those_without(client: Client, dtype: str) -> None:
    model, ids = build(dtype=dtype), prompt(PROMPT)
    prefix, computed = prefix_of(client, model), prefilled(model)
    assert prefix.load(ids)[1] == 0
    saved = prefix.save(ids, computed)
    assert (saved.stored, saved.existing, saved.rejected) == (6, 0, 0)

    cache, tokens = prefix.load(ids)
    assert type(cache) is DynamicCache
    assert tokens == FULL == cache.get_seq_length()
    assert same_states(cache, computed, FULL)
    logits, generated = continued(model, ids[:, tokens:], cache)
    expected, expected_tokens = continued(model, ids[:, FULL:], computed)
    assert torch.equal(logits, expected)
    assert generated == expected_tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_second_process_goes_on_from_what_the_first_computed(daemon: RunningDaemon, dtype: str) -> None:
    model, ids = build(dtype=dtype), prompt(PROMPT)
    computed = prefilled(model)
    with Client(daemon.endpoint) as client:
        assert prefix_of(client, model).save(ids, computed).stored == 6
    command = [sys.executable, "-m", "tests.engines.small_llama", daemon.endpoint, dtype]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    logits, generated = continued(model, ids[:, FULL:], computed)
    assert json.loads(done.stdout) == {
        "tokens": FULL,
        "logits": small_llama.digest(logits),
        "generated": generated,
    }


def test_generate_takes_a_loaded_cache(client: Client, model: Any) -> None:
    prefix, ids = prefix_of(client, model), prompt(PROMPT)
    prefix.save(ids, prefilled(model))
    cache, _ = prefix.load(ids)
    arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    names = signature(model.generate).parameters
    argument = small_llama.CACHE_ARGUMENT if "kwargs" in names else "past_key_values"
    assert torch.equal(
        model.generate(ids, attention_mask=torch.ones_like(ids), **arguments, **{argument: cache}), plain
    )


def test_a_shared_beginning_is_found_and_what_differs_is_computed(client: Client, model: Any) -> None:
    prefix, ids = prefix_of(client, model), prompt(PROMPT)
    prefix.save(ids, prefilled(model))
    other = ids.clone()
    other[0, 50] = (other[0, 50] + 1) % 512
    cache, tokens = prefix.load(other)
    assert tokens == 48 == cache.get_seq_length()
    assert same_states(cache, prefilled(model), 48)


@pytest.mark.parametrize(("length", "found"), [(96, 80), (97, 96), (81, 80), (80, 64), (17, 16), (16, 0), (1, 0)])
def test_at_least_one_token_is_left_to_compute(client: Client, model: Any, length: int, found: int) -> None:
    prefix = prefix_of(client, model)
    prefix.save(prompt(PROMPT), prefilled(model))
    cache, tokens = prefix.load(prompt(length))
    assert (tokens, cache.get_seq_length()) == (found, found)


def test_a_longer_prompt_stores_only_what_is_new(client: Client, model: Any) -> None:
    prefix = prefix_of(client, model)
    assert prefix.save(prompt(50), prefilled(model, 50)).stored == 3
    again = prefix.save(prompt(50), prefilled(model, 50))
    assert (again.stored, again.existing, again.rejected) == (0, 3, 0)
    longer = prefix.save(prompt(PROMPT), prefilled(model, PROMPT))
    assert (longer.stored, longer.existing, longer.rejected) == (3, 3, 0)
    assert prefix.load(prompt(PROMPT))[1] == FULL


def test_what_only_the_ids_or_only_the_cache_have_is_not_stored(client: Client, model: Any) -> None:
    prefix = prefix_of(client, model)
    assert prefix.save(prompt(PROMPT), prefilled(model, 40)).stored == 2
    assert prefix.save(prompt(64, seed=2), prefilled(model, 90, seed=2)).stored == 4
    assert prefix.load(prompt(PROMPT))[1] == 32
    assert prefix.load(prompt(PROMPT, seed=2))[1] == 64


def test_an_empty_cache_or_prompt_stores_nothing(client: Client, model: Any) -> None:
    prefix = prefix_of(client, model)
    for ids, cache in ((prompt(PROMPT), DynamicCache(config=model.config)), (prompt(0), prefilled(model))):
        result = prefix.save(ids, cache)
        assert (result.stored, result.existing, result.rejected) == (0, 0, 0)
    assert prefix.load(prompt(0))[1] == 0


def test_ids_may_be_a_list_a_row_or_an_array(client: Client, model: Any) -> None:
    prefix, ids = prefix_of(client, model), prompt(PROMPT)
    prefix.save(ids, prefilled(model))
    for same in (ids, ids[0], ids.numpy(), ids[0].tolist()):
        assert prefix.load(same)[1] == FULL


@pytest.mark.parametrize("odd", [None, "text", 5, torch.tensor(5), {"input_ids": [1]}, [1.5] * 40, prompt(40)[None]])
def test_what_is_no_row_of_ids_is_refused(client: Client, model: Any, odd: Any) -> None:
    prefix = prefix_of(client, model)
    for call in (lambda: prefix.load(odd), lambda: prefix.save(odd, prefilled(model))):
        with pytest.raises(InvalidArgument):
            call()


def test_a_prefill_with_gradients_is_stored_and_nothing_of_it_stays_held(client: Client, model: Any) -> None:
    prefix, ids = prefix_of(client, model), prompt(PROMPT)
    cache = DynamicCache(config=model.config)
    model(prompt(FULL), use_cache=True, **{small_llama.CACHE_ARGUMENT: cache})
    assert cache.layers[0].keys.requires_grad
    assert prefix.save(ids, cache).stored == 6
    assert same_states(prefix.load(ids)[0], cache, FULL)
    assert client.stats()["pools"][0]["leased"] == 0


def test_what_a_load_gave_is_the_callers_own(client: Client, model: Any) -> None:
    prefix, ids = prefix_of(client, model), prompt(PROMPT)
    prefix.save(ids, prefilled(model))
    cache, _ = prefix.load(ids)
    for layer in cache.layers:
        layer.keys.zero_()
    assert same_states(prefix.load(ids)[0], prefilled(model), FULL)


def test_nothing_stays_held_after_a_load_and_a_save(client: Client, model: Any) -> None:
    prefix, ids = prefix_of(client, model), prompt(PROMPT)
    prefix.save(ids, prefilled(model))
    prefix.load(ids)
    pools = client.stats()["pools"]
    assert [(pool["leased"], pool["blocks"]) for pool in pools if pool["blocks"]] == [(0, 6)]


def test_a_prefix_larger_than_one_may_hold_comes_and_goes_in_parts(
    start_daemon: Callable[..., RunningDaemon], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_BLOCKS", 4096)
    daemon = start_daemon(host__size="16MiB")  # a quarter is 4 MiB; 2048 tokens are 8 MiB
    ids, computed = prompt(2048), prefilled(model, 2048)
    with Client(daemon.endpoint) as client:
        prefix = prefix_of(client, model)
        assert prefix.save(ids, computed).stored == 128
        cache, tokens = prefix.load(ids)
    assert tokens == 2048 - BLOCK_TOKENS
    assert same_states(cache, computed, tokens)


# -- whose it is


def test_what_another_model_saved_is_not_found(client: Client, model: Any) -> None:
    ids = prompt(PROMPT)
    prefix_of(client, model).save(ids, prefilled(model))
    eager = build()
    eager.set_attn_implementation("eager")
    others = {
        "seed": build(seed=1),
        "dtype": build(dtype="bfloat16"),
        "layers": build(num_hidden_layers=3),
        "heads": build(num_key_value_heads=4),
        "dim": build(head_dim=16),
        "rope": build(rope_parameters={"rope_type": "default", "rope_theta": 5000.0}),
        "epsilon": build(rms_norm_eps=1e-5),
        "attention": eager,
    }
    assert {name: prefix_of(client, other).load(ids)[1] for name, other in others.items()} == dict.fromkeys(others, 0)
    for arguments in ({"salt": "x"}, {"adapter": "x"}, {"block_tokens": 32}, {"weights": "x"}):
        assert prefix_of(client, model, **arguments).load(ids)[1] == 0, arguments
    assert prefix_of(client, build()).load(ids)[1] == FULL


def test_a_model_read_from_disk_finds_what_the_same_one_saved(client: Client, model: Any, tmp_path: Path) -> None:
    prefix_of(client, model).save(prompt(PROMPT), prefilled(model))
    model.save_pretrained(tmp_path / "LlamaForCausalLM")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "LlamaForCausalLM").eval()
    assert again.dtype == model.dtype
    assert prefix_of(client, again).load(prompt(PROMPT))[1] == FULL


def test_weights_that_change_leave_their_blocks_behind(client: Client) -> None:
    model, ids = build(), prompt(PROMPT)
    prefix = prefix_of(client, model)
    prefix.save(ids, prefilled(model))
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight[3, 5] += 0.5
    assert prefix.load(ids)[1] == 0
    assert prefix.save(ids, prefilled(model)).stored == 6
    model.load_state_dict(build().state_dict())
    assert same_states(prefix.load(ids)[0], prefilled(model), FULL)
    model.set_attn_implementation("eager")
    assert prefix.load(ids)[1] == 0


def swapped_rows(model: Any) -> None:
    rows = model.model.embed_tokens.weight
    rows[[3, 5]] = rows[[5, 3]]


def two_signs(model: Any) -> None:
    """Of the upper halves of two words of eight bytes, whose sum stays the same."""
    model.model.layers[1].self_attn.k_proj.weight[3, [5, 7]] *= -1


def slower_rotation(model: Any) -> None:
    model.model.rotary_emb.inv_freq *= 0.5


@pytest.mark.parametrize("change", [swapped_rows, two_signs, slower_rotation], ids=lambda change: change.__name__)
def test_a_change_that_leaves_every_sum_or_every_saved_weight_is_another_model(
    client: Client, change: Callable[[Any], None]
) -> None:
    model, ids = build(), prompt(PROMPT)
    prefix = prefix_of(client, model)
    prefix.save(ids, prefilled(model))
    with torch.no_grad():
        change(model)
    assert prefix.load(ids)[1] == 0
    assert prefix_of(client, model).load(ids)[1] == 0
    assert prefix_of(client, build()).load(ids)[1] == FULL


@pytest.mark.parametrize("weights", [None, "ours"])
def test_a_model_cast_after_it_was_read_is_not_one_read_in_that_type(
    client: Client, tmp_path: Path, weights: str | None
) -> None:
    """The saved weights are the same bits; its rotary frequencies are not, and so neither are its keys."""
    build().save_pretrained(tmp_path)
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    cast = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval().to(torch.bfloat16)
    assert not same_states(prefilled(read), prefilled(cast), FULL)
    prefix_of(client, read, weights=weights).save(prompt(PROMPT), prefilled(read))
    assert prefix_of(client, cast, weights=weights).load(prompt(PROMPT))[1] == 0
    assert prefix_of(client, read, weights=weights).load(prompt(PROMPT))[1] == FULL


def test_weights_that_cannot_be_read_are_refused_by_name(client: Client) -> None:
    model = build()
    model.extra = torch.nn.Parameter(torch.zeros(4, 4).to_sparse(), requires_grad=False)
    with pytest.raises(InvalidArgument, match=r"extra cannot be read .* name the weights with weights="):
        prefix_of(client, model)
    assert prefix_of(client, model, weights="ours").load(prompt(PROMPT))[1] == 0


def test_a_model_in_training_mode_is_refused(client: Client) -> None:
    model = build()
    prefix = prefix_of(client, model)
    model.train()
    with pytest.raises(FailedPrecondition, match="training mode"):
        prefix.load(prompt(PROMPT))


# -- what is refused

LAYER_TYPES = sorted(
    (
        value
        for value in vars(cache_utils).values()
        if isclass(value) and value.__name__.endswith("Layer") and value is not cache_utils.DynamicLayer
    ),
    key=lambda layer: layer.__name__,
)


def test_every_kind_of_layer_of_this_release_is_tried() -> None:
    names = {layer.__name__ for layer in LAYER_TYPES}
    assert {"StaticLayer", "DynamicSlidingWindowLayer", "QuantizedLayer", "LinearAttentionLayer"} < names


@pytest.mark.parametrize("layer", LAYER_TYPES, ids=lambda layer: layer.__name__)
def test_a_layer_that_would_not_come_back_is_refused_by_name(client: Client, model: Any, layer: Any) -> None:
    computed = prefilled(model)
    concrete: Any = layer
    if isabstract(layer):
        concrete = type(layer.__name__, (layer,), dict.fromkeys(layer.__abstractmethods__))
    odd = concrete.__new__(concrete)  # some of them need packages that are not here to be made
    odd.__dict__.update(vars(computed.layers[1]))
    computed.layers[1] = odd
    with pytest.raises(InvalidArgument, match=f"layer 1 of the cache is a {layer.__name__};"):
        prefix_of(client, model).save(prompt(PROMPT), computed)
    assert prefix_of(client, model).load(prompt(PROMPT))[1] == 0


def models_with_other_layers() -> dict[str, Any]:
    sizes = small_llama.config().to_dict()
    sizes = {name: sizes[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    sizes |= {"num_hidden_layers": 4, "num_key_value_heads": 2}
    return {
        "DynamicSlidingWindowLayer": transformers.MistralConfig(**sizes, sliding_window=32),
        "LinearAttentionLayer": transformers.Qwen3NextConfig(**sizes),
        "DynamicIndexedLayer": transformers.GlmMoeDsaConfig(),
    }


@pytest.mark.parametrize("layer", models_with_other_layers())
def test_a_model_whose_cache_has_such_layers_is_refused_by_name(client: Client, layer: str) -> None:
    config = models_with_other_layers()[layer]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(InvalidArgument, match=f"layer 0 of the cache is a {layer};"):
        PrefixCache(client, model, weights="none")


def test_other_caches_are_refused_by_name(client: Client, model: Any) -> None:
    static = StaticCache(config=model.config, max_cache_len=256)
    compute(model, prompt(FULL), static)
    both = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    for cache in (static, both):
        with pytest.raises(InvalidArgument, match=f"the cache is a {type(cache).__name__};"):
            prefix_of(client, model).save(prompt(PROMPT), cache)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_keys_that_depend_on_a_prompts_length_are_refused(client: Client, rope: str) -> None:
    parameters: dict[str, Any] = {"rope_type": rope, "rope_theta": 10000.0, "factor": 2.0}
    if rope == "longrope":
        parameters |= {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 1024}
    with pytest.raises(InvalidArgument, match=f"'{rope}'"):
        prefix_of(client, build(rope_parameters=parameters))


def test_models_that_take_more_than_tokens_are_refused(client: Client) -> None:
    with torch.device("meta"):
        encoder = transformers.T5ForConditionalGeneration(transformers.T5Config(num_layers=1)).eval()
        pictures = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig()).eval()
    with pytest.raises(InvalidArgument, match="T5ForConditionalGeneration has an encoder"):
        PrefixCache(client, encoder, weights="none")
    with pytest.raises(InvalidArgument, match="LlavaForConditionalGeneration takes more than tokens"):
        PrefixCache(client, pictures, weights="none")
    with torch.device("meta"), pytest.raises(InvalidArgument, match="name them with weights="):
        PrefixCache(client, transformers.LlamaForCausalLM(small_llama.config()).eval())


def test_a_batch_is_refused(client: Client, model: Any) -> None:
    prefix, ids = prefix_of(client, model), prompt(PROMPT)
    batch = DynamicCache(config=model.config)
    compute(model, ids.repeat(2, 1), batch)
    for call in (lambda: prefix.load(ids.repeat(2, 1)), lambda: prefix.save(ids.repeat(2, 1), batch)):
        with pytest.raises(InvalidArgument, match="batch of 2 prompts; pass one at a time"):
            call()
    with pytest.raises(InvalidArgument, match="holds a batch of 2 prompts; pass one at a time"):
        prefix.save(ids, batch)


def test_states_of_another_type_or_size_are_refused(client: Client, model: Any) -> None:
    with pytest.raises(InvalidArgument, match="keys of layer 0 are"):
        prefix_of(client, model).save(prompt(PROMPT), prefilled(build(dtype="bfloat16")))
    with pytest.raises(InvalidArgument, match="keys of layer 0 are"):
        prefix_of(client, model).save(prompt(PROMPT), prefilled(build(num_key_value_heads=4)))
    with pytest.raises(InvalidArgument, match="3 layers, the model 4"):
        prefix_of(client, model).save(prompt(PROMPT), prefilled(build(num_hidden_layers=3)))


# -- the daemon away, restarted, ended in the middle


def test_after_its_client_is_closed_it_misses_and_stores_nothing(daemon: RunningDaemon, model: Any) -> None:
    with Client(daemon.endpoint) as client:
        prefix = prefix_of(client, model)
        prefix.save(prompt(PROMPT), prefilled(model))
    assert prefix.load(prompt(PROMPT))[1] == 0
    saved = prefix.save(prompt(PROMPT), prefilled(model))
    assert (saved.rejected, str(saved.error)) == (6, "the client is closed")


def test_a_daemon_that_is_away_is_a_miss(model: Any, tmp_path: Path) -> None:
    with Client(f"unix://{tmp_path}/none.sock") as client:
        prefix = prefix_of(client, model)
        cache, tokens = prefix.load(prompt(PROMPT))
        assert (tokens, cache.get_seq_length()) == (0, 0)
        saved = prefix.save(prompt(PROMPT), prefilled(model))
        assert (saved.stored, saved.existing, saved.rejected) == (0, 0, 6)
        assert "kvstored" in str(saved.error)


def test_what_was_saved_outlives_a_restart_of_the_daemon(
    start_daemon: Callable[..., RunningDaemon], model: Any, persist: str
) -> None:
    daemon = start_daemon(host__persist=persist)
    with Client(daemon.endpoint) as client:
        prefix, computed = prefix_of(client, model), prefilled(model)
        prefix.save(prompt(PROMPT), computed)
        daemon.stop()
        assert prefix.load(prompt(PROMPT))[1] == 0
        daemon.restart()
        with Client(daemon.endpoint) as other:
            cache, tokens = prefix_of(other, model).load(prompt(PROMPT))
        assert tokens == FULL
        assert same_states(cache, computed, FULL)


@pytest.fixture
def persist() -> Iterator[str]:
    """A directory in memory."""
    with tempfile.TemporaryDirectory(prefix="kvstored-test-", dir="/dev/shm") as directory:
        yield directory


class Interrupted(PrefixCache):
    """Ends the daemon when it comes to its fourth block."""

    def __init__(self, *arguments: Any, daemon: RunningDaemon, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._daemon = daemon
        self._blocks = 0

    def _as_block(self, flat: Any) -> Any:
        self._blocks += 1
        if self._blocks == 4:
            self._daemon.kill()
        return super()._as_block(flat)


@pytest.mark.parametrize("at_once", [1, 64])
def test_a_daemon_killed_in_the_middle_of_a_load_costs_computing(
    daemon: RunningDaemon, model: Any, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(parts, "PART_BLOCKS", at_once)
    computed = prefilled(model)
    with Client(daemon.endpoint) as client:
        prefix_of(client, model).save(prompt(PROMPT), computed)
        prefix = Interrupted(client, model, block_tokens=BLOCK_TOKENS, daemon=daemon)
        cache, tokens = prefix.load(prompt(PROMPT))
        assert tokens == (FULL if at_once == 64 else 4 * BLOCK_TOKENS)  # what was held stays readable
        assert same_states(cache, computed, tokens)
        assert prefix.load(prompt(PROMPT))[1] == 0


def test_a_daemon_killed_in_the_middle_of_a_save_is_blocks_not_stored(daemon: RunningDaemon, model: Any) -> None:
    with Client(daemon.endpoint) as client:
        prefix = Interrupted(client, model, block_tokens=BLOCK_TOKENS, daemon=daemon)
        saved = prefix.save(prompt(PROMPT), prefilled(model))
        assert (saved.stored, saved.existing, saved.rejected) == (0, 0, 6)
        assert saved.error is not None
        daemon.restart()
        with Client(daemon.endpoint) as other:
            again = prefix_of(other, model)
            assert again.load(prompt(PROMPT))[1] == 0
            assert again.save(prompt(PROMPT), prefilled(model)).stored == 6


def test_a_daemon_that_does_not_answer_is_waited_for_no_longer_than_was_said(daemon: RunningDaemon, model: Any) -> None:
    with Client(daemon.endpoint, timeout_s=0.2) as client:
        prefix = prefix_of(client, model, timeout_s=0.2)
        prefix.save(prompt(PROMPT), prefilled(model))
        daemon.pause()
        try:
            began = time.monotonic()
            assert prefix.load(prompt(PROMPT))[1] == 0
            saved = prefix.save(prompt(PROMPT, seed=3), prefilled(model, seed=3))
            assert saved.rejected == 6
            assert time.monotonic() - began < 2.0
        finally:
            daemon.resume()
