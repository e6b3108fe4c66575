"""Steps per second of verifiers' ``ToolEnv`` (0.1): a rollout whose every turn calls one tool.

    build/peers/verifiers-0.1.14/bin/python benchmarks/contestants/verifiers_steps.py TURNS ROLLOUTS

The model is a client that answers at once with the same tool call. Prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from importlib.metadata import version
from typing import Any

import verifiers as vf
from datasets import Dataset
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage, ToolCall

CALL = ToolCall(id="call_0", name="add", arguments='{"a": 2, "b": 3}')


async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def right(completion: Any, answer: str) -> float:
    """Compare."""
    return float(completion[-1].content == answer)


class Instant(Client[Any, Any, Any, Any]):
    """Calls the tool in every turn but the last, without waiting."""

    def __init__(self, turns: int) -> None:
        super().__init__(object())
        self.turns = turns

    async def get_response(self, prompt: Any, *args: Any, **kwargs: Any) -> Response:
        """Return the next message."""
        said = sum(1 for message in prompt if message.role == "assistant")
        calls = [CALL] if said < self.turns else None
        message = ResponseMessage(
            content="" if calls else "5",
            tool_calls=calls,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return Response(id="0", created=0, model="instant", message=message)

    def setup_client(self, config: Any) -> Any:
        """Need nothing."""

    async def to_native_tool(self, tool: Any) -> Any:
        """Keep a tool as it is."""
        return tool

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        """Keep the messages as they are."""
        return messages, {}

    async def get_native_response(self, *args: Any, **kwargs: Any) -> Any:
        """Never be asked: ``get_response`` answers."""
        raise AssertionError

    async def raise_from_native_response(self, response: Any) -> None:
        """Find nothing wrong."""

    async def from_native_response(self, response: Any) -> Response:
        """Never be asked either."""
        raise AssertionError

    async def close(self) -> None:
        """Hold nothing."""


async def measure(turns: int, rollouts: int) -> float:
    """Play so many rollouts at the same time and return steps per second."""
    rows = Dataset.from_list([{"question": "2 + 3?", "answer": "5"}])
    rubric = vf.Rubric(funcs=[right])
    env = vf.ToolEnv(dataset=rows, tools=[add], max_turns=turns + 2, rubric=rubric)
    task: Any = {
        "prompt": [{"role": "user", "content": "2 + 3?"}],
        "answer": "5",
        "example_id": 0,
    }
    client = Instant(turns)
    started = time.perf_counter()
    states = await asyncio.gather(
        *(
            env.run_rollout(dict(task), client, "instant", {}, state_columns=["answer"])
            for _ in range(rollouts)
        )
    )
    seconds = time.perf_counter() - started
    for state in states:
        tools = [m for m in state["completion"] if m["role"] == "tool"]
        assert len(tools) == turns and tools[-1]["content"] == "5", state
        assert state["reward"] == 1.0, state
    return turns * rollouts / seconds


def main() -> None:
    """Warm up, measure and print."""
    logging.disable(logging.INFO)
    turns, rollouts = int(sys.argv[1]), int(sys.argv[2])
    asyncio.run(measure(turns, 1))
    rate = asyncio.run(measure(turns, rollouts))
    print(json.dumps({"version": version("verifiers"), "steps_per_s": rate}))


if __name__ == "__main__":
    main()
