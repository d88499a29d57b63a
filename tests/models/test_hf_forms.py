"""Fused and quantised keys of Hugging Face files; decoded by transformers for comparison."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from pith_models.build import canonical_tensors, model_config_from_hf
from pith_models.hf import (
    INDEX_FILE,
    CanonicalTensor,
    FusedKey,
    HuggingFaceTensors,
    export_tensors,
    read_hf_config,
)
from safetensors.torch import load_file, save_file
from tiny_qwen3 import read_weights, save_tiny_qwen3
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

E, H = 3, 64
STEM = "model.layers.0.mlp.experts"


def gpt_oss_layer(width: int) -> tuple[CanonicalTensor, ...]:
    return (
        stack("gate_proj", (E, width, H), FusedKey(f"{STEM}.gate_up_proj", 0, True, True)),
        stack("up_proj", (E, width, H), FusedKey(f"{STEM}.gate_up_proj", 1, True, True)),
        stack("down_proj", (E, H, width), FusedKey(f"{STEM}.down_proj", is_transposed=True)),
        stack("gate_bias", (E, width), FusedKey(f"{STEM}.gate_up_proj_bias", 0, True)),
        stack("up_bias", (E, width), FusedKey(f"{STEM}.gate_up_proj_bias", 1, True)),
        stack("down_bias", (E, H), FusedKey(f"{STEM}.down_proj_bias")),
    )


def stack(name: str, shape: tuple[int, ...], fused: FusedKey) -> CanonicalTensor:
    return CanonicalTensor(f"experts_{name}", shape, (), is_expert_stack=True, fused=fused)


def expert_layout(width: int, hidden: int) -> list[CanonicalTensor]:
    """A key per expert, or fused in halves."""
    up, down = (E, width, hidden), (E, hidden, width)
    return [
        CanonicalTensor(
            f"layers.0.experts_{name}",
            shape,
            tuple(f"{STEM}.{expert}.{name}.weight" for expert in range(E)),
            is_expert_stack=True,
            fused=FusedKey(f"{STEM}.{fused}", half),
        )
        for name, shape, fused, half in (
            ("gate_proj", up, "gate_up_proj", 0),
            ("up_proj", up, "gate_up_proj", 1),
            ("down_proj", down, "down_proj", None),
        )
    ]


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def gpt_oss_file(width: int) -> dict[str, Tensor]:
    return {
        f"{STEM}.gate_up_proj": draw(E, H, 2 * width),
        f"{STEM}.gate_up_proj_bias": draw(E, 2 * width),
        f"{STEM}.down_proj": draw(E, width, H),
        f"{STEM}.down_proj_bias": draw(E, H),
    }


def read(
    folder: Path,
    layout: Sequence[CanonicalTensor],
    tensors: Mapping[str, Tensor],
    skipped: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> HuggingFaceTensors:
    """What is read from a folder that holds these, over two files."""
    folder.mkdir(exist_ok=True)
    halves = {f"{half}.safetensors": dict(list(tensors.items())[half::2]) for half in (0, 1)}
    for name, content in halves.items():
        save_file({key: value.contiguous() for key, value in content.items()}, folder / name)
    weight_map = {key: name for name, content in halves.items() for key in content}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return HuggingFaceTensors(folder, layout, dtype, skipped)


def same_bits(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[key].dtype == second[key].dtype and torch.equal(first[key], second[key])
        for key in first
    )


@pytest.mark.parametrize("width", [H, 40])
def test_gpt_oss_keys_are_interleaved_and_transposed(width: int, tmp_path: Path):
    """The expert's own formula, as transformers writes it, on our canonical tensors."""
    theirs, layout = gpt_oss_file(width), gpt_oss_layer(width)
    ours = read(tmp_path / "in", layout, theirs, dtype=torch.bfloat16)
    x = draw(5, H)
    for expert in range(E):
        gate_up = x @ theirs[f"{STEM}.gate_up_proj"][expert]
        gate_up = gate_up + theirs[f"{STEM}.gate_up_proj_bias"][expert]
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        for name, expected in (("gate", gate), ("up", up)):
            weight, bias = ours[f"experts_{name}_proj"], ours[f"experts_{name}_bias"]
            torch.testing.assert_close(x @ weight[expert].T + bias[expert], expected)
        down, bias = ours["experts_down_proj"][expert], ours["experts_down_bias"][expert]
        expected = (
            up @ theirs[f"{STEM}.down_proj"][expert] + theirs[f"{STEM}.down_proj_bias"][expert]
        )
        torch.testing.assert_close(up @ down.T + bias, expected)
    export_tensors(ours, layout, {}, tmp_path / "out", dtype=torch.bfloat16, max_file_bytes=10_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert same_bits(read_weights(tmp_path / "out"), theirs)


def test_gate_and_up_are_not_mixed_up(tmp_path: Path):
    gate_up = torch.ones(E, H, 2 * H)
    gate_up[..., 1::2] = -1
    layout = gpt_oss_layer(H)
    theirs = gpt_oss_file(H) | {
        f"{STEM}.gate_up_proj": gate_up,
        f"{STEM}.gate_up_proj_bias": gate_up[:, 0],
    }
    ours = read(tmp_path / "in", layout, theirs)
    for kind in ("proj", "bias"):
        assert ours[f"experts_gate_{kind}"].unique().tolist() == [1]
        assert ours[f"experts_up_{kind}"].unique().tolist() == [-1]


def fused_qwen3(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The keys as transformers 5 holds them in memory."""
    found = {key: value for key, value in tensors.items() if ".mlp.experts." not in key}
    for stem in sorted({key.split("experts.")[0] for key in tensors.keys() - found.keys()}):
        gate, up, down = (
            torch.stack([tensors[f"{stem}experts.{e}.{name}.weight"] for e in range(8)])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        found[f"{stem}experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
        found[f"{stem}experts.down_proj"] = down
    return found


def test_both_expert_layouts_give_the_same_bits(tmp_path: Path):
    source = tmp_path / "source"
    save_tiny_qwen3(source)
    layout = canonical_tensors(model_config_from_hf(read_hf_config(source)))
    per_expert, fused = read_weights(source), fused_qwen3(read_weights(source))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    assert same_bits(fused, dict(model.state_dict()))
    first = read(tmp_path / "a", layout, per_expert)
    second = read(tmp_path / "b", layout, fused)
    assert same_bits(first, second)
    assert f"keys: {len(fused)} loaded" in second.account
    export_tensors(second, layout, {}, tmp_path / "out", dtype=torch.bfloat16)
    assert same_bits(read_weights(tmp_path / "out"), per_expert)


def test_a_stack_in_both_layouts_is_refused(tmp_path: Path):
    layout = expert_layout(40, H)
    fused = {f"{STEM}.gate_up_proj": draw(E, 80, H), f"{STEM}.down_proj": draw(E, H, 40)}
    extra = {f"{STEM}.1.up_proj.weight": draw(40, H)}
    read(tmp_path, layout, fused)
    with pytest.raises(ValueError, match=rf"unexpected keys \(1\): {STEM}\.1\.up_proj\.weight"):
        read(tmp_path, layout, fused | extra)
    del fused[f"{STEM}.gate_up_proj"]
    with pytest.raises(ValueError, match=r"missing keys \(5\): .*\.0\.gate_proj\.weight"):
        read(tmp_path, layout, fused | extra)


def packed(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Blocks and scales in which every code meets small, usual and large scales."""
    generator = torch.Generator().manual_seed(rows)
    shape = (E, rows, columns // 32)
    blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(253, shape, dtype=torch.uint8, generator=generator)


def mxfp4_file(width: int) -> dict[str, Tensor]:
    theirs = gpt_oss_file(width)
    for name, rows, columns in (("gate_up_proj", 2 * width, H), ("down_proj", H, width)):
        del theirs[f"{STEM}.{name}"]
        blocks, scales = packed(rows, columns)
        theirs |= {f"{STEM}.{name}_blocks": blocks, f"{STEM}.{name}_scales": scales}
    return theirs


@pytest.mark.parametrize("width", [64, 96])
def test_mxfp4_is_decoded_as_transformers_does(width: int, tmp_path: Path):
    theirs, layout = mxfp4_file(width), gpt_oss_layer(width)
    ours = read(tmp_path / "in", layout, theirs)
    assert "keys: 6 loaded" in ours.account and "2 keys U8 -> float32" in ours.account
    export_tensors(ours, layout, {}, tmp_path / "out", dtype=torch.bfloat16)
    out = read_weights(tmp_path / "out")
    assert out.keys() == gpt_oss_file(width).keys()
    for name in ("gate_up_proj", "down_proj"):
        blocks, scales = theirs[f"{STEM}.{name}_blocks"], theirs[f"{STEM}.{name}_scales"]
        expected = convert_moe_packed_tensors(blocks.clone(), scales.clone())
        assert torch.equal(out[f"{STEM}.{name}"], expected)
        assert expected.isfinite().all() and expected.unique().numel() > 1000
    # fp32 keeps what bf16 has: the decoded values need no rounding.
    export_tensors(ours, layout, {}, tmp_path / "wide", dtype=torch.float32)
    again = {key: value.bfloat16() for key, value in read_weights(tmp_path / "wide").items()}
    assert same_bits(again, out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"down_proj_scales": None}, r"missing keys \(1\): \S+\.down_proj_scales"),
        (
            {"down_proj_blocks": None},
            r"missing keys \(1\): \S+\.down_proj; unexpected keys \(1\): \S+_scales",
        ),
        ({"down_proj": draw(E, H, H)}, r"unexpected keys \(2\): \S+_blocks, \S+_scales"),
        (
            {"down_proj_scales": packed(H, 32)[1]},
            r"wrong shapes or dtypes \(1\): \S+_scales \[3, 64, 1\] U8, expected \[3, 64, 2\] U8",
        ),
        (
            {"down_proj_blocks": draw(E, H, 2, 16)},
            r"\(1\): \S+_blocks \[3, 64, 2, 16\] BF16, expected \[3, 64, 2, 16\] U8",
        ),
    ],
)
def test_half_an_mxfp4_tensor_is_refused(change: dict, message: str, tmp_path: Path):
    theirs: dict[str, Tensor | None] = dict(mxfp4_file(H))
    theirs |= {f"{STEM}.{name}": value for name, value in change.items()}
    with pytest.raises(ValueError, match=message):
        kept = {key: value for key, value in theirs.items() if value is not None}
        read(tmp_path, gpt_oss_layer(H), kept)


