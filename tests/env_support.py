"""Environments that tests run in every form: here, in a thread, in a process, behind a server.

``Probe`` does what a message tells it; ``PlainProbe`` is the same written with plain functions.
Both are classes of a module, so that another process can import them.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from typing import Any

from relax_agent import Env, Task, TaskSet, register, tool
from relax_agent.envs import SyncEnv
from relax_agent.errors import EnvError, ToolError, ToolErrorKind
from relax_agent.messages import (
    AssistantMessage,
    Audio,
    Image,
    Message,
    Rewrite,
    Text,
    Video,
    user,
)
from relax_agent.tools import Toolset

SECRET = "gold-answer-7141"
PICTURE = bytes(range(256)) * 40
SOUND = b"RIFF" + bytes(1000)
FILM = b"\0\0\0\x20ftyp" + bytes(range(200, 256)) * 10
MANY_PARTS = Message(
    "user",
    (
        Text("look"),
        Image(PICTURE, "image/png"),
        Text(""),
        Audio(SOUND, "audio/wav"),
        Text("and"),
        Video(FILM, "video/mp4"),
        Image(b"", "image/gif"),
    ),
    name="eye",
)


@tool
async def shout(text: str, times: int = 1) -> str:
    """Say it louder.

    Args:
        text: What to say.
        times: How often.
    """
    if text == "fail":
        raise ToolError("hoarse", kind=ToolErrorKind.DENIED, hint="whisper")
    return text.upper() * times


@tool
async def draw() -> list[Any]:
    """Draw a picture."""
    return ["here", Image(PICTURE, "image/png")]


TASKS = TaskSet(
    [Task(f"train-{n}", f"question {n}", SECRET, {"hint": SECRET}) for n in range(5)],
    [Task(f"eval-{n}", "?", SECRET) for n in range(2)],
)


class _Doing:
    """What both probes do with a message."""

    tools = Toolset([shout, draw])
    tasks = TASKS

    def __init__(self, *, fail_in: str = "", word: str = "hello", slow_s: float = 0.0) -> None:
        self.fail_in = fail_in
        self.word = word
        time.sleep(slow_s)
        if fail_in == "constructor":
            raise RuntimeError("no constructor today")
        if fail_in == "boot":
            os._exit(11)
        self.turn = 0

    def begin(self, options: dict[str, Any] | None) -> tuple[list[Message], dict[str, Any]]:
        self.turn = 0
        if self.fail_in == "reset":
            raise RuntimeError("no reset today")
        task = (options or {}).get("task")
        if task is not None:
            assert TASKS[task].answer == SECRET  # it is known here, and only here
        number = self.rng.randint(0, 10**9)  # type: ignore[attr-defined]
        return [user(f"{self.word} {number}"), MANY_PARTS], {"task": task, "pid": os.getpid()}

    def do(self, action: AssistantMessage) -> Any:
        self.turn += 1
        return getattr(self, "do_" + (action.text.split() or ["echo"])[0])(action)

    def do_echo(self, action: AssistantMessage) -> Any:
        info = {"turn": self.turn, "same": self.received(action), "metrics": {"length": 3.5}}
        return [user(action.content)], 0.25, False, False, info

    def received(self, action: AssistantMessage) -> list[Any]:
        """All of a message that is not its content, as plain data."""
        calls = [[c.name, c.arguments, c.id, c.error] for c in action.tool_calls]
        usage = action.usage
        tokens = [usage.prompt_tokens, usage.completion_tokens, usage.tokens_left]
        return [action.reasoning, calls, tokens, action.finish_reason, action.name]

    def do_random(self, action: AssistantMessage) -> Any:
        return [user(str(self.rng.random()))], 0.0, False, False, {}  # type: ignore[attr-defined]

    def do_end(self, action: AssistantMessage) -> Any:
        return [], 1.0, True, False, {"metrics": {"success": 1.0}}

    def do_cut(self, action: AssistantMessage) -> Any:
        return [], -0.5, False, True, {}

    def do_rewrite(self, action: AssistantMessage) -> Any:
        return Rewrite((user("anew"), MANY_PARTS), "compaction"), 0.0, False, False, {}

    def do_raise(self, action: AssistantMessage) -> Any:
        raise ValueError("of no\nuse")

    def do_envraise(self, action: AssistantMessage) -> Any:
        raise EnvError("the board is gone", hint="buy another one")

    def do_exit(self, action: AssistantMessage) -> Any:
        raise SystemExit(3)

    def do_four(self, action: AssistantMessage) -> Any:
        return [], 0.0, False, {}

    def do_nan(self, action: AssistantMessage) -> Any:
        return [], math.nan, False, False, {}

    def do_string(self, action: AssistantMessage) -> Any:
        return "just a text", 0.0, False, False, {}

    def do_badinfo(self, action: AssistantMessage) -> Any:
        return [], 0.0, False, False, {"fine": 1, "board": object()}

    def do_info(self, action: AssistantMessage) -> Any:
        info = {"tuple": (1, 2), "deep": {"nan": math.nan, "text": "ü\ud800"}, 3: "three"}
        return [], 0.0, False, False, info

    def do_die(self, action: AssistantMessage) -> Any:
        print("the last words", flush=True)
        os._exit(7)

    def do_segfault(self, action: AssistantMessage) -> Any:
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)

    def do_tools(self, action: AssistantMessage) -> Any:
        self.tools = Toolset([draw])
        return [], 0.0, False, False, {}

    def do_big(self, action: AssistantMessage) -> Any:
        picture = Image(PICTURE * 1000, "image/png")  # 10 MB
        return [user([picture])], 0.0, False, False, {}

    def end(self) -> None:
        if self.fail_in == "close":
            raise RuntimeError("no close today")


@register("test/Probe-v0")
class Probe(_Doing, Env):
    """Does what a message tells it."""

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        await super().reset(seed=seed)
        return self.begin(options)

    async def step(self, action: AssistantMessage) -> Any:
        match action.text.split():
            case ["hang"]:
                await asyncio.sleep(1000)
            case ["stubborn"]:
                while True:
                    try:
                        await asyncio.sleep(1000)
                    except asyncio.CancelledError:
                        continue
            case ["sleep", seconds]:
                await asyncio.sleep(float(seconds))
                return [], 0.0, False, False, {}
        return self.do(action)

    async def score_group(self, task_id: str, members: Any) -> list[float]:
        return group_rewards(task_id, members)

    async def close(self) -> None:
        self.end()


@register("test/PlainProbe-v0")
class PlainProbe(_Doing, SyncEnv):
    """Does what a message tells it, in plain functions."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self.begin(options)

    def step(self, action: AssistantMessage) -> Any:
        match action.text.split():
            case ["hang"]:
                time.sleep(5)
            case ["sleep", seconds]:
                time.sleep(float(seconds))
                return [], 0.0, False, False, {}
        return self.do(action)

    def score_group(self, task_id: str, members: Any) -> list[float]:
        return group_rewards(task_id, members)

    def close(self) -> None:
        self.end()


def group_rewards(task_id: str, members: Any) -> list[float]:
    """Reward what a member tells of itself, so that a test sees that all of it arrived."""
    assert task_id == "train-1"
    return [member.reward + member.turns + 10 * member.tool_errors for member in members]
