"""Every check catches what it is for: a table of environments, each broken in one way.

All of them derive from one that is in order, so that the one thing that is wrong is what is found.
"""

import asyncio
import contextlib
import json
import math
import random
import threading
import time
from dataclasses import dataclass

import pytest

from relax_agent.envs import Env, SyncEnv, Task, TaskSet, ToolEnv
from relax_agent.envs.checking.checks import ALL_CHECKS
from relax_agent.envs.checking.running import run_checks
from relax_agent.errors import EnvError
from relax_agent.messages import (
    Audio,
    Image,
    Message,
    Rewrite,
    ToolCall,
    system,
    tool_message,
    user,
)
from relax_agent.tools import Tool, ToolResult, Toolset, tool


@tool(inline=True)
def double(number: int) -> int:
    """Double a number.

    Args:
        number: Any number.
    """
    return 2 * number


class Good(Env):
    """Guess the number: three turns, hints by tool."""

    tasks = TaskSet(
        [Task(f"t{n}", f"Guess number {n}.", 73_000_011 + n) for n in range(5)],
        [Task("e0", "Guess the held-out number.", 73_000_999)],
    )

    def __init__(self):
        self.tools = Toolset([double])
        self.turn = 0

    async def reset(self, *, seed=None, options=None):
        self.seed_rng(seed)
        options = dict(options or {})
        task_id = options.pop("task", None)
        if options:
            raise EnvError(f"unknown option {next(iter(options))}")
        self.task = self.tasks[task_id or self.rng.choice(self.tasks.ids())]
        self.turn = 0
        first = [system("Guess."), user(f"{self.task.prompt} Luck: {self.rng.random():.6f}")]
        return first, {"task": self.task.id}

    async def step(self, action):
        self.turn += 1
        messages = [(await self.tools.call(c)).to_message(c) for c in action.tool_calls]
        if not action.tool_calls:
            messages = [user(f"No. Luck: {self.rng.random():.6f}")]
        right = action.text == str(self.task.answer)
        info = {"metrics": {"turns": float(self.turn)}}
        return messages, float(right), right, self.turn >= 3 and not right, info


class OneAnswer(ToolEnv):
    """Answer the question."""

    tools = (double,)
    tasks = TaskSet([Task(f"q{n}", f"Question {n}?", f"capital {n}") for n in range(4)])

    def score(self, task, transcript):
        return float(transcript.answer == task.answer)


def changed(**changes):
    """Return what a step gives, with parts exchanged: by position, or ``info``."""

    class Changed(Good):
        """Broken."""

        async def step(self, action):
            result = list(await super().step(action))
            for name, value in changes.items():
                place = ["observation", "reward", "terminated", "truncated", "info"].index(name)
                result[place] = value(result[place]) if callable(value) else value
            return tuple(result)

    return Changed


def first_changed(change):
    class Changed(Good):
        """Broken."""

        async def reset(self, *, seed=None, options=None):
            return change(*await super().reset(seed=seed, options=options))

    return Changed


def damaged():
    """A message whose content was exchanged behind its back."""
    message = Message("user", "x")
    object.__setattr__(message, "content", (b"x",))
    return message


def with_tools(*tools):
    class Changed(Good):
        """Broken."""

        def __init__(self):
            super().__init__()
            self.tools = Toolset(tools)

    return Changed


def with_schemas(change):
    """The good tools with schemas that are not theirs."""

    class Odd(Toolset):
        def schemas(self):
            return change(json.loads(json.dumps(super().schemas())))

    class Changed(Good):
        """Broken."""

        def __init__(self):
            super().__init__()
            self.tools = Odd([double])

    return Changed


def function_changed(**changes):
    def change(schemas):
        schemas[0]["function"].update(changes)
        return schemas

    return with_schemas(change)


# -- seeds -----------------------------------------------------------------------------------------


class DrawsGlobally(Good):
    """Broken."""

    async def step(self, action):
        result = await super().step(action)
        return ([*result[0], user(str(random.random()))], *result[1:])


class SeedsGlobally(Good):
    """Broken."""

    async def reset(self, *, seed=None, options=None):
        random.seed(seed)
        return await super().reset(seed=seed, options=options)


class SeedsNumpy(Good):
    """Broken."""

    async def reset(self, *, seed=None, options=None):
        import numpy

        numpy.random.seed((seed or 0) % 2**32)
        return await super().reset(seed=seed, options=options)


