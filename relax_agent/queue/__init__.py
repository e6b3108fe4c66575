"""The trajectory queue: where finished groups wait for the trainer, with bounded staleness."""

from relax_agent.queue.local import LocalQueue
from relax_agent.queue.payload import load_group, save_group
from relax_agent.queue.protocol import (
    DropReason,
    Lease,
    LeasedGroup,
    QueueStats,
    Restored,
    TrajectoryQueue,
)
from relax_agent.queue.settings import QueueSettings

__all__ = [
    "DropReason",
    "Lease",
    "LeasedGroup",
    "LocalQueue",
    "QueueSettings",
    "QueueStats",
    "Restored",
    "TrajectoryQueue",
    "load_group",
    "save_group",
]
