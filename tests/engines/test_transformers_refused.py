"""transformers: models whose states are not decided by the token ids before them are refused by name."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_client import Client, InvalidArgument
from tests.engines.small_llama import PROMPT, build, prefilled, prompt
from tests.engines.test_transformers import prefix_of


@pytest.mark.parametrize("field", [{"is_causal": False}, {"prefix_lm": True}])
def test_a_decoder_that_attends_to_later_tokens_is_refused(client: Client, field: dict[str, Any]) -> None:
    """An embedder of a decoder's kind: transformers drops the causal mask for this field alone."""
    model = build()
    for name, value in field.items():
        setattr(model.config, name, value)
    with pytest.raises(InvalidArgument, match="LlamaForCausalLM attends to later tokens"):
        prefix_of(client, model)


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ({"is_prompt_learning": True, "peft_type": "PeftType.PREFIX_TUNING"}, "'mine' .PREFIX_TUNING. puts tokens"),
        (
            {"is_prompt_learning": False, "alora_invocation_tokens": [7, 8]},
            "'mine' .SimpleNamespace. begins at",
        ),
    ],
)
def test_adapters_with_tokens_of_their_own_are_refused_whenever_they_come(
    client: Client, adapter: dict[str, Any], said: str
) -> None:
    """As peft's PeftModel shows them: their states come before the prompt's, or depend on what is behind it."""
    model = build()
    prefix = prefix_of(client, model)
    ids = prompt(PROMPT)
    cache = prefilled(model)
    model.peft_config = {"mine": SimpleNamespace(**adapter)}
    with pytest.raises(InvalidArgument, match=said):
        prefix.load(ids)
    with pytest.raises(InvalidArgument, match=said):
        prefix.save(ids, cache)
    with pytest.raises(InvalidArgument, match=said):
        prefix_of(client, model)
    model.peft_config = {"mine": SimpleNamespace(is_prompt_learning=False, peft_type="PeftType.LORA")}
    assert prefix.save(ids, cache).stored == 6