class TellsTheTime(Good):
    """Broken."""

    async def step(self, action):
        result = await super().step(action)
        return ([*result[0], user(f"{time.perf_counter_ns()}")], *result[1:])


class NeverSeeds(Good):
    """Broken."""

    async def reset(self, *, seed=None, options=None):
        return await super().reset(seed=None, options=options)


class RewardsByChance(Good):
    """Broken."""

    async def step(self, action):
        result = await super().step(action)
        return (result[0], random.SystemRandom().random(), *result[2:])


class SmallSeeds(Good):
    """Broken."""

    async def reset(self, *, seed=None, options=None):
        if seed is not None and seed >= 2**32:
            raise ValueError("Seed must be between 0 and 2**32 - 1")
        return await super().reset(seed=seed, options=options)


class AlwaysTheSame(Good):
    """Broken."""

    async def reset(self, *, seed=None, options=None):
        self.seed_rng(0)
        self.task, self.turn = self.tasks[(options or {}).get("task", "t0")], 0
        return [user(self.task.prompt)], {"task": self.task.id}


class KeepsItsTurns(Good):
    """Broken."""

    async def reset(self, *, seed=None, options=None):
        turn = self.turn
        result = await super().reset(seed=seed, options=options)
        self.turn = turn % 3
        return result


# -- shared state ----------------------------------------------------------------------------------


class SharesAList(Good):
    """Broken."""

    history = []  # noqa: RUF012

    async def reset(self, *, seed=None, options=None):
        self.history.clear()
        return await super().reset(seed=seed, options=options)

    async def step(self, action):
        self.history.append(action)
        result = await super().step(action)
        return ([*result[0], user(f"turn {len(self.history)}")], *result[1:])


SCORES = {}


class SharesADict(Good):
    """Broken."""

    def __init__(self):
        super().__init__()
        self.scores = SCORES

    async def step(self, action):
        self.scores[len(self.scores)] = action.text
        return await super().step(action)


# -- objects ---------------------------------------------------------------------------------------


class HandsOutItsList(Good):
    """Broken."""

    async def reset(self, *, seed=None, options=None):
        self.messages, info = await super().reset(seed=seed, options=options)
        return self.messages, info

    async def step(self, action):
        result = await super().step(action)
        self.messages += result[0]
        return result


class ReusesItsInfo(Good):
    """Broken."""

    async def reset(self, *, seed=None, options=None):
        observation, self.info = await super().reset(seed=seed, options=options)
        return observation, self.info

    async def step(self, action):
        result = await super().step(action)
        self.info["turn"] = self.turn
        return (*result[:4], self.info)


class DependsOnItsCaller(Good):
    """Broken."""

    async def reset(self, *, seed=None, options=None):
        self.messages, info = await super().reset(seed=seed, options=options)
        return self.messages, info

    async def step(self, action):
        result = await super().step(action)
        return ([*result[0], user(f"you know {len(self.messages)} messages")], *result[1:])


class WholeHistory(Good):
    """Broken."""

    async def reset(self, *, seed=None, options=None):
        messages, info = await super().reset(seed=seed, options=options)
        self.messages = list(messages)
        return messages, info

    async def step(self, action):
        result = await super().step(action)
        self.messages = [*self.messages, *result[0]]
        return (list(self.messages), *result[1:])


# -- order, ends, words ----------------------------------------------------------------------------


class OneStep(Env):
    """Broken."""

    async def reset(self, *, seed=None, options=None):
        return [user("hi")], {}

    async def step(self, action):
        return [], 0.0, True, False, {}


class Endless(Good):
    """Broken."""

    async def step(self, action):
        result = await super().step(action)
        return (*result[:2], False, False, result[4])


class LosesItsTool(Good):
    """Broken."""

    async def step(self, action):
        names = {"double": double}
        for call in action.tool_calls:
            names[call.name]
        return await super().step(action)


class WantsText(Good):
    """Broken."""

    async def step(self, action):
        assert action.text or action.tool_calls, "say something"
        return await super().step(action)


class ClosesOnce(Good):
    """Broken."""

    async def close(self):
        del self.tools


class CannotCloseEarly(Good):
    """Broken."""

    async def close(self):
        self.task.id  # noqa: B018


