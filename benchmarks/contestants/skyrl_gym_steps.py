"""Steps per second of SkyRL-Gym: a trivial environment, and one tool call a step.

    build/peers/skyrl-gym/bin/python benchmarks/contestants/skyrl_gym_steps.py STEPS

The environment finds the call by tags; a tool group runs it, with positional arguments that nobody
validates. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.tools.core import ToolGroup, tool


class Trivial(BaseTextEnv):
    """Says the same thing for ever."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Go on."""
        return BaseTextEnvStepOutput(observations=[], reward=0.0, done=False, metadata={})


class Sums(ToolGroup):
    """One tool."""

    def __init__(self) -> None:
        super().__init__(name="sums")

    @tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class WithTool(BaseTextEnv):
    """Runs the call that stands between tags."""

    def __init__(self) -> None:
        super().__init__()
        self.init_tool_groups([Sums()])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Run the call and tell its result."""
        begin = action.find("<add>")
        values = json.loads(action[begin + 5 : action.find("</add>", begin)])
        told = self._execute_tool("sums", "add", (values["a"], values["b"]))
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": told}], reward=0.0, done=False, metadata={}
        )


def rate(env: Any, action: str, steps: int) -> float:
    """Return steps per second."""
    started = time.perf_counter()
    for _ in range(steps):
        env.step(action)
    return steps / (time.perf_counter() - started)


def main() -> None:
    """Warm up, measure and print."""
    steps = int(sys.argv[1])
    env, call = WithTool(), '<add>{"a": 2, "b": 3}</add>'
    assert env.step(call)["observations"][0]["content"] == "5"
    rate(env, call, steps // 10)
    result = {
        "version": version("skyrl-gym"),
        "steps_per_s": rate(Trivial(), "x", steps),
        "tool_steps_per_s": rate(env, call, steps),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