def fp8(*shape: int) -> tuple[Tensor, Tensor]:
    grid = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    values = (draw(*shape, dtype=torch.float32) * 100).to(torch.float8_e4m3fn)
    return values, draw(*grid, dtype=torch.float32).abs() * 1e-3 + 1e-5


def decoded(values: Tensor, scales: Tensor) -> Tensor:
    """By transformers: the product in the scales' fp32, then rounded."""
    found = Fp8Dequantize(None).convert({"x": [values], "x_scale_inv": [scales]})["x"][0]
    assert found.dtype == torch.float32
    return found.bfloat16()


def test_fp8_is_decoded_as_transformers_does(tmp_path: Path):
    """A whole tensor, one key per expert, and a fused stack, where the blocks are all full."""
    width, hidden = 256, 384
    layout = [
        CanonicalTensor("q", (128, 384), ("q.weight",)),
        CanonicalTensor("norm", (384,), ("norm.weight",)),
        *expert_layout(width, hidden),
    ]
    theirs = {"norm.weight": draw(384)}
    for tensor in layout:
        if tensor.name != "norm":
            for key in tensor.keys:
                values, scales = fp8(*tensor.stored()[key])
                theirs |= {key: values, f"{key}_scale_inv": scales}
    ours = read(tmp_path / "in", layout, theirs)
    assert f"keys: {len(theirs)} loaded" in ours.account
    assert "10 keys F8_E4M3 -> float32, 1 keys bfloat16 -> float32" in ours.account
    export_tensors(ours, layout, {}, tmp_path / "out", dtype=torch.bfloat16)
    out = read_weights(tmp_path / "out")
    assert out.keys() == {key for key in theirs if not key.endswith("_inv")}
    for key in out.keys() - {"norm.weight"}:
        scales = theirs[f"{key}_scale_inv"]
        expected = decoded(theirs[key], scales)
        assert torch.equal(out[key], expected), key
    stacked, grids = fp8(E, 2 * width, hidden)
    down, down_grids = fp8(E, hidden, width)
    fused = {
        "norm.weight": draw(384),
        "q.weight": theirs["q.weight"],
        "q.weight_scale_inv": theirs["q.weight_scale_inv"],
        f"{STEM}.gate_up_proj": stacked,
        f"{STEM}.gate_up_proj_scale_inv": grids,
        f"{STEM}.down_proj": down,
        f"{STEM}.down_proj_scale_inv": down_grids,
    }
    ours = read(tmp_path / "fused", layout, fused)
    expected = decoded(stacked, grids).float()
    assert torch.equal(ours["layers.0.experts_gate_proj"], expected[:, :width])
    assert torch.equal(ours["layers.0.experts_up_proj"], expected[:, width:])


