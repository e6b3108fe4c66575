"""A trainer in a process of its own: commands, typed errors, deaths, orphans and clean ends."""

import asyncio
import os
import signal
import socket
import subprocess
import sys

import pytest
import torch
from trainer_support import dense_model, episode, group, moe_model

from relax_agent import errors
from relax_agent.errors import (
    BatchError,
    ChildDied,
    ConfigError,
    RouteError,
    StorageError,
    TrainerError,
)
from relax_agent.processes import supervise
from relax_agent.queue.payload import save_group
from relax_agent.trainers import client, wire, worker
from relax_agent.trainers.algorithms.settings import GrpoSettings
from relax_agent.trainers.building import build_batch
from relax_agent.trainers.client import TrainerProcess
from relax_agent.trainers.settings import TrainerSettings
from relax_agent.trainers.torch_trainer import TorchTrainer

SETTINGS = TrainerSettings(kind="torch", lr=1e-3, micro_batch_tokens=64)
GRPO = GrpoSettings()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    moe_model(base / "moe")
    dense_model(base / "dense")
    return base


def saved(folder, groups):
    paths = []
    for each in groups:
        paths.append(folder / f"{each.id}.safetensors")
        save_group(paths[-1], each)
    return paths


def run(folders, tmp_path, body, kind="moe", settings=SETTINGS):
    """Run ``body(trainer, children)`` around a live trainer process."""

    async def main():
        async with asyncio.timeout(120), supervise(tmp_path / "logs") as children:
            trainer = await TrainerProcess.start(children, settings, GRPO, folders / kind)
            try:
                return await body(trainer, children)
            finally:
                await trainer.close()

    return asyncio.run(main())


def test_a_process_gives_the_numbers_of_a_trainer_called_directly(folders, tmp_path):
    groups = [group([1.0, 0.0, 0.5], id=f"g{i}", routes=True) for i in range(2)]
    paths = saved(tmp_path, groups)

    async def body(trainer, children):
        sft = await trainer.sft_step(paths)
        first = await trainer.step(paths, version=0)
        await trainer.save(tmp_path / "ck")
        second = await trainer.step(paths, version=1)
        await trainer.restore(tmp_path / "ck")
        again = await trainer.step(paths, version=1)
        await trainer.publish(tmp_path / "v1")
        return sft, first, second, again

    sft, first, second, again = run(folders, tmp_path, body)
    assert sft.loss > 0
    assert (first.step, second.step, again.step) == (1, 2, 2)
    assert (second.loss, second.grad_norm) == (again.loss, again.grad_norm)
    assert (first.staleness_max, second.staleness_max) == (0, 1)
    assert {"wait", "load", "batch", "forward", "backward", "optimizer"} <= first.time_s.keys()
    assert {"checkpoint"} <= second.time_s.keys()

    direct = TorchTrainer(SETTINGS, GRPO, folders / "moe")
    direct.restore(tmp_path / "ck")
    direct.step(build_batch(groups, GRPO, direct.layout, version=1))
    from transformers import AutoModelForCausalLM

    published = AutoModelForCausalLM.from_pretrained(tmp_path / "v1")
    for name, parameter in published.named_parameters():
        assert torch.equal(parameter, direct.names[name])


def test_two_megatron_ranks_take_the_steps_of_the_torch_trainer(folders, tmp_path):
    """T35, U7: one protocol, one batch, one number, whoever computes it on however many ranks."""
    groups = [group([1.0, 0.0, 0.5], id=f"g{i}", routes=True) for i in range(3)]
    paths = saved(tmp_path, groups)

    async def body(trainer, children):
        reports = [await trainer.step(paths, version=v) for v in range(2)]
        await trainer.publish(tmp_path / "v2")
        return reports

    settings = SETTINGS.model_copy(update={"kind": "megatron", "ranks": 2})
    reports = run(folders, tmp_path, body, settings=settings)
    direct = TorchTrainer(SETTINGS, GRPO, folders / "moe")
    for version, report in enumerate(reports):
        own = direct.step(build_batch(groups, GRPO, direct.layout, version=version))
        assert report.tokens == own.tokens
        for name in ("loss", "grad_norm", "logprob_mismatch", "clip_share", "routes_differ"):
            assert getattr(report, name) == pytest.approx(getattr(own, name), rel=1e-4), name
    from transformers import AutoModelForCausalLM

    published = AutoModelForCausalLM.from_pretrained(tmp_path / "v2")
    for name, parameter in published.named_parameters():
        assert torch.allclose(parameter, direct.names[name], atol=1e-4), name


