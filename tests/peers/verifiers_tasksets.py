"""Tasksets written for verifiers, as its users write them; the tests of the adapter play them."""

import asyncio
import base64
import random
import time
from typing import ClassVar

import verifiers.v1 as vf
from mcp.server.mcpserver import Image

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c63f8cfc0f01f"
    "00050001ff899991 3d0000000049454e44ae426082".replace(" ", "")
)


# -- text only: weighted rewards, metrics ----------------------------------------------------------


class SumData(vf.TaskData):
    answer: str = ""


class SumConfig(vf.TaskConfig):
    style_weight: float = 0.5


class Sum(vf.Task[SumData, vf.State, SumConfig]):
    @vf.reward(weight=2.0)
    async def correct(self, trace) -> float:
        return float(trace.last_reply.endswith(self.data.answer))

    @vf.reward(weight=0.25)
    async def polite(self, task, trace) -> dict[str, float]:
        return {"please": float("please" in trace.last_reply), "short": 1.0}

    @vf.metric
    async def length(self, trace) -> float:
        return len(trace.last_reply)


class SumsConfig(vf.TasksetConfig):
    count: int = 10
    first: int = 0
    ids: bool = True
    task: SumConfig = SumConfig()


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        for n in range(self.config.first, self.config.first + self.config.count):
            yield Sum(
                SumData(
                    id=f"sum-{n}" if self.config.ids else None,
                    prompt=f"What is {n} + {n}?",
                    system_prompt="Be brief.",
                    answer=str(2 * n),
                ),
                self.config.task,
            )


class Endless(vf.Taskset[Sum, SumsConfig]):
    INFINITE = True

    def load(self):
        n = 0
        while True:
            yield Sum(SumData(name=f"draw {n}", prompt=str(random.random())), self.config.task)
            n += 1


# -- tools, state, stops ---------------------------------------------------------------------------


class BoxState(vf.State):
    opened: list[str] = []  # noqa: RUF012


class BoxData(vf.TaskData):
    treasure: str


class BoxToolsConfig(vf.ToolsetConfig):
    sound: str = "creak"


class Boxes(vf.Toolset[BoxToolsConfig, BoxState]):
    async def setup_task(self, task) -> None:
        self.treasure = task.treasure

    @vf.tool
    async def open(self, name: str, times: int = 1) -> str:
        """Open a box."""
        self.state.opened = [*self.state.opened, name]
        return f"{self.config.sound}: {'gold' if name == self.treasure else 'nothing'}"

    @vf.tool(name="look")
    def look_at(self) -> list:
        """Look at the boxes."""
        return [f"{len(self.state.opened)} are open", Image(data=PNG, format="png")]

    @vf.tool
    def smash(self) -> str:
        """Smash a box."""
        raise ValueError("it is too hard")

    @vf.tool
    async def wait(self, seconds: float) -> str:
        """Wait."""
        await asyncio.sleep(seconds)
        return "x" * 30_000