class WithoutSeed(Good):
    """Broken."""

    async def reset(self, options=None):
        return await super().reset(seed=None, options=options)


# -- tasks and answers -----------------------------------------------------------------------------


class IgnoresTheTask(Good):
    """Broken."""

    async def reset(self, *, seed=None, options=None):
        result = await super().reset(seed=seed)
        return [user("Guess.")], result[1]


class PosesAnother(Good):
    """Broken."""

    async def reset(self, *, seed=None, options=None):
        return await super().reset(seed=seed)


class SilentOnTheTask(Good):
    """Broken."""

    async def reset(self, *, seed=None, options=None):
        return (await super().reset(seed=seed, options=options))[0], {}


class TakesAnyTask(Good):
    """Broken."""

    async def reset(self, *, seed=None, options=None):
        options = dict(options or {})
        if options.get("task") not in self.tasks:
            options.pop("task", None)
        return await super().reset(seed=seed, options=options)


class RaisesKeyError(Good):
    """Broken."""

    async def reset(self, *, seed=None, options=None):
        {task.id: task for task in self.tasks}[(options or {}).get("task", "t0")]
        return await super().reset(seed=seed, options=options)


class TakesAnyOption(Good):
    """Broken."""

    async def reset(self, *, seed=None, options=None):
        options = {k: v for k, v in (options or {}).items() if k == "task"}
        return await super().reset(seed=seed, options=options)


class OtherTasksEachTime(Good):
    """Broken."""

    def __init__(self):
        super().__init__()
        self.tasks = TaskSet([Task(f"r{n}", str(random.random())) for n in range(3)])


class OnlyHeldOut(Good):
    """Broken."""

    tasks = TaskSet([], [Task("e", "x", 1)])

    async def reset(self, *, seed=None, options=None):
        return await super().reset(seed=seed, options={"task": "e", **(options or {})})


def leaking(where):
    class Leaking(Good):
        """Broken."""

        async def reset(self, *, seed=None, options=None):
            observation, info = await super().reset(seed=seed, options=options)
            if where == "first":
                observation[0] = system(f"(the answer is {self.task.answer:,})")
            elif where == "info":
                info["task_data"] = {"answer": self.task.answer}
            elif where == "image":
                observation.append(user(Image(b"\x89PNG" + str(self.task.answer).encode())))
            return observation, info

        async def step(self, action):
            result = await super().step(action)
            if where == "after a wrong answer" and not action.tool_calls:
                result[0].append(user(f"Wrong: it was {self.task.answer}."))
            elif where == "error" and not action.tool_calls:
                raise EnvError(f"expected {self.task.answer}, got {action.text}")
            elif where == "metrics":
                result[4]["metrics"]["distance"] = float(self.task.answer)
            elif where == "at the end" and result[3]:
                result[0].append(user(f"It was {self.task.answer}."))
            return result

    return Leaking


class TellingTool(OneAnswer):
    """Broken."""

    @tool(inline=True)
    def hint(self) -> str:
        """Get a hint."""
        return f"It begins with {self.task.answer[:3]} … {self.task.answer}"


class TellingSchema(OneAnswer):
    """Broken."""

    async def reset(self, *, seed=None, options=None):
        result = await super().reset(seed=seed, options=options)
        check = Tool(double.function, name="check", description=f"Not {self.task.answer}")
        self.tools = Toolset([check])
        return result


class TellsWhatItsDataHold(OneAnswer):
    """Broken."""

    tasks = TaskSet([Task("q", "Prove it.", data={"solution": "by induction on n"})])

    def first_messages(self, task):
        return [user(f"{task.prompt} (e.g. {task.data['solution']})")]

    def score(self, task, transcript):
        return 0.0


class TellsWithoutLookingUp(OneAnswer):
    """Broken."""

    def __init__(self):
        super().__init__()
        self._private = {task.id: task.answer for task in self.tasks}

    async def reset(self, *, seed=None, options=None):
        observation, info = await super().reset(seed=seed, options=options)
        return observation, info | {"reference": self._private[info["task"]]}


class BoardMadeOfTheAnswer(OneAnswer):
    """Broken: its first message is made of the answer, which it cannot make of anything else."""

    tasks = TaskSet([Task(f"b{n}", "Fill in the board.", f"abcdefgh{n}") for n in range(2)])

    def first_messages(self, task):
        assert len(task.answer) == 9, "no board"
        return [user(f"Fill in the board {task.answer}")]


