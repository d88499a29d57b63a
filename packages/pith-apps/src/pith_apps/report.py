"""The picture of a run: `loss.png` from `metrics.jsonl`, without a display.

A model below the entropy of single tokens uses context.
"""

from pathlib import Path

import numpy

from pith_apps.run_log import read_metrics


def plot_losses(folder: Path, *, unigram_entropy: float) -> None:
    """Draw it in a run folder; `unigram_entropy`, of held-out tokens, in nats."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read_metrics(folder)
    training, held_out = (
        numpy.array([(r["step"], r[name]) for r in records if name in r])
        for name in ("loss", "held_out_loss")
    )

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if len(training):
        steps, losses = training.T
        axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="training, a step")
        window = max(1, len(losses) // 20)
        mean = numpy.convolve(losses, numpy.ones(window) / window, "valid")
        label = f"training, mean of {window} steps"
        axes.plot(steps[window - 1 :], mean, color="tab:blue", label=label)
    if len(held_out):
        steps, losses = held_out.T
        label = f"held out, {losses[-1]:.3f} at the end"
        axes.plot(steps, losses, "o-", color="tab:orange", label=label)
    label = f"entropy of single tokens, {unigram_entropy:.3f}"
    axes.axhline(unigram_entropy, color="gray", linestyle="--", linewidth=1, label=label)
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=folder.resolve().name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "loss.png")
