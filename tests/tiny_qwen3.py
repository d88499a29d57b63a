"""A tiny Qwen3-MoE with a tokenizer, made and saved by transformers."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

FILE_BYTES = 100_000


def save_tiny_qwen3(folder: Path, *, tied: bool = False) -> None:
    """Write a bf16 model in several files, its tokenizer smaller than its vocabulary."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=80,
        moe_intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        max_position_embeddings=64,
        eos_token_id=1,
        router_aux_loss_coef=0.01,
        tie_word_embeddings=tied,
    )
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=FILE_BYTES)
    words = Tokenizer(WordLevel({"a": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(folder)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors files."""
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def assert_same_bytes(first: Path, second: Path) -> None:
    """Both folders have the same keys, dtypes and bits, and both have some."""
    before, after = read_weights(first), read_weights(second)
    assert before.keys() == after.keys() and before
    for key, value in before.items():
        assert value.dtype == after[key].dtype == torch.bfloat16
        assert torch.equal(value.view(torch.int16), after[key].view(torch.int16)), key