class Dice(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def roll(self) -> int:
        """Roll a die."""
        return random.randint(1, 10**9)


class BoxConfig(vf.TaskConfig):
    tools: BoxToolsConfig = BoxToolsConfig()


class Hunt(vf.Task[BoxData, BoxState, BoxConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Boxes(config.tools)]

    async def setup(self, trace, runtime) -> None:
        trace.info["began"] = True

    async def finalize(self, trace) -> None:
        trace.record_metric("calls_seen", len(trace.tool_messages))

    @vf.stop
    def three_opened(self, trace: vf.Trace) -> bool:
        return len(trace.state.opened) >= 3

    @vf.stop
    def gave_up(self, response: vf.Response) -> bool:
        return (response.message.content or "") == "I give up"

    @vf.reward
    async def found(self, trace) -> float:
        return float(self.data.treasure in trace.state.opened)

    @vf.metric
    async def opened(self, trace) -> dict[str, float]:
        return {"opened": len(trace.state.opened), "turns_seen": trace.num_turns}


class HuntsConfig(vf.TasksetConfig):
    task: BoxConfig = BoxConfig()


class Hunts(vf.Taskset[Hunt, HuntsConfig]):
    def load(self):
        for name in ("red", "blue"):
            prompt = [vf.UserMessage(content=f"Find the treasure ({name[0]}…)")]
            yield Hunt(BoxData(name=name, prompt=prompt, treasure=name), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Dice(vf.SharedToolsetConfig())]


# -- pictures in a prompt --------------------------------------------------------------------------


class ShownConfig(vf.TasksetConfig):
    url: str = ""


class Shown(vf.Taskset[Sum, ShownConfig]):
    def load(self):
        url = self.config.url or f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
        picture = {"type": "image_url", "image_url": {"url": url}}
        content = [{"type": "text", "text": "What is this?"}, picture]
        before = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
        yield Sum(SumData(id="s", prompt=[*before, {"role": "user", "content": content}]))


# -- what goes wrong -------------------------------------------------------------------------------


class Odd(Sum):
    @vf.reward
    async def correct(self, trace) -> float:
        how = trace.last_reply
        if how == "raise":
            raise KeyError("gone")
        if how == "nan":
            return float("nan")
        if how == "hang":
            await asyncio.sleep(60)
        if how == "block":
            time.sleep(1.5)  # noqa: ASYNC251
        return 1.0


class Odds(vf.Taskset[Odd, SumsConfig]):
    def load(self):
        yield Odd(SumData(id="odd", prompt="How?"))


class Unscored(vf.Task[SumData]):
    pass


class Unscoreds(vf.Taskset[Unscored, vf.TasksetConfig]):
    def load(self):
        yield Unscored(SumData(id="u", prompt="hi"))


class Boxed(Sum):
    NEEDS_CONTAINER = True


class Boxeds(vf.Taskset[Boxed, SumsConfig]):
    def load(self):
        yield Boxed(SumData(prompt="hi"))


class Imaged(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        yield Sum(SumData(id="i", prompt="hi", image="python:3.11"))


class Partly(Sum):
    @vf.reward
    async def tests_pass(self, trace, runtime) -> float:
        return 1.0

    @vf.metric
    async def files(self, runtime) -> float:
        return 1.0


class Partlys(vf.Taskset[Partly, SumsConfig]):
    def load(self):
        yield Partly(SumData(id="p", prompt="hi", answer="4"))


class Wholly(vf.Task[SumData]):
    @vf.reward
    async def tests_pass(self, trace, runtime) -> float:
        return 1.0


class Whollys(vf.Taskset[Wholly, vf.TasksetConfig]):
    def load(self):
        yield Wholly(SumData(prompt="hi"))


class Running(Sum):
    async def setup(self, trace, runtime):
        await runtime.run(["ls"], {})


class Runnings(vf.Taskset[Running, SumsConfig]):
    def load(self):
        yield Running(SumData(id="r", prompt="hi"))


class Rewriting(Sum):
    @vf.intercept
    async def hide(self, request: vf.Request) -> None:
        return None


class Rewritings(vf.Taskset[Rewriting, SumsConfig]):
    def load(self):
        yield Rewriting(SumData(prompt="hi"))


class Mute(vf.Taskset[Sum, SumsConfig]):
    """No prompt, and no Env that would open the conversation."""

    def load(self):
        yield Sum(SumData(id="m"))


class Empty(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        return []


class Far(Hunt):
    @classmethod
    def toolsets(cls, config):
        return [Boxes(BoxToolsConfig(url="http://127.0.0.1:9/mcp"))]


class Fars(vf.Taskset[Far, HuntsConfig]):
    def load(self):
        yield Far(BoxData(prompt="hi", treasure="red"))


class Judged(vf.Task[SumData, vf.State, vf.TaskConfig]):
    LOG: ClassVar[list] = []


class JudgedsConfig(vf.TasksetConfig):
    task: vf.TaskConfig = vf.TaskConfig()


class Judgeds(vf.Taskset[Judged, JudgedsConfig]):
    def load(self):
        yield Judged(SumData(id="j", prompt="Capital of France?", answer="Paris"), self.config.task)
