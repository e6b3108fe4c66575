"""Publishing weights to engines that are busy: everything arrives, nothing is lost."""

from __future__ import annotations

import asyncio

import pytest
from engine_support import ALL_KINDS, PROMPT

from relax_agent.errors import WeightSyncError
from relax_agent.weights import WeightsSettings, publish

every_engine = pytest.mark.parametrize("subject", ALL_KINDS, indirect=True)
RUNNING, WAITING = 15, 6
"""The engines have 16 slots: some requests wait in the queue."""


async def publish_folder(subject, folder, **options):
    version = next(subject.versions)
    report = await publish([subject.engine], folder, version, WeightsSettings(**options))
    return version, report


@every_engine
@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_no_running_or_waiting_request_is_dropped(subject, pause):
    """T139."""

    async def main():
        tasks = await subject.start_long(RUNNING, 200)
        tasks += [asyncio.ensure_future(subject.ask(tokens=200)) for _ in range(WAITING)]
        await asyncio.sleep(0)
        version, report = await publish_folder(subject, subject.models.other, pause=pause)
        crossing = [task for task in tasks if not task.done()]
        answers = await asyncio.gather(*tasks)
        await publish_folder(subject, subject.models.base)
        return version, report, answers, [task.result() for task in crossing]

    version, report, answers, crossing = subject.run(main())
    assert [answer.finish_reason for answer in answers] == ["length"] * (RUNNING + WAITING)
    assert all(len(answer.output_ids) == 200 for answer in answers)
    assert crossing, "every request had ended before the weights came"
    assert all(answer.versions[-1] == version for answer in crossing)
    assert all(answer.versions[0] != version for answer in answers[:RUNNING])
    assert (report.version, report.engines) == (version, 1)
    assert report.bytes_per_engine > 100_000
    assert 0 < report.paused_s <= report.wall_s


@every_engine
def test_weights_from_memory_are_the_weights_from_disk(subject):
    if not subject.takes_tensors:
        with pytest.raises(WeightSyncError):
            subject.run(publish_folder(subject, subject.models.other, kind="tensor"))
        assert subject.run(subject.ask(tokens=2)).finish_reason == "length"
        return

    async def main():
        answers = []
        for kind in ("tensor", "disk"):
            version, _ = await publish_folder(subject, subject.models.other, kind=kind)
            answers.append(await subject.greedy(tokens=16))
            assert answers[-1].versions == [version] * 16
        await publish_folder(subject, subject.models.base)
        return answers

    memory, disk = subject.run(main())
    assert memory.output_ids == disk.output_ids


@every_engine
@pytest.mark.parametrize("kind", ["disk", "tensor"])
def test_weights_that_do_not_fit_leave_the_engine_running_on_the_old_ones(subject, kind):
    """T145. And the next publication works: no session stays open."""

    async def main():
        tasks = await subject.start_long(2)
        with pytest.raises(WeightSyncError, match=subject.engine.name):
            await publish_folder(subject, subject.models.missing, kind=kind)
        answers = await asyncio.gather(*tasks)
        version, _ = await publish_folder(subject, subject.models.base)
        return answers, version, await subject.ask(PROMPT, 4)

    answers, version, after = subject.run(main())
    assert [answer.finish_reason for answer in answers] == ["length", "length"]
    assert all(len(set(answer.versions)) == 1 for answer in answers)
    assert after.versions == [version] * 4
