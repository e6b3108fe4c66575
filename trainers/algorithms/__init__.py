"""Algorithms: pure functions over plain tensors, shared by every trainer.

``settings`` names the algorithm and its constants (no torch); ``grpo`` holds the mathematics.
"""

from relax_agent.trainers.algorithms.settings import AlgorithmSettings, GrpoSettings

__all__ = ["AlgorithmSettings", "GrpoSettings"]
