"""Hugging Face folders written by transformers: read, account for, write back byte by byte."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from pith_models.build import canonical_tensors, model_config_from_hf
from pith_models.hf import (
    INDEX_FILE,
    SINGLE_FILE,
    CanonicalTensor,
    HuggingFaceTensors,
    export_tensors,
    read_hf_config,
)
from safetensors.torch import load_file, save_file
from tiny_qwen3 import FILE_BYTES, assert_same_bytes, read_weights, save_tiny_qwen3
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_tiny_qwen3(tmp_path / "source")
    return tmp_path / "source"


def read(folder: Path, dtype: torch.dtype = torch.float32) -> HuggingFaceTensors:
    config = model_config_from_hf(read_hf_config(folder))
    return HuggingFaceTensors(folder, canonical_tensors(config), dtype)


def export(
    source: Path, out: Path, max_file_bytes: int = FILE_BYTES, replace: bool = False
) -> None:
    config = model_config_from_hf(read_hf_config(source))
    export_tensors(
        read(source),
        canonical_tensors(config),
        {**read_hf_config(source), **config.to_hf()},
        out,
        dtype=torch.bfloat16,
        companions=source,
        max_file_bytes=max_file_bytes,
        replace=replace,
    )


def test_import_then_export_is_byte_identical(source: Path, tmp_path: Path):
    out = tmp_path / "out"
    export(source, out)
    assert_same_bytes(source, out)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (source / name).read_bytes() == (out / name).read_bytes()
    theirs, ours = (AutoConfig.from_pretrained(f).to_dict() for f in (source, out))
    for ignored in ("_name_or_path", "transformers_version"):
        theirs.pop(ignored), ours.pop(ignored)
    assert {k: ours.get(k) for k in theirs} == theirs


@pytest.fixture
def tied_source(tmp_path: Path) -> Path:
    save_tiny_qwen3(tmp_path / "tied", tied=True)
    return tmp_path / "tied"


def test_tied_model_is_written_as_transformers_writes_it(tied_source: Path, tmp_path: Path):
    """One key for both ends, which are one parameter again when transformers reads the folder."""
    out = tmp_path / "out"
    export(tied_source, out)
    assert_same_bytes(tied_source, out)
    assert "lm_head.weight" not in read_weights(out)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    theirs, ours = (AutoModelForCausalLM.from_pretrained(f) for f in (tied_source, out))
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    tokens = torch.arange(40)[None]
    assert torch.equal(theirs(tokens).logits, ours(tokens).logits)


def write_single_file(folder: Path, tensors: dict[str, Tensor]) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors")


def test_a_copy_of_the_tied_embedding_must_equal_it(tied_source: Path, tmp_path: Path):
    """Some programs write the head of a tied model too."""
    tensors = read_weights(tied_source)
    head = tensors["model.embed_tokens.weight"].clone()
    write_single_file(tied_source, {**tensors, "lm_head.weight": head})
    assert f"keys: {len(tensors) + 1} loaded" in read(tied_source).account
    export(tied_source, tmp_path / "out")
    assert read_weights(tmp_path / "out").keys() == tensors.keys()
    write_single_file(tied_source, {**tensors, "lm_head.weight": head.float()})
    read(tied_source)
    head[5, 3] += 1
    write_single_file(tied_source, {**tensors, "lm_head.weight": head})
    with pytest.raises(
        ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"
    ):
        read(tied_source)
    write_single_file(tied_source, {**tensors, "lm_head.weight": head[1:]})
    with pytest.raises(
        ValueError, match=r"wrong shapes or dtypes \(1\): lm_head\.weight \[96, 64\]"
    ):
        read(tied_source)


def test_an_untied_model_needs_its_head(source: Path):
    tensors = read_weights(source)
    del tensors["lm_head.weight"]
    write_single_file(source, tensors)
    with pytest.raises(ValueError, match=r"missing keys \(1\): lm_head\.weight"):
        read(source)


def test_exported_folder_opens_in_transformers(source: Path, tmp_path: Path):
    out = tmp_path / "out"
    export(source, out)
    tokens = torch.arange(40)[None]
    theirs, ours = (AutoModelForCausalLM.from_pretrained(f) for f in (source, out))
    assert torch.equal(theirs(tokens).logits, ours(tokens).logits)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.eos_token_id == 1
    assert len(tokenizer) < ours.config.vocab_size == 97


def test_index_is_true_and_files_are_bounded(source: Path, tmp_path: Path):
    out = tmp_path / "out"
    export(source, out)
    index = json.loads((out / INDEX_FILE).read_text())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    assert index["weight_map"] == {key: path.name for path in files for key in load_file(path)}
    assert index["metadata"]["total_size"] == 2 * sum(t.numel() for t in read_weights(out).values())
    assert all(path.stat().st_size < FILE_BYTES + 10_000 for path in files)


def test_small_model_is_one_file_without_index(source: Path, tmp_path: Path):
    export(source, tmp_path / "out", max_file_bytes=2**30)
    assert [p.name for p in (tmp_path / "out").glob("model*")] == ["model.safetensors"]


def test_account_counts_keys_and_dtype_changes(source: Path):
    keys = len(read_weights(source))
    expected = f"keys: {keys} loaded, 0 unexpected, 0 missing; dtype changes: "
    assert read(source).account == f"{expected}{keys} keys bfloat16 -> float32"
    assert read(source, torch.bfloat16).account == f"{expected}none"


def test_every_faulty_key_is_listed(source: Path):
    tensors = read_weights(source)
    for path in source.glob("model*"):
        path.unlink()
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(128)
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(80, 64)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match="does not hold this model") as error:
        read(source)
    for part in (
        "missing keys (1): model.layers.2.mlp.experts.5.up_proj.weight",
        "unexpected keys (1): model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.mlp.down_proj.weight [80, 64] F32, expected [64, 80]",
    ):
        assert part in str(error.value)


def test_a_single_file_beside_an_index_is_refused(source: Path):
    """transformers reads the single file: what a re-save has left may be either."""
    save_file({"lm_head.weight": torch.zeros(97, 64)}, source / SINGLE_FILE)
    with pytest.raises(ValueError, match=r"both hold lm_head\.weight"):
        read(source)
    save_file({"else": torch.zeros(1)}, source / SINGLE_FILE)
    with pytest.raises(ValueError, match="the files disagree about else"):
        read(source)


def test_index_at_odds_with_its_files_is_refused(source: Path):
    index = json.loads((source / INDEX_FILE).read_text())
    moved = dict(index["weight_map"])
    moved["lm_head.weight"] = moved["model.layers.1.mlp.up_proj.weight"]
    (source / INDEX_FILE).write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(ValueError, match=r"disagree about lm_head\.weight"):
        read(source)
    save_file({"lm_head.weight": torch.zeros(97, 64)}, source / "zz.safetensors")
    moved["lm_head.weight"] = "zz.safetensors"
    (source / INDEX_FILE).write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(ValueError, match=r"zz\.safetensors and .* both hold lm_head\.weight"):
        read(source)
    moved["lm_head.weight"] = "model-00099-of-00099.safetensors"
    (source / INDEX_FILE).write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(ValueError, match=r"lacks model-00099-of-00099\.safetensors"):
        read(source)


def test_folder_without_config_or_weights_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        read_hf_config(tmp_path)
    with pytest.raises(ValueError, match=r"lacks model\.safetensors"):
        HuggingFaceTensors(tmp_path, (), torch.float32)


@pytest.mark.parametrize("text", ["[1]", "null", "{", "\xe9"])
def test_config_that_is_no_json_object_is_refused(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json (is not JSON|holds a)"):
        read_hf_config(tmp_path)


def test_existing_folder_is_kept_unless_replaced(source: Path, tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "note.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists"):
        export(source, out)
    assert [path.name for path in out.iterdir()] == ["note.txt"]
    export(source, out, replace=True)
    assert_same_bytes(source, out)
    assert not (out / "note.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(ValueError, match="exists"):
        export(source, tmp_path / "dangling")
    with pytest.raises(ValueError, match=r"cannot write .*note/out"):
        export(source, tmp_path / "source" / "config.json" / "note" / "out")


class Failing(Mapping[str, Tensor]):
    """Good tensors until the last one is asked for."""

    def __init__(self, good: Mapping[str, Tensor]):
        self.good = good

    def __getitem__(self, name: str) -> Tensor:
        if name == "head":
            raise OSError("disk gone")
        return self.good[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.good)

    def __len__(self) -> int:
        return len(self.good)


def test_unfinished_export_never_bears_the_name(source: Path, tmp_path: Path):
    out = tmp_path / "out"
    config = model_config_from_hf(read_hf_config(source))
    with pytest.raises(OSError, match="disk gone"):
        export_tensors(
            Failing(read(source)),
            canonical_tensors(config),
            config.to_hf(),
            out,
            dtype=torch.bfloat16,
        )
    assert not out.exists()
    export(source, out)
    assert not out.with_name("out.tmp").exists()


def test_tensors_of_another_model_are_refused(tmp_path: Path):
    layout = (CanonicalTensor("a", (2, 3), ("x.a",)), CanonicalTensor("b", (2,), ("x.b",)))
    with pytest.raises(ValueError, match="missing b; unexpected c"):
        export_tensors(
            {"a": torch.zeros(2, 3), "c": torch.zeros(2)},
            layout,
            {},
            tmp_path / "out",
            dtype=torch.float32,
        )
    assert not list(tmp_path.iterdir())


MEMORY_SCRIPT = """
import resource, sys, torch
from pathlib import Path
from pith_models.hf import CanonicalTensor, HuggingFaceTensors, export_tensors

