"""A folder that transformers wrote, through `pith convert import` and `pith evaluate`."""

from pathlib import Path

import pytest
import torch
from pith_apps.cli import main
from pith_apps.corpus import Corpus, prepare_standard_library, tokenize_files
from their_models import randomise
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.02,
    "eos_token_id": 0,
    "attn_implementation": "eager",
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
SPARSE = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LENGTH = 64

RECIPE = """
from dataclasses import replace
from pathlib import Path
from pith_apps.config import RunConfig
from pith_apps.recipes.released import qwen3_30b_a3b, tiny_form
from pith_engine.balance import BalanceConfig
from pith_engine.mesh import MeshConfig
from pith_models.build import model_config_from_hf
from pith_models.hf import read_hf_config

def released() -> RunConfig:
    tiny, model = tiny_form(qwen3_30b_a3b()), model_config_from_hf(read_hf_config(Path("theirs")))
    return replace(tiny, name="released", model=model, mesh=MeshConfig())
"""


def family(name: str) -> nn.Module:
    """A small random model with sequences past its window and its original YaRN context."""
    match name:
        case "qwen3_moe":
            sizes = {**SIZES, **GROUPED, **SPARSE, "moe_intermediate_size": 24, "num_experts": 8}
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
        case "qwen3":
            rope = {**YARN, "rope_theta": 1e4}
            return Qwen3ForCausalLM(Qwen3Config(**SIZES, **GROUPED, rope_parameters=rope))
        case "gpt_oss":
            rope = {**YARN, "rope_theta": 1e4, "truncate": False}
            sizes = {**SIZES, **GROUPED, **SPARSE, "num_local_experts": 8, "sliding_window": 8}
            return GptOssForCausalLM(GptOssConfig(**sizes, rope_parameters=rope))
    latent = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    gate = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
    rope = {**YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0}
    sizes = {**SIZES, **SPARSE, "moe_intermediate_size": 24, "v_head_dim": 16}
    sizes |= {"num_key_value_heads": 4, "first_k_dense_replace": 1}
    config = DeepseekV3Config(**sizes, **latent, **gate, rope_parameters=rope)
    return DeepseekV3ForCausalLM(config)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A tokenizer, and a corpus of one page in `page`."""
    folder = tmp_path_factory.mktemp("page")
    prepare_standard_library(folder, vocab_size=4096, max_bytes=600_000)
    page = folder / "page.txt"
    page.write_text(Path(__file__).read_text())
    tokenize_files([page], folder / "tokenizer", folder / "page")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3", "gpt_oss", "deepseek_v3"])
def test_imported_weights_evaluate_as_in_transformers(tmp_path, monkeypatch, capfd, corpus, name):
    monkeypatch.chdir(tmp_path)
    model = family(name).eval()
    randomise(model, std=0.1)
    model.save_pretrained("theirs")
    Path("released.py").write_text(RECIPE)
    page = str(corpus / "page")
    data = ["--data.no-standard-library", "--data.training", page, "--data.held-out", page]
    data += ["--data.tokenizer", str(corpus / "tokenizer"), "--train.sequence-length", str(LENGTH)]
    data += ["--evaluation.sequences", "10000"]
    assert main(["convert", "import", "released.py", "--source", "theirs", *data]) == 0
    assert main(["evaluate", "released.py", *data]) == 0
    printed = capfd.readouterr().out
    assert "0 unexpected, 0 missing; dtype changes: none" in printed

    ids = torch.from_numpy(Corpus.open(corpus / "page", 4096).tokens.astype("int64"))
    losses, num_targets = 0.0, len(ids) - 1
    with torch.no_grad():
        for start in range(0, num_targets, LENGTH):
            row = ids[start : start + LENGTH + 1]
            logits = model(row[None, :-1]).logits[0].double()
            losses += nn.functional.cross_entropy(logits, row[1:], reduction="sum").item()
    assert f"({num_targets:,} tokens of {page})" in printed
    found = float(printed.partition("held-out loss ")[2].split()[0])
    assert found == pytest.approx(losses / num_targets, abs=1e-5)
    assert abs(found - 8.318) > 0.05  # ln 4096: the weights matter