# -- cancellation and blocking ---------------------------------------------------------------------


class Waits(Good):
    """In order: its step waits for something."""

    async def step(self, action):
        await asyncio.sleep(0.002)
        return await super().step(action)


class SwallowsItsCancellation(Good):
    """Broken."""

    async def step(self, action):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)
        return await super().step(action)


class TurnsItIntoAnError(Good):
    """Broken."""

    async def step(self, action):
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            raise ValueError("interrupted") from None
        return await super().step(action)


class KeepsItsLock(Good):
    """Broken."""

    def __init__(self):
        super().__init__()
        self.lock = asyncio.Lock()

    async def reset(self, *, seed=None, options=None):
        async with self.lock:
            return await super().reset(seed=seed, options=options)

    async def step(self, action):
        await self.lock.acquire()
        await asyncio.sleep(0.005)
        self.lock.release()
        return await super().step(action)


class StaysBusy(Good):
    """Broken."""

    busy = False

    async def reset(self, *, seed=None, options=None):
        if self.busy:
            raise RuntimeError("a step is running")
        return await super().reset(seed=seed, options=options)

    async def step(self, action):
        self.busy = True
        await asyncio.sleep(0.002)
        self.busy = False
        return await super().step(action)


class CountsHalfSteps(Good):
    """Broken."""

    begun = 0

    async def step(self, action):
        self.begun += 1
        await asyncio.sleep(0.002)
        result = await super().step(action)
        self.begun -= 1
        return ([*result[0], user(f"{self.begun} still running")], *result[1:])


class LeavesATask(Good):
    """Broken."""

    async def step(self, action):
        job = asyncio.create_task(asyncio.sleep(0.1))
        await asyncio.shield(job)
        return await super().step(action)


class Blocks(Good):
    """Broken."""

    async def step(self, action):
        if self.turn == 1:
            time.sleep(0.6)  # noqa: ASYNC251
        return await super().step(action)


class BlocksInReset(Good):
    """Broken."""

    blocked = 0

    async def reset(self, *, seed=None, options=None):
        if BlocksInReset.blocked < 2:
            time.sleep(0.25)  # noqa: ASYNC251
        BlocksInReset.blocked += 1
        return await super().reset(seed=seed, options=options)


class Hangs(Good):
    """Broken."""

    async def step(self, action):
        await asyncio.Event().wait()


# -- what stays behind -----------------------------------------------------------------------------

ENDED = threading.Event()


class LeavesAThread(Good):
    """Broken."""

    def __init__(self):
        super().__init__()
        threading.Thread(target=ENDED.wait, args=(30,), daemon=True, name="my-helper").start()


OPEN = []


class LeavesAFile(Good):
    """Broken."""

    async def reset(self, *, seed=None, options=None):
        OPEN.append(open("/dev/null"))  # noqa: SIM115, ASYNC230
        return await super().reset(seed=seed, options=options)


# -- the table -------------------------------------------------------------------------------------


def shown(part):
    return first_changed(lambda observation, info: ([*observation, user(part)], info))


def answering(make):
    class Answering(Good):
        """Broken."""

        async def step(self, action):
            result = await super().step(action)
            return (make(action, result[0]), *result[1:])

    return Answering


class RaisesInItsTools(Toolset):
    async def call(self, call):
        return await self._tools[call.name].invoke(call.arguments)


class SaysYes(Toolset):
    async def call(self, call):
        return ToolResult.of("ok")


class GivesText(Toolset):
    async def call(self, call):
        return "ok"


def with_toolset(kind):
    class Changed(Good):
        """Broken."""

        def __init__(self):
            super().__init__()
            self.tools = kind([double])

        async def step(self, action):
            self.turn += 1
            return [tool_message("ok", c) for c in action.tool_calls], 0.0, True, False, {}

    return Changed


class NoDocstring(Good):
    pass


class ToolsList(Good):
    """Broken."""

    def __init__(self):
        super().__init__()
        self.tools = [double]


class OtherToolsEachTime(Good):
    """Broken."""

    made = 0

    async def reset(self, *, seed=None, options=None):
        type(self).made += 1
        self.tools = Toolset([Tool(double.function, name=f"double{self.made}", description="D.")])
        return await super().reset(seed=seed, options=options)


