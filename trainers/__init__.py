"""Trainers: one protocol, two implementations, shared batches and algorithms.

settings    which implementation and how (no torch)
protocol    what a trainer can do; what a step reports
batch       groups of episodes -> packed micro-batches
algorithms  advantages and losses, pure functions
losses      from log-probs of a micro-batch to its share of the loss and of the metrics
torch_trainer / megatron   the two implementations
worker / client            a trainer's rank as a child process, and its handle
"""

from relax_agent.trainers.algorithms.settings import AlgorithmSettings, GrpoSettings
from relax_agent.trainers.settings import ParallelSettings, TrainerSettings, WarmStartSettings

__all__ = [
    "AlgorithmSettings",
    "GrpoSettings",
    "ParallelSettings",
    "TrainerSettings",
    "WarmStartSettings",
]