def test_ragged_fp8_blocks(tmp_path: Path):
    values, scales = fp8(200, 130)
    layout = [CanonicalTensor("a", (200, 130), ("a.weight",))]
    ours = read(tmp_path, layout, {"a.weight": values, "a.weight_scale_inv": scales})["a"]
    for row in range(200):
        for column in (0, 127, 128, 129):
            exact = values[row, column].float() * scales[row // 128, column // 128]
            assert ours[row, column] == exact.bfloat16().float()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a.weight_scale_inv": None}, r"missing keys \(1\): a\.weight_scale_inv"),
        ({"a.weight": draw(200, 130)}, r"unexpected keys \(1\): a\.weight_scale_inv"),
        (
            {"a.weight_scale_inv": draw(2, 1, dtype=torch.float32)},
            r"a\.weight_scale_inv \[2, 1\] F32, expected \[2, 2\] F32",
        ),
        (
            {"a.weight": torch.zeros(200, 130, dtype=torch.int8)},
            r"\(1\): a\.weight \[200, 130\] I8, expected \[200, 130\] F64 or F32 ",
        ),
    ],
)
def test_fp8_without_its_scales_is_refused(change: dict, message: str, tmp_path: Path):
    values, scales = fp8(200, 130)
    theirs: dict[str, Tensor | None] = {"a.weight": values, "a.weight_scale_inv": scales}
    theirs |= change
    with pytest.raises(ValueError, match=message):
        read(
            tmp_path,
            [CanonicalTensor("a", (200, 130), ("a.weight",))],
            {key: value for key, value in theirs.items() if value is not None},
        )