@tool
def undescribed(number: int) -> int:
    """Double a number."""
    return number


BROKEN = [
    # what reset and step return
    (first_changed(lambda o, i: o), "reset", "fail", "return (observation, info)"),
    (first_changed(lambda o, i: (o, i, 0)), "reset", "fail", "3 values"),
    (first_changed(lambda o, i: ("hi", i)), "observation", "fail", "list of Message"),
    (first_changed(lambda o, i: (None, i)), "observation", "fail", "is None"),
    (first_changed(lambda o, i: (["hi"], i)), "observation", "fail", "holds a str"),
    (first_changed(lambda o, i: ([], i)), "observation", "warn", "nothing to answer"),
    (first_changed(lambda o, i: (o, None)), "info", "fail", "return a dict"),
    (first_changed(lambda o, i: ([Message("robot")], i)), "observation", "fail", "robot"),
    (first_changed(lambda o, i: ([damaged()], i)), "observation", "fail", "a bytes as content"),
    (changed(observation=lambda o: o[0]), "observation", "fail", "is a Message"),
    (changed(reward="1"), "reward", "fail", "no number"),
    (changed(reward=True), "reward", "fail", "no number"),
    (changed(reward=None), "reward", "fail", "no number"),
    (changed(reward=math.nan), "reward", "fail", "finite"),
    (changed(reward=-math.inf), "reward", "fail", "finite"),
    (changed(reward=10**400), "reward", "fail", "finite"),
    (changed(reward=5000.0), "reward", "warn", "RewardScale"),
    (changed(terminated=1), "step", "fail", "bool(terminated)"),
    (changed(truncated=None), "step", "fail", "bool(truncated)"),
    (changed(info=[]), "info", "fail", "return a dict"),
    (changed(info={"x": object()}), "info", "fail", "not JSON"),
    (changed(info={"x": math.nan}), "info", "fail", "not JSON"),
    (changed(info={"x": "y" * 10**5}), "info", "warn", "kB"),
    (changed(info={"metrics": {"m": "high"}}), "info", "fail", "finite numbers"),
    (changed(info={"metrics": 3}), "info", "fail", "numbers by name"),
    (WholeHistory, "observation", "fail", "whole conversation"),
    (answering(lambda a, o: [a, *o]), "observation", "fail", "repeats the action"),
    (answering(lambda a, o: [user("ok")]), "tool messages", "fail", "answer each call"),
    (answering(lambda a, o: [*o, *o]), "tool messages", "fail", "twice"),
    (
        answering(lambda a, o: [tool_message("x", ToolCall("f", {}, "other"))]),
        "tool messages",
        "fail",
        "not made",
    ),
    (WithoutSeed, "build", "fail", "does not take seed"),
    (NoDocstring, "build", "warn", "docstring"),
    # media
    (shown(Image(b"")), "media", "fail", "no bytes"),
    (shown(Image(b"GIF89a" + bytes(60), "video/mp4")), "media", "fail", "begins with image/"),
    (shown(Image(b"not a picture at all")), "media", "fail", "no known format"),
    (shown(Image(b"\x89PNG\r\n\x1a\n broken")), "media", "fail", "cannot be decoded"),
    (shown(Audio(b"\x89PNG\r\n\x1a\n" + bytes(60))), "media", "fail", "is none"),
    # tools
    (ToolsList, "tools", "fail", "Toolset([...])"),
    (function_changed(name="2 doubles"), "tools", "fail", "cannot be a tool's name"),
    (function_changed(description=""), "tools", "fail", "no description"),
    (function_changed(parameters={"type": "object", "properties": 3}), "tools", "fail", "valid"),
    (function_changed(parameters={"type": "string"}), "tools", "fail", "no object schema"),
    (
        function_changed(parameters={"type": "object", "properties": {}, "required": ["x"]}),
        "tools",
        "fail",
        "does not describe",
    ),
    (with_schemas(lambda schemas: schemas * 2), "tools", "fail", "2 tools are called"),
    (with_schemas(lambda schemas: [{"name": "f"}]), "tools", "fail", "@tool"),
    (with_schemas(lambda schemas: [object()]), "tools", "fail", "cannot be had"),
    (with_tools(undescribed), "tools", "warn", "no description"),
    (
        function_changed(parameters={"type": "object", "properties": {"x": {"description": "X"}}}),
        "tools",
        "warn",
        "no type",
    ),
    (with_toolset(RaisesInItsTools), "wrong calls", "fail", "ToolResult.failure"),
    (with_toolset(SaysYes), "wrong calls", "fail", "refuse it"),
    (with_toolset(GivesText), "wrong calls", "fail", "returns a ToolResult"),
    (OtherToolsEachTime, "same tools", "warn", "different tools"),
    # tasks
    (IgnoresTheTask, "chosen task", "fail", "poses the task"),
    (PosesAnother, "chosen task", "fail", "take the task from the options"),
    (SilentOnTheTask, "chosen task", "warn", "which task"),
    (TakesAnyTask, "unknown task", "fail", "accepted"),
    (RaisesKeyError, "unknown task", "warn", "KeyError"),
    (TakesAnyOption, "unknown task", "warn", "typing error"),
    (OtherTasksEachTime, "tasks", "fail", "different tasks"),
    (OnlyHeldOut, "tasks", "warn", "held out"),
    # gold answers
    (leaking("first"), "gold answers", "fail", "observation of reset()"),
    (leaking("image"), "gold answers", "fail", "observation of reset()"),
    (leaking("info"), "gold answers", "fail", "info of reset()"),
    (leaking("metrics"), "gold answers", "fail", "info of step()"),
    (leaking("after a wrong answer"), "gold answers", "fail", "observation of step()"),
    (leaking("at the end"), "gold answers", "fail", "observation of step()"),
    (leaking("error"), "gold answers", "fail", "error"),
    (TellingTool, "gold answers", "fail", "observation of step()"),
    (TellingSchema, "gold answers", "fail", "schemas"),
    (TellsWhatItsDataHold, "gold answers", "fail", "observation of reset()"),
    (TellsWithoutLookingUp, "gold answers", "fail", "info holds"),
    (BoardMadeOfTheAnswer, "gold answers", "warn", "first messages"),
    # seeds
    (DrawsGlobally, "seed", "fail", "self.rng"),
    (TellsTheTime, "seed", "fail", "no"),
    (NeverSeeds, "seed", "fail", "super().reset(seed=seed)"),
    (RewardsByChance, "seed", "fail", "the reward of step 1"),
    (SmallSeeds, "seed", "fail", "64 bits"),
    (SeedsGlobally, "global random", "fail", "random"),
    (SeedsNumpy, "global random", "fail", "numpy.random"),
    (AlwaysTheSame, "other seeds", "warn", "self.rng.choice"),
    (KeepsItsTurns, "aborted episode", "fail", "set all state anew"),
    # other instances
    (SharesAList, "isolation", "fail", "class attribute"),
    (SharesADict, "shared state", "fail", "scores"),
    (SharesAList, "shared state", "fail", "the class holds 'history'"),
    # objects
    (HandsOutItsList, "fresh objects", "fail", "return a copy"),
    (ReusesItsInfo, "fresh objects", "fail", "new dict"),
    (DependsOnItsCaller, "fresh objects", "fail", "return a copy"),
    # order and words
    (Good, "order", "warn", "after the episode's end"),
    (OneStep, "order", "warn", "before reset()"),
    (Endless, "end", "warn", "TimeLimit"),
    (LosesItsTool, "any message", "fail", "a tool that does not exist"),
    (WantsText, "any message", "fail", "an empty message"),
    (ClosesOnce, "close", "fail", "a second time"),
    (CannotCloseEarly, "close", "fail", "before any reset()"),
    # cancellation
    (SwallowsItsCancellation, "cancelled step", "fail", "swallows"),
    (TurnsItIntoAnError, "cancelled step", "fail", "ValueError: interrupted"),
    (StaysBusy, "cancelled step", "fail", "a step is running"),
    (CountsHalfSteps, "cancelled step", "fail", "another episode"),
    (LeavesATask, "cancelled step", "fail", "leaves the task"),
    # what stays
    (LeavesAThread, "release", "fail", "my-helper"),
    (LeavesAFile, "release", "fail", "files"),
]


