"""A taskset of verifiers that brings an Env: a game that answers each move."""

import asyncio
import random

import verifiers.v1 as vf

__all__ = ["GuessEnv", "Guessing"]


class RiddleData(vf.TaskData):
    answer: str


class Riddle(vf.Task[RiddleData]):
    @vf.metric
    async def guesses(self, trace) -> float:
        return trace.num_turns


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    guesses: int = 4


class GuessEnv(vf.Env[GuessConfig]):
    async def setup(self, agents):
        agents.player.trainable = True

    async def run(self, task, agents):
        random.seed(int(task.data.answer))
        number = random.randint(1, 8)
        won = 0.0
        async with agents.player.interaction(task) as talk:
            said = await talk.turn("Guess from 1 to 8.")
            for _ in range(self.config.guesses):
                if said.terminated:
                    break
                await asyncio.sleep(0)
                if int(said.last_reply) == number:
                    won = 1.0
                    break
                told = "higher" if int(said.last_reply) < number else "lower"
                said = await talk.turn([{"role": "user", "content": told}])
        talk.trace.record_reward("won", won, 1.0)

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        trace.record_metric("finalized", 1.0)


class Guessing(vf.Taskset[Riddle, vf.TasksetConfig]):
    def load(self):
        for n in range(5):
            yield Riddle(RiddleData(id=f"g{n}", answer=str(n), system_prompt="Say a number."))