def test_skipped_keys_are_reported_once(tmp_path: Path):
    layout = [CanonicalTensor("layers.6.a", (2, 3), ("model.layers.6.a",))]
    theirs = {"model.layers.6.a": draw(2, 3, dtype=torch.float32)}
    extra = {"model.layers.61.a": draw(2), "model.layers.61.eh_proj.weight": torch.zeros(1)}
    account = "keys: 1 loaded, 0 unexpected, 0 missing; dtype changes: none"
    assert read(tmp_path, layout, theirs, 61).account == account
    assert read(tmp_path, layout, theirs | extra, 61).account == (
        f"{account}; 2 keys of model.layers.61 skipped: multi-token prediction is not implemented"
    )
    with pytest.raises(ValueError, match=r"unexpected keys \(2\): model\.layers\.61\.a, "):
        read(tmp_path, layout, theirs | extra)
    del extra["model.layers.61.eh_proj.weight"]  # without its mark it may be a layer of the model
    with pytest.raises(ValueError, match=r"unexpected keys \(1\): model\.layers\.61\.a"):
        read(tmp_path, layout, theirs | extra, 61)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_files_are_those_of_safetensors(dtype: torch.dtype, tmp_path: Path):
    """Header, order and alignment; a tensor that stays fp32 is counted as such in the index."""
    layout = [
        CanonicalTensor("b", (3, 5), ("z.b",)),
        CanonicalTensor("bias", (7,), ("m.bias",), keeps_float32=True),
        CanonicalTensor("a", (5,), ("a.a",)),
    ]
    values = {tensor.name: draw(*tensor.shape, dtype=torch.float32) for tensor in layout}
    export_tensors(values, layout, {}, tmp_path / "one", dtype=dtype)
    expected = {
        "z.b": values["b"].to(dtype),
        "m.bias": values["bias"],
        "a.a": values["a"].to(dtype),
    }
    assert same_bits(load_file(tmp_path / "one" / "model.safetensors"), expected)
    save_file(expected, tmp_path / "oracle.safetensors", metadata={"format": "pt"})
    ours = (tmp_path / "one" / "model.safetensors").read_bytes()
    assert ours == (tmp_path / "oracle.safetensors").read_bytes()
    export_tensors(values, layout, {}, tmp_path / "many", dtype=dtype, max_file_bytes=40)
    metadata = json.loads((tmp_path / "many" / INDEX_FILE).read_text())["metadata"]
    assert metadata == {"total_size": 20 * dtype.itemsize + 28, "total_parameters": 27}
    assert same_bits(read_weights(tmp_path / "many"), expected)


