"""What a person and a script see of a run: a live view, metrics on disk, curves, episodes.

:class:`RunMonitor` is the one thing that a run talks to. It takes plain mappings and hands them to

- ``metrics.jsonl`` and ``evals.jsonl``, one flushed line each, for scripts and for resuming;
- TensorBoard events under ``tensorboard/``;
- ``reward.png``, redrawn now and then and at the end;
- a display: live on a terminal, plain lines elsewhere, nothing when quiet.

It knows nothing of engines or trainers. TensorBoard and Matplotlib are imported when first needed.
"""

from relax_agent.monitor.episodes import before_after
from relax_agent.monitor.metrics import read_metrics
from relax_agent.monitor.run_monitor import RunMonitor

__all__ = ["RunMonitor", "before_after", "read_metrics"]
