"""Faults in a model file end a run of four ranks at their own line, printed first."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pith_models
import pytest
from pith_apps.corpus import prepare_standard_library

RUN = ["pretrain", "qwen3-30b-a3b-tiny", "--mesh.pp", "2", "--mesh.ep", "2", "--train.steps", "1"]
RUN += ["--evaluation.sequences", "1", "--lr.warmup-steps", "0", "--lr.decay-steps", "1"]

# What stands in qwen3_moe.py -> what is put there, and a part of the message.
FAULTS = {
    "stride": (
        "key = rms_norm(linear(normed, self.k_proj).view(heads), self.k_norm, eps)",
        "key = rms_norm(linear(normed, self.k_proj).t().view(-1), self.k_norm, eps)",
        "view size is not compatible",
    ),
    "shape": (
        "value = linear(normed, self.v_proj).view(heads)",
        "value = linear(normed, self.v_proj).view(normed.shape[0], -1, D + 1)",
        "is invalid for input of size",
    ),
    "operands": (
        "return hidden + linear(out.flatten(1), self.o_proj)",
        "return hidden + linear(out.flatten(1), self.q_proj)",
        "mat1 and mat2 shapes cannot be multiplied",
    ),
    "dtype": (
        "return hidden + linear(out.flatten(1), self.o_proj)",
        "return hidden + linear(out.flatten(1).double(), self.o_proj)",
        "have the same dtype, but got: double != float",
    ),
    "missing parameter": (
        "logits = router_logits(tokens, self.router)",
        "logits = router_logits(tokens, self.gate)",
        "has no attribute 'gate'",
    ),
    "missing name": (
        "return residual + combined",
        "return residual + conbined",
        "name 'conbined' is not defined",
    ),
    "missing field": (
        "normed = rms_norm(hidden, self.norm, eps)",
        "normed = rms_norm(hidden, self.norm, config.layer_norm_eps)",
        "has no attribute 'layer_norm_eps'",
    ),
    "missing argument": (
        "return grouped_linear(swiglu(gate_up), self.experts_down_proj, groups, weight_grads)",
        "return grouped_linear(swiglu(), self.experts_down_proj, groups, weight_grads)",
        "missing 1 required positional argument: 'gate_up'",
    ),
    "expert count": (
        "gate_up = grouped_linear(tokens, self.experts_gate_up, groups, weight_grads)",
        "gate_up = grouped_linear(tokens, self.experts_gate_up[1:], groups, weight_grads)",
        "4 groups of",
    ),
    "top-k": (
        "ids, weights, scores = score_topk(",
        "ids, weights, scores = score_topk(logits, 99, True) if self else score_topk(",
        "top_k: 99 is not between 1 and the 8 experts",
    ),
    "missing rows": (
        "return residual + combined",
        "return residual + combined[1:]",
        "must match the size of tensor",
    ),
    "NaN": (
        "return tokens, residual, routing",
        "return tokens, residual * float('nan'), routing",
        "mul makes a NaN of operands without one",
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder of runs with little text in it."""
    folder = tmp_path_factory.mktemp("runs")
    prepare_standard_library(folder / "standard-library", vocab_size=4096, max_bytes=600_000)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_faulty_line_is_printed_first(tmp_path, runs, fault):
    before, after, message = FAULTS[fault]
    package = tmp_path / "packages" / "pith-models" / "src" / "pith_models"
    shutil.copytree(Path(pith_models.__file__).parent, package)
    model = package / "qwen3_moe.py"
    text = model.read_text()
    assert before in text
    model.write_text(text.replace(before, after, 1))
    line = text[: text.index(before)].count("\n") + 1
    done = subprocess.run(
        [sys.executable, "-m", "pith_apps.cli", *RUN, "--runs-folder", runs, "--name", fault],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    first = re.match(r"\[rank (\d)\] (\S+):(\d+) in \w+: (.*)\n", done.stderr)
    assert first and first.groups()[1:] == (str(model), str(line), after), done.stderr
    frame = rf'^\[rank {first[1]}\]   File "(\S+/packages/\S+)", line (\d+), in (\w+)'
    frames = re.findall(frame, done.stderr, re.MULTILINE)
    of_caller = [f for f in frames if "/pith_ops/" not in f[0] and f[2] != "__torch_function__"]
    assert of_caller[-1][:2] == (str(model), str(line)), done.stderr
    assert message in done.stderr
