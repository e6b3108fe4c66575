"""The one object that a run tells what happens; see :mod:`relax_agent.monitor`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.text import Text

from relax_agent.episode import Episode
from relax_agent.errors import RelaxError
from relax_agent.monitor.chart import draw_chart
from relax_agent.monitor.display import TRAINING, RunView, make_display
from relax_agent.monitor.episodes import before_after
from relax_agent.monitor.metrics import MetricsWriter, read_metrics
from relax_agent.monitor.tensorboard import TensorBoardWriter
from relax_agent.pages import plain

_REDRAW_S = 60.0


class RunMonitor:
    """Writes and shows what a run tells. Use as a context manager, or call :meth:`close`."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        total_steps: int,
        last_step: int | None = None,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the run's files and start the display.

        Args:
            folder: The run's folder.
            name: What the run is called.
            total_steps: How many steps it shall make.
            last_step: The step of the checkpoint that the run goes on from; what was written about
                later steps is cut off. None for a new run.
            quiet: Show nothing.
            console: Where to show it; None for standard output.
            clock: Seconds that never go back.

        Raises:
            StorageError: A file cannot be written.
        """
        self._folder = folder
        self._name = name
        self._clock = clock
        self._metrics = MetricsWriter(folder / "metrics.jsonl", last_step=last_step)
        self._evals = MetricsWriter(folder / "evals.jsonl", last_step=last_step)
        self._events = TensorBoardWriter(folder / "tensorboard", last_step=last_step)
        self._drawing: threading.Thread | None = None
        self._drawn = clock()
        self._closed = False
        self._console = console or Console()
        self._view = RunView(name, total_steps, clock)
        if last_step is not None:
            self._recall()
        self._display = make_display(self._view, self._console, quiet=quiet)

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        """Record one step.

        Args:
            metrics: What the step was like; ``step`` counts from 1, ``time_s`` holds seconds by
                part. Everything goes to disk, what is known is shown.

        Raises:
            StorageError: The disk is full.
        """
        self._metrics.write(metrics)
        self._events.write(int(metrics["step"]), metrics)
        self._view.steps.append(metrics)
        self._view.phase = TRAINING
        self._display.step()
        self._redraw_now_and_then()

    def on_eval(self, step: int, success: float, **more: float) -> None:
        """Record a greedy evaluation on held-out tasks after ``step`` steps.

        Raises:
            StorageError: The disk is full.
        """
        result = {"success": success, **more}
        self._evals.write({"step": step, **result})
        self._events.write(step, {"eval": result})
        self._view.evals.append((step, success))
        self._display.update()

    def on_progress(self, *, in_flight: int | None) -> None:
        """Tell how many episodes are being sampled; None if the rollout has ended."""
        self._view.in_flight = in_flight
        self._display.update()

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """Tell what the run is doing and how far it is, e.g. ``("warm start", 3, 40)``.

        :data:`~relax_agent.monitor.display.TRAINING` shows the steps.
        """
        self._view.phase, self._view.done, self._view.total = plain(name), done, total
        self._display.update()

    @property
    def doing(self) -> str:
        """What the run said last that it is doing."""
        return self._view.phase

    def message(self, text: str) -> None:
        """Show one remark."""
        self._display.print(Text(plain(text)))

    def show(self, what: RenderableType) -> None:
        """Show anything that rich can draw."""
        self._display.print(what)

    def show_before_after(self, before: Episode, after: Episode) -> None:
        """Show two episodes of one task side by side."""
        self.show(before_after(before, after, width=self._console.width))

    def close(self) -> None:
        """Stop the display, draw the curves once more and close the files. Idempotent.

        Raises:
            StorageError: Something could not be written.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as stack:  # each is closed, whatever the others do
            stack.callback(self._draw)
            if self._drawing is not None:
                stack.callback(self._drawing.join)
            stack.callback(self._display.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(RelaxError):  # the error that ends the run says more
            self.close()

    def _recall(self) -> None:
        self._view.steps.extend(read_metrics(self._folder / "metrics.jsonl"))
        evals = read_metrics(self._folder / "evals.jsonl")
        self._view.evals.extend((item["step"], item["success"]) for item in evals)

    def _draw(self) -> None:
        rows = read_metrics(self._folder / "metrics.jsonl")
        evals = read_metrics(self._folder / "evals.jsonl")
        if rows:
            draw_chart(self._folder / "reward.png", rows, evals, title=self._name)

    def _redraw_now_and_then(self) -> None:
        """Draw beside the run: it takes a second, which the event loop does not have."""
        busy = self._drawing is not None and self._drawing.is_alive()
        if not busy and self._clock() - self._drawn >= _REDRAW_S:
            self._drawn = self._clock()
            self._drawing = threading.Thread(target=self._draw_quietly, name="chart")
            self._drawing.start()

    def _draw_quietly(self) -> None:
        with contextlib.suppress(RelaxError):  # close() draws again and then tells
            self._draw()