layout = [
    CanonicalTensor(f"{i}", (8, 256, 512), tuple(f"{i}.{e}" for e in range(8)), True)
    for i in range(40)
]

class Made(dict):
    def __getitem__(self, name):
        return torch.full((8, 256, 512), float(name))

folder = Path(sys.argv[1])
made = Made.fromkeys(t.name for t in layout)
def grown(before):
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before

start = grown(0)
export_tensors(made, layout, {}, folder / "a", dtype=torch.float32, max_file_bytes=8 * 2**20)
read = HuggingFaceTensors(folder / "a", layout, torch.float32)
export_tensors(read, layout, {}, folder / "b", dtype=torch.bfloat16, max_file_bytes=8 * 2**20)
print(grown(start) / 2**20, len(list((folder / "a").glob("*.safetensors"))))
"""


def test_memory_stays_at_one_tensor_and_one_file(tmp_path: Path):
    """A model of 160 MiB in 20 files passes through in a fraction of that."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    mebibytes, files = done.stdout.split()
    assert int(files) == 20
    assert float(mebibytes) < 48


@pytest.mark.parametrize("name", [INDEX_FILE, "first weights"])
@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"weight_map": 3}', b'{"weight_map": {"a": 1}}']
)
def test_damaged_files_are_named(source: Path, name: str, content: bytes):
    files = sorted(source.glob("*.safetensors"))
    path = files[0] if name == "first weights" else source / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        read(source)
