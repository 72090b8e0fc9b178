"""Writes random models for tests with vLLM, the same every time: `vllm_models.py KIND DIRECTORY [ADAPTER ...]`.

llama       with LoRA adapters of the names given
windowed    with layers that see a window only
hybrid      with layers that have a state
"""

import json
import sys
from pathlib import Path

VOCABULARY = 4096


def write_windowed(directory: Path) -> None:
    """A Gemma of 6 layers with random weights, two thirds of them with a window of 256 tokens."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        max_position_embeddings=8192,
        sliding_window=256,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,
    )
    Gemma3ForCausalLM(config).to(torch.float32).save_pretrained(directory)


def write_hybrid(directory: Path) -> None:
    """A Qwen3-Next of 4 layers with random weights, every other one of linear attention."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
    )
    model = Qwen3NextForCausalLM(config)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.A_log.data.fill_(-6)  # else it forgets within a few tokens, and any state would do
            layer.linear_attn.out_proj.weight.data *= 4
    model.to(torch.bfloat16).save_pretrained(directory)


def write_llama(directory: Path, adapters: list[str]) -> None:
    """A Llama of 4 layers with random weights, in float32."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.08,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t1", eos_token="t2", unk_token="t0").save_pretrained(
        directory
    )
    for seed, name in enumerate(adapters):
        at = directory / name
        at.mkdir()
        torch.manual_seed(100 + seed)
        weights = {}
        for layer in range(4):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(8, 256)
            weights[f"{prefix}.lora_B.weight"] = torch.randn(256, 8)
        save_file(weights, at / "adapter_model.safetensors")
        settings = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "peft_type": "LORA", "bias": "none"}
        (at / "adapter_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    kind, directory, *adapters = sys.argv[1:]
    if kind == "llama":
        write_llama(Path(directory), adapters)
    else:
        {"windowed": write_windowed, "hybrid": write_hybrid}[kind](Path(directory))
