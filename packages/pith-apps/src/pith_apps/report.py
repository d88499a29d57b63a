"""The picture of a run: `loss.png` from `metrics.jsonl`.

Training loss of every step (faint) with a running mean over it, held-out loss as points, and the
entropy of single tokens as a line: a model below it has learned to use context. matplotlib is
imported by the function that draws, with its file-only backend, so no display is needed.
"""

from pathlib import Path

import numpy

from pith_apps.run_log import read_metrics


def plot_losses(folder: Path, *, unigram_entropy: float | None = None) -> Path:
    """Draw `loss.png` in a run folder and return its path.

    Args:
        folder: the run folder, with `metrics.jsonl`.
        unigram_entropy: of the held-out tokens in nats, drawn as a reference line.

    Raises:
        ValueError: nothing has been recorded yet.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read_metrics(folder)
    if not records:
        raise ValueError(f"{folder}: metrics.jsonl holds no record yet")
    training = numpy.array([(r["step"], r["loss"]) for r in records if "loss" in r])
    held_out = numpy.array(
        [(r["step"], r["held_out_loss"]) for r in records if "held_out_loss" in r]
    )

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if len(training):
        steps, losses = training.T
        axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="training, a step")
        window = max(1, len(losses) // 20)
        mean = running_mean(losses, window)
        axes.plot(steps, mean, color="tab:blue", label=f"training, mean of {window} steps")
    if len(held_out):
        steps, losses = held_out.T
        axes.plot(steps, losses, "o-", color="tab:orange", label="held out")
        axes.annotate(
            f"{losses[-1]:.3f}",
            (steps[-1], losses[-1]),
            xytext=(0, 10),
            ha="right",
            textcoords="offset points",
            color="tab:orange",
        )
    if unigram_entropy is not None:
        label = f"entropy of single tokens, {unigram_entropy:.3f}"
        axes.axhline(unigram_entropy, color="gray", linestyle="--", linewidth=1, label=label)
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=folder.resolve().name)
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / "loss.png"
    figure.savefig(path)
    return path


def running_mean(values: numpy.ndarray, window: int) -> numpy.ndarray:
    """Mean of each value and the `window - 1` before it (fewer at the start)."""
    sums = numpy.concatenate([[0.0], numpy.cumsum(values)])
    ends = numpy.arange(1, len(values) + 1)
    starts = numpy.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)