def test_truncated_file_is_named(tmp_path: Path):
    layout = gpt_oss_layer(H)
    read(tmp_path, layout, gpt_oss_file(H))
    path = tmp_path / "1.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match=re.escape(f"{path} is damaged")):
        HuggingFaceTensors(tmp_path, layout, torch.float32)


LAYOUT = [CanonicalTensor(name, (4,), (name,)) for name in ("a", "b")]

SLOW_EXPORT = """
import sys, time, torch
from pathlib import Path
from pith_models.hf import CanonicalTensor, export_tensors

class Slow(dict):
    def __getitem__(self, name):
        if name == "b":
            print("half", flush=True)
            time.sleep(60)
        return torch.ones(4)

layout = [CanonicalTensor(name, (4,), (name,)) for name in ("a", "b")]
out = Path(sys.argv[1])
export_tensors(Slow(a=0, b=0), layout, {}, out, dtype=torch.float32, replace=True)
"""


def test_killed_export_leaves_only_a_temporary_folder(tmp_path: Path):
    """While it runs a second one is refused; after that its folder is in nobody's way."""
    out, values = tmp_path / "out", {"a": torch.ones(4), "b": torch.ones(4)}

    def export() -> None:
        export_tensors(values, LAYOUT, {}, out, dtype=torch.float32, replace=True)

    with subprocess.Popen(
        [sys.executable, "-c", SLOW_EXPORT, str(out)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "half\n"
        with pytest.raises(ValueError, match=r"out\.tmp is in use by another process"):
            export()
        process.kill()
    assert [path.name for path in tmp_path.iterdir()] == ["out.tmp"]
    (tmp_path / "out.replaced").mkdir()
    (tmp_path / "out.replaced" / "model.safetensors").write_text("left by a kill between two names")
    export()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "out.replaced").mkdir()
    (tmp_path / "out.replaced" / "old").touch()
    export()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