def rows_of(env, *names, **options):
    checks = [check for check in ALL_CHECKS if check.name in names]
    assert len(checks) == len(names)
    options = {"timeout_s": 20.0, "seed": 7, "raises": False} | options
    return run_checks(env, checks, **options).rows


@pytest.mark.parametrize(
    ("env", "check", "status", "words"),
    BROKEN,
    ids=[f"{n}-{env.__name__}-{check}" for n, (env, check, *_) in enumerate(BROKEN)],
)
def test_each_check_catches_what_it_is_for(env, check, status, words):
    rows = rows_of(env, check)
    found = [(row.status, row.message) for row in rows]
    assert status in [row.status for row in rows], found
    assert any(words in row.message for row in rows if row.status == status), found
    assert "the check itself failed" not in str(found)


@pytest.mark.parametrize("env", [Good, OneAnswer, Waits], ids=lambda env: env.__name__)
@pytest.mark.parametrize("check", [c.name for c in ALL_CHECKS if c.name not in ("order", "spec")])
def test_no_check_complains_about_what_is_in_order(env, check):
    assert {(row.status, row.message) for row in rows_of(env, check) if row.status != "ok"} == set()


def test_a_lock_that_a_cancelled_step_keeps_is_found():
    rows = rows_of(KeepsItsLock, "cancelled step", timeout_s=0.3)
    assert rows[0].status == "fail"
    assert "a lock may still be held" in rows[0].message


