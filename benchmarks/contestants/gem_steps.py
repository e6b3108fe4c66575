"""Steps per second of GEM: a trivial environment, and one tool call a step.

    build/peers/gem/bin/python benchmarks/contestants/gem_steps.py STEPS

GEM finds the call in the text by tags and does not validate its arguments. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from typing import Any

from gem.core import Env
from gem.tools.base_tool import BaseTool
from gem.tools.tool_env_wrapper import ToolEnvWrapper


class Trivial(Env):
    """Says the same thing for ever."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin."""
        return "2 + 3?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Go on."""
        return "ok", 0.0, False, False, {}

    def sample_random_action(self) -> str:
        """Return any action."""
        return "x"


class Add(BaseTool):
    """Adds two numbers that stand between tags."""

    tool_type = "add"

    def _parse_action(self, action: str) -> tuple[str, str, bool]:
        begin = action.find("<add>")
        end = action.find("</add>", begin)
        if begin < 0 or end < 0:
            return "", "", False
        return action[begin + 5 : end], action[: end + 6], True

    def instruction_string(self) -> str:
        """Say how it is called."""
        return "<add>{...}</add>"

    def execute_action(self, action: str) -> tuple[bool, bool, str, str]:
        """Run the call."""
        arguments, text, valid = self._parse_action(action)
        if not valid:
            return False, True, "", ""
        values = json.loads(arguments)
        return True, False, str(values["a"] + values["b"]), text


def rate(env: Any, action: str, steps: int) -> float:
    """Return steps per second."""
    env.reset()
    started = time.perf_counter()
    for _ in range(steps):
        env.step(action)
    return steps / (time.perf_counter() - started)


def main() -> None:
    """Warm up, measure and print."""
    steps = int(sys.argv[1])
    tools = ToolEnvWrapper(Trivial(), tools=[Add()], max_tool_uses=10**9)
    call = '<add>{"a": 2, "b": 3}</add>'
    tools.reset()
    assert "5" in tools.step(call)[0]
    rate(tools, call, steps // 10)
    result = {
        "version": version("gem-llm"),
        "steps_per_s": rate(Trivial(), "x", steps),
        "tool_steps_per_s": rate(tools, call, steps),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