def test_bad_data_is_a_typed_error_and_the_worker_lives_on(folders, tmp_path):
    good = saved(tmp_path, [group([1.0, 0.0], routes=True)])
    nan = saved(tmp_path, [group([1.0, 0.0], id="nan", routes=True)])
    unrouted = saved(tmp_path, [group([1.0, 0.0], id="unrouted")])

    async def body(trainer, children):
        with pytest.raises(RouteError, match=r"trainer-0: .*no routed experts") as caught:
            await trainer.step(unrouted, version=0)
        assert "routing_replay" in caught.value.hint
        with pytest.raises(BatchError, match="sampled by version 0, but the trainer is at -1"):
            await trainer.step(nan, version=-1)
        with pytest.raises(StorageError, match="cannot read the group"):
            await trainer.step([tmp_path / "nowhere"], version=0)
        skipped = await trainer.step([], version=0)
        assert skipped.skipped
        return await trainer.step(good, version=0)

    report = run(folders, tmp_path, body)
    assert (report.step, report.skipped) == (1, None)


def test_a_model_that_does_not_exist_fails_at_the_start(folders, tmp_path):
    async def main():
        async with supervise(tmp_path / "logs") as children:
            with pytest.raises(ConfigError, match="no model in"):
                await TrainerProcess.start(children, SETTINGS, GRPO, tmp_path / "nothing")
            assert children.children == ()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_killed_worker_is_a_death_with_its_exit_code(folders, tmp_path):
    """T109, T158: the waiting call ends at once, with the signal and the log's place."""

    async def body(trainer, children):
        children.expect_exit(children.children[0])
        os.kill(children.children[0].pid, signal.SIGSTOP)
        call = asyncio.create_task(trainer.step([], version=0))
        await asyncio.sleep(0)
        os.kill(children.children[0].pid, signal.SIGKILL)
        with pytest.raises(ChildDied) as caught:
            await asyncio.wait_for(call, 20)
        assert caught.value.child_exit_code == -signal.SIGKILL
        assert "trainer-0.log" in str(caught.value)
        with pytest.raises((ChildDied, TrainerError)):
            await trainer.step([], version=0)

    run(folders, tmp_path, body, "dense")


def test_an_unexpected_death_ends_the_supervised_block(folders, tmp_path):
    async def body(trainer, children):
        os.kill(children.children[0].pid, signal.SIGKILL)
        await asyncio.Event().wait()

    with pytest.raises(ChildDied):
        run(folders, tmp_path, body, "dense")


def test_a_silent_worker_is_bounded(folders, tmp_path):
    async def body(trainer, children):
        child = children.children[0]
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(TrainerError, match=r"did not finish step within 0\.3 s"):
            await trainer.step([], version=0)
        os.kill(child.pid, signal.SIGCONT)

    settings = SETTINGS.model_copy(update={"timeout_s": 0.3})
    run(folders, tmp_path, body, "dense", settings)


def test_the_answer_to_a_cancelled_command_is_not_taken_for_the_next(folders, tmp_path):
    paths = saved(tmp_path, [group([1.0, 0.0])])

    async def body(trainer, children):
        child = children.children[0]
        os.kill(child.pid, signal.SIGSTOP)
        call = asyncio.create_task(trainer.step(paths, version=0))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        os.kill(child.pid, signal.SIGCONT)
        return await trainer.step(paths, version=0)

    assert run(folders, tmp_path, body, "dense").step == 2


def test_close_leaves_no_process_and_a_closed_trainer_says_so(folders, tmp_path):
    async def main():
        async with supervise(tmp_path / "logs") as children:
            trainer = await TrainerProcess.start(children, SETTINGS, GRPO, folders / "dense")
            child = children.children[0]
            await trainer.close()
            await trainer.close()
            assert child.exit_code == 0
            with pytest.raises(TrainerError, match="closed"):
                await trainer.step([], version=0)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert "trainer rank 0" in (tmp_path / "logs" / "trainer-0.log").read_text()