def test_a_step_that_blocks_the_event_loop_is_named_with_its_line():
    """T86: one blocking call stops all episodes of a process."""
    rows = rows_of(Blocks, "end", "event loop")
    (row,) = [row for row in rows if row.check == "event loop"]
    assert row.status == "fail"
    assert row.message.startswith("step() blocks the event loop for 0.")
    line = Blocks.step.__code__.co_firstlineno + 2
    assert row.where.endswith(f"test_checking_broken.py:{line}")


def test_a_shorter_block_is_a_warning():
    (row,) = [r for r in rows_of(BlocksInReset, "reset", "event loop") if r.check == "event loop"]
    assert (row.status, row.message[:7]) == ("warn", "reset()")


def test_many_shorter_blocks_are_a_failure():
    class Often(Good):
        """Broken."""

        async def step(self, action):
            time.sleep(0.25)  # noqa: ASYNC251
            return await super().step(action)

    (row,) = [row for row in rows_of(Often, "reset", "event loop") if row.check == "event loop"]
    assert (row.status, row.message[:6]) == ("fail", "step()")


def test_slow_steps_make_the_check_shorter_and_not_endless():
    class Slow(Endless):
        """Slow, and without an end."""

        async def step(self, action):
            await asyncio.sleep(0.3)
            return await super().step(action)

    began = time.perf_counter()
    rows = rows_of(Slow, "end", "seed")
    assert [(row.check, row.status) for row in rows] == [("seed", "ok"), ("end", "skip")]
    assert time.perf_counter() - began < 20


def test_what_comes_of_an_unsteady_episode_is_not_told_five_times():
    checks = ("seed", "other seeds", "aborted episode", "isolation", "fresh objects")
    assert [row.status for row in rows_of(NeverSeeds, *checks)] == [
        "fail",
        "skip",
        "skip",
        "skip",
        "ok",
    ]


def test_a_step_that_never_returns_ends_the_check_with_its_name():
    rows = rows_of(Hangs, "step", "reward", "seed", timeout_s=0.2)
    assert [(row.check, row.status) for row in rows] == [("step", "fail"), ("all others", "skip")]
    assert "step() did not return within 0.2 s" in rows[0].message
    assert "reward, seed" in rows[1].message


def test_a_loop_that_stands_still_for_ever_is_left_behind(monkeypatch):
    """T151: the caller is never stuck with it."""
    monkeypatch.setattr("relax_agent.envs.checking.running._STUCK_AFTER_S", 0.1)
    go_on = threading.Event()

    class Stuck(Good):
        """Broken."""

        async def step(self, action):
            go_on.wait(20)
            return await super().step(action)

    try:
        rows = rows_of(Stuck, "step", "seed", "event loop", timeout_s=0.3)
    finally:
        go_on.set()
    assert [(row.check, row.status) for row in rows] == [
        ("event loop", "fail"),
        ("all others", "skip"),
    ]
    assert "never came back" in rows[0].message
    assert f":{Stuck.step.__code__.co_firstlineno + 1}" in rows[0].where


def test_a_place_in_the_authors_code_is_named():
    rows = rows_of(LosesItsTool, "any message")
    line = LosesItsTool.step.__code__.co_firstlineno + 3
    assert rows[0].where.endswith(f"test_checking_broken.py:{line}")
    rows = rows_of(first_changed(lambda o, i: o), "reset")
    assert "test_checking_broken.py:" in rows[0].where


