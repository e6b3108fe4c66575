"""Many environments, each in a process of its own: what hangs is killed, what dies is replaced."""

import asyncio
import os
import signal
import time

from relax_agent.envs import EnvSpec, PlayLimits, ScriptedPolicy, SyncEnv, make_vec
from relax_agent.messages import assistant, user


class Rough(SyncEnv):
    """Does to its process what its task says."""

    def reset(self, *, seed=None, options=None):
        self.task = options["task"]
        return [user(str(os.getpid()))], {"task": self.task}

    def step(self, action):
        if self.task == "hang":
            time.sleep(3600)
        if self.task == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return [user(str(os.getpid()))], 1.0, True, False, {}


SPEC = EnvSpec("test/Rough-v0", f"{__name__}:Rough")


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_slots_in_processes_hang_and_die_alone():
    """T154, T158: a hung or killed process costs its own episode, and none stays behind."""

    async def main():
        async with make_vec(SPEC, 2, isolation="process") as vec:
            limits = PlayLimits(step_timeout_s=1.0)
            jobs = ["die", "hang", "ok", "ok"]
            policy = ScriptedPolicy(lambda messages, tools: assistant("go"))
            plays = [play async for play in vec.run(policy, jobs, limits=limits)]
            left = [env.env.pid for env in vec.envs if env is not None]
        return plays, left

    plays, left = asyncio.run(main())
    ends = sorted((play.task_id, play.status.value) for play in plays)
    assert ends == [
        ("die", "env_failure"),
        ("hang", "env_failure"),
        ("ok", "completed"),
        ("ok", "completed"),
    ]
    (died,) = (play for play in plays if play.task_id == "die")
    assert "SIGKILL" in died.detail
    pids = {int(play.messages[0].text) for play in plays} | set(left)
    assert os.getpid() not in pids
    assert all(gone(pid) for pid in pids)