def test_a_worker_ends_when_its_parent_hangs_up(tmp_path):
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "relax_agent.trainers.worker", "--fd", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdout=subprocess.PIPE,
    )
    theirs.close()
    assert process.stdout.readline().startswith(b"trainer rank 0")
    ours.close()
    assert process.wait(30) == worker.ORPHANED
    process.stdout.close()


def test_every_plain_error_class_survives_the_wire():
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and kind.__init__ is errors.RelaxError.__init__:
            back = wire.error_from_json(wire.error_to_json(kind("a\nb", hint="h")), "trainer-0")
            assert (type(back).__name__, str(back)) == (name, "trainer-0: a → h")


def test_other_errors_become_one_line_of_a_trainer_error():
    data = wire.error_to_json(RuntimeError("size mismatch\nlong\ntrace"))
    back = wire.error_from_json(data, "trainer-1")
    assert type(back) is TrainerError
    assert str(back) == "trainer-1: RuntimeError: size mismatch → see the trainer's log"
    death = wire.error_from_json(wire.error_to_json(ChildDied("x", 1)), "trainer-1")
    assert type(death) is TrainerError


def test_commands_before_init_and_unknown_commands_are_errors():
    subject = worker.Worker()
    for command in ("step", "explode"):
        reply = subject.answer({"id": 1, "command": command, "groups": [], "version": 0})
        assert reply["error"]["class"] == "TrainerError"


class FakeRank:
    """A rank that answers, fails or hangs as told."""

    def __init__(self, outcome, delay=0.0):
        self.outcome, self.delay = outcome, delay

    async def call(self, request, timeout_s):
        await asyncio.sleep(self.delay)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def joined(tmp_path, *ranks):
    async def main():
        trainer = TrainerProcess(None, list(ranks), tmp_path, 60.0)
        try:
            return await trainer._call("save"), trainer
        except Exception as error:
            return error, trainer

    return asyncio.run(asyncio.wait_for(main(), 30))


def test_rank_zero_answers_for_all(tmp_path):
    result, trainer = joined(tmp_path, FakeRank({"a": 0}, 0.01), FakeRank({"a": 1}))
    assert (result, trainer._broken) == ({"a": 0}, None)


def test_an_error_on_all_ranks_is_one_error_and_breaks_nothing(tmp_path):
    error, trainer = joined(tmp_path, *(FakeRank(BatchError("bad")) for _ in range(2)))
    assert (type(error), trainer._broken) == (BatchError, None)


def test_a_rank_that_hangs_after_anothers_failure_is_not_waited_for(tmp_path, monkeypatch):
    """T137: a collective that one rank never enters."""
    monkeypatch.setattr(client, "LAGGARD_LIMIT_S", 0.01)
    death = ChildDied("trainer-1", 1)
    error, trainer = joined(tmp_path, FakeRank({}, 3600), FakeRank(death))
    assert error is death
    assert "hung in save" in trainer._broken


def test_a_death_explains_the_errors_of_the_other_ranks(tmp_path):
    death = ChildDied("trainer-1", -9)
    error, trainer = joined(tmp_path, FakeRank(TrainerError("peer reset")), FakeRank(death))
    assert error is death
    assert trainer._broken is None


def test_ranks_that_disagree_are_not_used_again(tmp_path):
    error, trainer = joined(tmp_path, FakeRank({}), FakeRank(TrainerError("no memory")))
    assert type(error) is TrainerError
    assert "went apart" in trainer._broken


def test_an_episode_without_a_signal_is_reported_over_the_wire(folders, tmp_path):
    paths = saved(tmp_path, [group([float("nan"), 1.0, 0.0]), group([1.0, 1.0], id="flat")])
    lone = group([1.0], id="lone")
    lone.episodes = [episode(1.0, seed=99)]
    paths += saved(tmp_path, [lone])

    async def body(trainer, children):
        return await trainer.step(paths, version=0)

    report = run(folders, tmp_path, body, "dense")
    assert report.excluded["episodes_with_nan_reward"] == 1
    assert report.excluded["groups_without_signal"] == 2
    assert report.sequences == 5
