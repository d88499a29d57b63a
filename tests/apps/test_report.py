"""`loss.png` is drawn from the metrics, without a display."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread
from pith_apps.report import plot_losses


def write_metrics(folder: Path, *, training: int, held_out: int) -> None:
    records: list[dict[str, float]] = []
    for step in range(training + 1):
        if step:
            loss = 2.5 + 5.8 * np.exp(-step / 40) + 0.3 * np.sin(step * 12.9898)
            records.append({"step": step, "loss": loss})
        if step % 40 == 0 and held_out:
            records.append({"step": step, "held_out_loss": 2.7 + 5.6 * np.exp(-step / 40)})
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(text)


def colours(path: Path) -> set[tuple[int, ...]]:
    pixels = (imread(path)[:, :, :3] * 255).round().astype(int)
    return {tuple(row) for row in np.unique(pixels.reshape(-1, 3), axis=0).tolist()}


def test_loss_picture(tmp_path: Path) -> None:
    write_metrics(tmp_path, training=200, held_out=1)
    path = tmp_path / "loss.png"
    plot_losses(tmp_path, unigram_entropy=6.38)
    assert imread(path).shape == (600, 960, 4)
    blue, orange, gray = (31, 119, 180), (255, 127, 14), (128, 128, 128)
    assert {blue, orange, gray} <= colours(path)
    write_metrics(tmp_path, training=3, held_out=0)
    plot_losses(tmp_path, unigram_entropy=6.38)
    assert orange not in colours(path)


def test_a_run_that_only_evaluated(tmp_path: Path) -> None:
    write_metrics(tmp_path, training=0, held_out=1)
    plot_losses(tmp_path, unigram_entropy=6.38)
    assert (tmp_path / "loss.png").exists()


def test_a_finished_run_whose_records_are_gone_still_ends(tmp_path: Path) -> None:
    blue, orange = (31, 119, 180), (255, 127, 14)
    plot_losses(tmp_path, unigram_entropy=6.38)
    assert not {blue, orange} & colours(tmp_path / "loss.png")


def test_the_mean_ends_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 losses in steps 1 to 40 and windows of two: 39 means, the first at step 2."""
    lines: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    plot = Axes.plot

    def recorded(axes: Axes, x: np.ndarray, y: np.ndarray, *rest: object, **style: Any) -> object:
        lines[style["label"]] = (x, y)
        return plot(axes, x, y, *rest, **style)

    monkeypatch.setattr(Axes, "plot", recorded)
    write_metrics(tmp_path, training=40, held_out=0)
    plot_losses(tmp_path, unigram_entropy=6.38)
    losses = lines["training, a step"][1]
    steps, means = lines["training, mean of 2 steps"]
    assert steps.tolist() == list(range(2, 41))
    assert np.allclose(means, [(a + b) / 2 for a, b in pairwise(losses)], rtol=1e-12)
