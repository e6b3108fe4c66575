"""Inference engines: one protocol, its HTTP client, and the ways to start one."""

from relax_agent.engines.protocol import (
    Engine,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    PauseMode,
    Routes,
    SamplingParams,
)

__all__ = [
    "Engine",
    "FinishReason",
    "GenerateRequest",
    "GenerateResult",
    "PauseMode",
    "Routes",
    "SamplingParams",
]
