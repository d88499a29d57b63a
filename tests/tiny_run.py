"""The runs that parity is tested on: dense and sparse layers, sizes that divide by little."""

from dataclasses import replace
from pathlib import Path

from pith_apps.config import RunConfig, TrainConfig
from pith_engine.balance import BalanceConfig
from pith_engine.lr import LearningRateConfig
from pith_engine.mesh import parse_mesh
from pith_models.qwen3_dense import Qwen3Config
from pith_models.qwen3_moe import Qwen3MoeConfig
from tokenizers import Tokenizer, models


def tiny_run(*, num_layers: int, sequence_length: int) -> RunConfig:
    """One process on the CPU; the second layer is dense."""
    model = Qwen3MoeConfig(
        vocab_size=61,
        hidden_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=20,
        moe_intermediate_size=10,
        num_experts=8,
        num_experts_per_tok=3,
        mlp_only_layers=(1,),
        initializer_range=0.2,
        max_position_embeddings=64,
    )
    return RunConfig(
        name="tiny",
        model=model,
        mesh=parse_mesh("single"),
        train=TrainConfig(
            steps=1, batch=8, sequence_length=sequence_length, dtype="fp32", device="cpu"
        ),
        lr=LearningRateConfig(schedule="constant", peak=1e-3, warmup_steps=1),
        balance=BalanceConfig(coefficient=0.02),
    )


def tiny_dense_run(*, num_layers: int, sequence_length: int) -> RunConfig:
    """The same run of a model without experts."""
    model = Qwen3Config(
        vocab_size=61,
        hidden_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=20,
        initializer_range=0.2,
        max_position_embeddings=64,
    )
    run = tiny_run(num_layers=num_layers, sequence_length=sequence_length)
    return replace(run, model=model, balance=BalanceConfig())


def one_word_tokenizer(folder: Path) -> Path:
    """The folder, new, with a tokenizer of one word for exports that need none."""
    folder.mkdir()
    Tokenizer(models.WordLevel({"word": 0}, "word")).save(str(folder / "tokenizer.json"))
    return folder
