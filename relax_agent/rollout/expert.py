"""A scripted expert in the place of a model: the same loop, the same token log.

The expert answers in messages; the renderer turns each into the ids that a model would have
sampled for it. They are parsed again like a model's, so an episode of an expert shows exactly
what a trained model will have to sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from relax_agent.engines.protocol import FinishReason, GenerateRequest, GenerateResult
from relax_agent.envs.policies import Policy, as_message
from relax_agent.messages import Message
from relax_agent.rendering import Renderer


class ExpertSource:
    """Answers with what a scripted policy says; log-prob 0 and weight version 0."""

    def __init__(self, policy: Policy, renderer: Renderer) -> None:
        self._policy = policy
        self._renderer = renderer

    async def answer(
        self, request: GenerateRequest, messages: Sequence[Message], tools: list[dict[str, Any]]
    ) -> GenerateResult:
        """Ask the policy and return its message as sampled ids."""
        said = self._policy.act(list(messages), tools)
        reply = await said if inspect.isawaitable(said) else said
        message = as_message(reply, sum(each.role == "assistant" for each in messages) + 1)
        ids = self._renderer.completion(message)
        limit = request.sampling.max_new_tokens
        reason: FinishReason = "stop" if len(ids) <= limit else "length"
        count = min(len(ids), limit)
        return GenerateResult(ids[:count], [0.0] * count, reason, [0] * count)
