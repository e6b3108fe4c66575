"""The warm start: what an expert plays is stored in batches and learnt in seeded order."""

import asyncio

import pytest
from rollout_support import FakeEngine, dead, run, runner

from relax_agent.errors import EnvError
from relax_agent.queue import load_group
from relax_agent.run.warm_start import learn, play
from relax_agent.trainers import WarmStartSettings


class Monitor:
    def __init__(self):
        self.phases, self.messages = [], []

    def phase(self, *what):
        self.phases.append(what)

    def message(self, text):
        self.messages.append(text)


def played(folder, engine, **settings):
    monitor = Monitor()
    tasks = iter(f"t{number}" for number in range(1000))
    settings = WarmStartSettings(**settings)
    files = run(play(settings, runner(engine), folder, monitor, tasks=tasks))
    return files, monitor


def test_episodes_are_stored_a_batch_a_file(tmp_path):
    files, monitor = played(tmp_path / "warm", FakeEngine("good"), episodes=7, batch_episodes=3)
    assert [path.name for path in files] == ["00000.safetensors", "00001.safetensors"]
    groups = [load_group(path) for path in files]
    tasks = [[episode.task_id for episode in group.episodes] for group in groups]
    assert tasks == [["t0", "t1", "t2"], ["t3", "t4", "t5"]]
    assert all(e.reward == 1.0 for group in groups for e in group.episodes)
    assert monitor.messages == ["warm start: 7 expert episodes, success 1.00"]


def test_it_can_be_played_again_into_the_same_folder(tmp_path):
    for _ in range(2):
        files, _ = played(tmp_path, FakeEngine("good"), episodes=2, batch_episodes=2)
    assert [path.name for path in tmp_path.iterdir()] == [files[0].name]


def test_an_expert_whose_episodes_fail_teaches_nothing(tmp_path):
    with pytest.raises(EnvError, match=r"3 of 3 expert episodes failed; .*the engine is gone"):
        played(tmp_path, FakeEngine(dead), episodes=3, batch_episodes=3)


class Trainer:
    def __init__(self):
        self.seen = []

    async def sft_step(self, groups):
        self.seen.extend(groups)


def learnt(files, steps, seed):
    trainer, monitor = Trainer(), Monitor()
    asyncio.run(learn(WarmStartSettings(steps=steps), trainer, files, monitor, seed=seed))
    return trainer.seen, monitor


def test_every_file_is_seen_once_before_any_is_seen_again():
    files = list("abcd")
    seen, monitor = learnt(files, 10, seed=1)
    assert sorted(seen[:4]) == sorted(seen[4:8]) == files
    assert len(seen) == 10
    assert monitor.phases[-1] == ("warm start", 10, 10)


def test_the_order_is_that_of_the_seed():
    files = list("abcdefgh")
    assert learnt(files, 8, seed=1)[0] == learnt(files, 8, seed=1)[0]
    assert learnt(files, 8, seed=1)[0] != learnt(files, 8, seed=2)[0]