# -- what must not be taken for a fault ------------------------------------------------------------


def test_an_answer_that_the_policy_said_itself_is_no_leak():
    class Echo(OneAnswer):
        """In order."""

        def follow_up(self, task, transcript):
            return f"You said {transcript[-1].text}" if transcript.turns < 2 else None

        @staticmethod
        def expert():
            from relax_agent.envs import ScriptedPolicy

            return ScriptedPolicy(lambda messages, tools: "capital 0")

    assert [row.status for row in rows_of(Echo, "gold answers")] == ["ok"]


@dataclass(frozen=True)
class Gold:
    place: str
    number: int


@pytest.mark.parametrize(
    "answer",
    [
        4,
        -2.5,
        "B",
        "17",
        "-0.25",
        "a sentence",
        ["x", 1],
        ("x",),
        {"x": {"y": 3}},
        frozenset({"x"}),
        '{"city": "Paris"}',
        Gold("Paris", 3),
    ],
    ids=repr,
)
@pytest.mark.parametrize("how", [str, repr])
def test_a_leak_is_found_for_answers_of_every_type(answer, how):
    """Also where the real answer is too short to be told from chance."""

    class Leaks(OneAnswer):
        """Broken."""

        tasks = TaskSet([Task(f"q{n}", f"Question {n}?", answer) for n in range(3)])

        def first_messages(self, task):
            return [user(f"{task.prompt} (hint: {how(task.answer)})")]

    class Keeps(Leaks):
        """In order."""

        def first_messages(self, task):
            return [user(task.prompt)]

    assert [row.status for row in rows_of(Leaks, "gold answers")] == ["fail"]
    assert [row.status for row in rows_of(Keeps, "gold answers")] == ["ok"]


def test_choices_that_hold_the_answer_are_no_leak():
    class Choice(OneAnswer):
        """In order."""

        tasks = TaskSet(
            [Task("c", "Which city?", "Paris is it", {"choices": ["Paris is it", "Rome is it"]})]
        )

        def first_messages(self, task):
            return [user(f"{task.prompt} {' or '.join(task.data['choices'])}")]

    assert [row.status for row in rows_of(Choice, "gold answers")] == ["ok"]


def test_a_tool_that_finds_the_real_answer_is_no_leak():
    class Search(OneAnswer):
        """In order."""

        @tool(inline=True)
        def search(self, query: str) -> str:
            """Search.

            Args:
                query: Words.
            """
            return "the encyclopedia says: capital 0"

    assert [row.status for row in rows_of(Search, "gold answers")] == ["ok"]


def test_a_score_that_cannot_work_with_stand_ins_is_no_failure():
    class Picky(OneAnswer):
        """In order."""

        def score(self, task, transcript):
            return {"capital 0": 1.0, "capital 1": 1.0, "capital 2": 1.0, "capital 3": 1.0}[
                task.answer
            ]

    assert [row.status for row in rows_of(Picky, "gold answers")] == ["ok"]


def test_a_plain_environment_in_order_passes():
    class Plain(SyncEnv):
        """Three turns in a thread."""

        def reset(self, *, seed=None, options=None):
            if options:
                raise EnvError("no options")
            super().reset(seed=seed)
            self.turn = 0
            return [user(f"{self.rng.random()}")], {}

        def step(self, action):
            self.turn += 1
            messages = [tool_message("no such tool", call) for call in action.tool_calls]
            return messages or [user("go on")], 0.0, self.turn == 3, False, {}

    names = [check.name for check in ALL_CHECKS if check.name not in ("order", "spec")]
    found = rows_of(Plain, *names)
    assert {(row.check, row.status, row.message) for row in found if row.status != "ok"} == set()


def test_a_rewritten_history_is_in_order():
    class Forks(Good):
        """In order."""

        async def step(self, action):
            result = await super().step(action)
            kept = (user("so far"), action, *result[0]) if action.tool_calls else (user("so far"),)
            return (Rewrite(kept, "short"), *result[1:])

    names = [check.name for check in ALL_CHECKS if check.name not in ("order", "spec")]
    found = rows_of(Forks, *names)
    assert {(row.check, row.status, row.message) for row in found if row.status != "ok"} == set()
