"""``reward.png``: success, reward and staleness of a run over its steps.

Drawn with Matplotlib's own objects rather than ``pyplot``, which keeps global state: this may run
in a thread beside the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_agent.errors import MissingExtraError, StorageError

WINDOW = 10
"""Steps that the moving mean looks back."""

_INK, _DIM, _GRID = "#1c2024", "#68707a", "#e3e6ea"
_BLUE, _ORANGE = "#3b6fd4", "#c2681a"


def draw_chart(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    evals: Sequence[Mapping[str, Any]] = (),
    *,
    title: str,
) -> None:
    """Draw the curves of a run into a PNG file, whole or not at all.

    Args:
        path: The file to write.
        rows: One mapping a step, as in ``metrics.jsonl``.
        evals: One mapping an evaluation, as in ``evals.jsonl``.
        title: The line at the top.

    Raises:
        StorageError: The file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "train") from None
    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    success, reward, staleness = figure.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": [2, 1, 1]}
    )
    _draw_success(success, rows, evals)
    _draw_mean(reward, rows, "reward", _BLUE)
    reward.set_ylim(bottom=None if _any_below_zero(rows) else 0.0)
    _draw_staleness(staleness, rows)
    success.set_title(title, loc="left", fontsize=13, color=_INK, pad=12)
    staleness.set_xlabel("optimizer step", color=_DIM)
    _save(figure, path)


def moving_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Return for each position the mean of the last ``window`` values up to it."""
    means = []
    for end in range(1, len(values) + 1):
        last = values[max(0, end - window) : end]
        means.append(sum(last) / len(last))
    return means


def column(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return the steps that have a number of that name, and the numbers."""
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in found], [float(value) for _, value in found]


def _draw_success(
    axes: Any, rows: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]]
) -> None:
    _draw_mean(axes, rows, "success", _BLUE)
    steps, values = column(evals, "success")
    if steps:
        axes.plot(
            steps, values, "D", color=_ORANGE, markersize=7, clip_on=False, zorder=5,
            label="held-out tasks, greedy",
        )  # fmt: skip
        for step, value in zip(steps, values, strict=True):
            axes.annotate(
                f"{value:.2f}",
                (step, value),
                xytext=(0, -18 if value > 0.2 else 10),
                textcoords="offset points",
                ha="center",
                color=_ORANGE,
                fontsize=10,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )
    axes.set_ylim(0, 1.03)
    _legend(axes, columns=3)


def _any_below_zero(rows: Sequence[Mapping[str, Any]]) -> bool:
    return min(column(rows, "reward")[1], default=0.0) < 0


def _draw_mean(axes: Any, rows: Sequence[Mapping[str, Any]], name: str, color: str) -> None:
    steps, values = column(rows, name)
    axes.plot(
        steps, values, "o", color=color, alpha=0.3, markersize=4, markeredgewidth=0,
        label="sampled, each step",
    )  # fmt: skip
    axes.plot(steps, moving_mean(values), color=color, linewidth=2, label=f"mean of {WINDOW} steps")
    _style(axes, name)


def _draw_staleness(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    steps, most = column(rows, "staleness_max")
    axes.plot(
        steps, most, color=_ORANGE, linewidth=1.2, drawstyle="steps-mid", label="oldest token"
    )
    steps, mean = column(rows, "staleness_mean")
    axes.plot(steps, mean, color=_BLUE, linewidth=2, label="mean over tokens")
    axes.set_ylim(0, max([1.0, *most]) * 1.15)
    axes.yaxis.get_major_locator().set_params(integer=True)
    _style(axes, "staleness\n(weight versions)")
    if steps:
        _legend(axes, columns=2)


def _legend(axes: Any, columns: int) -> None:
    """Put the legend above the axes, where no data can be."""
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 0.98), ncols=columns,
        frameon=False, fontsize=9, labelcolor=_DIM,
    )  # fmt: skip


def _style(axes: Any, label: str) -> None:
    axes.set_ylabel(label, color=_DIM)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_DIM, length=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)


def _save(figure: Any, path: Path) -> None:
    part = path.with_name(path.name + ".part")
    try:
        figure.savefig(part, format="png", dpi=140)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
