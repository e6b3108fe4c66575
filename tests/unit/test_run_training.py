"""The order inside a training step, which resume and staleness rely on."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from rollout_support import make_group
from run_support import lines, recipe

from relax_agent.errors import TrainerError
from relax_agent.monitor import RunMonitor
from relax_agent.queue import LocalQueue
from relax_agent.rollout.groups import GroupOutcome
from relax_agent.run.checkpoints import Progress
from relax_agent.run.episodes import EpisodeLog
from relax_agent.run.folder import RunFolder
from relax_agent.run.recipe import parse_recipe
from relax_agent.run.tool_watch import ToolWatch
from relax_agent.run.training import TrainingLoop
from relax_agent.trainers.protocol import StepReport


class Trainer:
    """Notes what it is asked for; a checkpoint is an empty folder."""

    def __init__(self, note, skipped=None):
        self.note, self.skipped = note, skipped
        self.versions = []

    async def step(self, paths, *, version, mask_older_than):
        assert all(path.exists() for path in paths)
        self.versions.append(version)
        self.note("train")
        return StepReport(loss=0.5, skipped=self.skipped, time_s={"forward": 1.0})

    async def save(self, folder):
        self.note("save")
        folder.mkdir()


class Run:
    """A loop over a real queue, folder and monitor, with a trainer that only takes notes."""

    def __init__(self, tmp_path, *, skipped=None, **changes):
        self.notes = []
        self.recipe = parse_recipe(recipe(runs=str(tmp_path), **changes), "recipe")
        self.folder = RunFolder.create(self.recipe)
        per_step = self.recipe.rollout.groups_per_step
        self.queue = LocalQueue(self.folder.queue, self.recipe.queue, groups_per_step=per_step)
        self.trainer = Trainer(self.note, skipped)
        self.monitor = RunMonitor(self.folder.path, name="run", total_steps=9, quiet=True)
        self.loop = TrainingLoop(
            self.recipe,
            self.folder,
            queue=self.queue,
            trainer=self.trainer,
            fleet=SimpleNamespace(),
            monitor=self.monitor,
            episodes=EpisodeLog(self.folder.episodes),
            tools=ToolWatch(None, print),
            progress=Progress(version=1),
            evaluate=self.evaluate,
        )
        self.loop.publish_weights = self.publish
        ack = self.queue.ack

        async def noted_ack(lease, step):
            self.note("ack")
            await ack(lease, step)

        self.queue.ack = noted_ack

    def note(self, what):
        self.notes.append((what, len(lines(self.folder.path / "metrics.jsonl"))))

    async def publish(self, version):
        self.note("publish")
        self.loop.progress.version = version

    async def evaluate(self, step):
        self.note("evaluate")
        self.folder.eval_episodes(step).write_text("")
        return 0.5

    async def produce(self):
        for number in range(1000):
            group_id = f"g{number}"
            await self.queue.reserve(group_id, "t", timeout=1e6)
            group = make_group(group_id)
            self.loop.on_group(GroupOutcome(group))
            await self.queue.put(group)

    async def go(self):
        producer = asyncio.create_task(self.produce())
        try:
            await self.loop.run()
        finally:
            producer.cancel()
            await asyncio.gather(producer, return_exceptions=True)
            await self.queue.close()
            self.monitor.close()


def test_weights_go_out_before_the_ack_and_records_before_the_checkpoint(tmp_path):
    run = Run(tmp_path, steps=2, checkpoint={"every": 1})
    asyncio.run(run.go())
    assert run.notes == [
        ("train", 0), ("publish", 0), ("ack", 0), ("save", 1),
        ("train", 1), ("publish", 1), ("ack", 1), ("save", 2),
    ]  # fmt: skip
    assert run.trainer.versions == [1, 2]


def test_a_checkpoint_holds_where_the_run_stands(tmp_path):
    run = Run(tmp_path, steps=3, checkpoint={"every": 2})
    run.loop.progress.extra["greedy_before"] = 0.25
    asyncio.run(run.go())
    state = json.loads((run.folder.checkpoints.path(2) / "conductor.json").read_text())
    assert state == {"step": 2, "version": 3, "extra": {"greedy_before": 0.25}}
    assert run.folder.checkpoints.newest().progress.step == 3, "the last step makes one too"


def test_each_line_accounts_for_all_the_time_since_the_line_before(tmp_path):
    run = Run(tmp_path, steps=3, checkpoint={"every": 2})
    asyncio.run(run.go())
    told = lines(run.folder.path / "metrics.jsonl")
    for line in told:
        assert sum(line["time_s"].values()) == pytest.approx(line["wall_s"])
    assert ["checkpoint" in line["time_s"] for line in told] == [False, False, True]


def test_evaluations_in_between_come_when_due_and_never_twice(tmp_path):
    run = Run(tmp_path, steps=4, eval={"every": 2})
    asyncio.run(run.go())
    assert [what for what, _ in run.notes].count("evaluate") == 1, "the last is the run's own"
    run.loop.progress.step = 2
    asyncio.run(run.loop.evaluate_if_due())
    assert [what for what, _ in run.notes].count("evaluate") == 1
    run.folder.eval_episodes(2).unlink()
    asyncio.run(run.loop.evaluate_if_due())
    assert [what for what, _ in run.notes].count("evaluate") == 2


def test_a_skipped_step_publishes_nothing_and_too_many_of_them_end_the_run(tmp_path):
    run = Run(tmp_path, steps=99, skipped="every advantage is zero")
    with pytest.raises(TrainerError, match="10 steps in a row taught nothing: every advantage"):
        asyncio.run(run.go())
    assert "publish" not in [what for what, _ in run.notes]
    assert [line["version"] for line in lines(run.folder.path / "metrics.jsonl")] == [1] * 9


def test_groups_that_never_come_to_a_step_do_not_pile_up_in_memory(tmp_path):
    run = Run(tmp_path)
    for number in range(1000):
        run.loop.on_group(GroupOutcome(make_group(f"g{number}")))
    assert len(run.loop._finished) <= 256
    asyncio.run(run.queue.close())
