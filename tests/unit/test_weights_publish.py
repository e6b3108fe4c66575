"""Publishing to fleets of scripted engines: order, failures, time limits."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from safetensors.numpy import save_file

from relax_agent.engines import GenerateRequest, SamplingParams
from relax_agent.engines.client import EngineClient
from relax_agent.engines.scripted import Reply, ScriptedEngine
from relax_agent.engines.scripted_server import ScriptedServer
from relax_agent.errors import EngineUnavailable, StorageError, WeightSyncError
from relax_agent.weights import WeightsSettings, publish

TENSORS = {"a": np.zeros((2, 3), np.float32), "b": np.ones(4, np.float32)}


class Recorder(ScriptedEngine):
    """Notes the order of calls and fails at one of them, or hangs there."""

    def __init__(self, *args, fail_at=None, hang_at=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []
        self.fail_at, self.hang_at = fail_at, hang_at

    async def _note(self, name):
        self.calls.append(name)
        if name == self.fail_at:
            raise EngineUnavailable(f"{self.name} fails at {name}")
        if name == self.hang_at:
            await asyncio.Event().wait()

    async def pause(self, mode="retract"):
        await self._note("pause")
        await super().pause(mode)

    async def begin_weight_update(self):
        await self._note("begin")
        await super().begin_weight_update()

    async def update_weights_from_disk(self, path, version):
        await self._note("update")
        await super().update_weights_from_disk(path, version)

    async def update_weights_from_tensor(self, bucket, version):
        await self._note("update")
        await super().update_weights_from_tensor(bucket, version)

    async def end_weight_update(self):
        await self._note("end")
        await super().end_weight_update()

    async def flush_cache(self):
        await self._note("flush")
        await super().flush_cache()

    async def resume(self):
        await self._note("resume")
        await super().resume()


@pytest.fixture
def folder(tmp_path):
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, tmp_path / f"model-{name}.safetensors")
    return tmp_path


def run_publish(engines, folder, **settings):
    return asyncio.run(publish(engines, folder, 1, WeightsSettings(**settings)))


@pytest.mark.parametrize(
    ("settings", "order"),
    [
        ({}, "pause begin update end flush resume"),
        ({"kind": "tensor"}, "pause begin update update end flush resume"),
        ({"pause": "in_place"}, "pause begin update end resume"),
    ],
)
def test_every_engine_goes_through_the_same_order(folder, settings, order):
    engines = [Recorder(name=f"e{n}", model_path=folder) for n in range(3)]
    report = run_publish(engines, folder, **settings)
    assert [engine.calls for engine in engines] == [order.split()] * 3
    assert [engine.version for engine in engines] == [1, 1, 1]
    assert (report.engines, report.version) == (3, 1)


@pytest.mark.parametrize("step", ["begin", "update", "end", "flush"])
def test_a_failure_names_the_engine_and_every_engine_runs_again(folder, step):
    engines = [Recorder(name="good"), Recorder(name="bad", fail_at=step), Recorder(name="fine")]

    async def main():
        with pytest.raises(WeightSyncError, match="1 of 3 engines: bad: bad fails") as caught:
            await publish(engines, folder, 1, WeightsSettings())
        for engine in engines:
            info = await engine.server_info()
            assert info["paused"] is None
        return caught.value

    error = asyncio.run(main())
    assert isinstance(error.__cause__, EngineUnavailable)
    assert (engines[0].version, engines[2].version) == (1, 1)


@pytest.mark.parametrize("step", ["pause", "update", "flush"])
def test_an_engine_that_hangs_ends_at_the_time_limit_and_is_resumed(folder, step):
    engines = [Recorder(name="good"), Recorder(name="stuck", hang_at=step)]
    with pytest.raises(WeightSyncError, match=r"stuck: no end after 0\.2 s"):
        run_publish(engines, folder, timeout_s=0.2)
    assert engines[1].calls[-1] == "resume"
    assert engines[0].version == 1


def test_a_dead_engine_does_not_keep_the_others_from_the_weights(folder):
    engines = [Recorder(name="good"), Recorder(name="dead")]
    engines[1].die()
    with pytest.raises(WeightSyncError, match="dead: dead gave no answer"):
        run_publish(engines, folder)
    assert engines[0].version == 1


def test_an_update_that_was_refused_leaves_no_session_open(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    save_file({"z": TENSORS["a"]}, other / "model.safetensors")
    engine = Recorder(name="e", model_path=folder)

    async def main():
        with pytest.raises(WeightSyncError, match="unknown, first z"):
            await publish([engine], other, 1, WeightsSettings(kind="tensor"))
        assert engine.version == 0
        await publish([engine], folder, 2, WeightsSettings(kind="tensor"))

    asyncio.run(main())
    assert engine.version == 2


def test_an_engine_that_keeps_its_old_version_is_noticed(folder):
    class Stubborn(Recorder):
        async def update_weights_from_disk(self, path, version):
            await self._note("update")

    with pytest.raises(WeightSyncError, match="reports version 0"):
        run_publish([Stubborn(name="e")], folder)


def test_a_folder_without_weights_stops_no_engine(tmp_path):
    engine = Recorder()
    with pytest.raises(StorageError):
        run_publish([engine], tmp_path)
    assert engine.calls == []


def test_cancelling_a_publication_resumes_the_engines(folder):
    engine = Recorder(hang_at="update")

    async def main():
        task = asyncio.ensure_future(publish([engine], folder, 1, WeightsSettings()))
        while "update" not in engine.calls:  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert engine.calls[-1] == "resume"


@pytest.mark.parametrize("arm", ["pause", "flush", "version", "version-abort-off", "publish"])
def test_sixteen_requests_live_through_everything_that_a_publication_does(folder, arm):
    """T139: the four arms of the probe; SGLang's default of the third one aborts everything."""

    async def main():
        step = asyncio.Semaphore(0)
        engine = ScriptedEngine(lambda _: Reply([5] * 20), step=step.acquire)
        async with ScriptedServer(engine) as server, EngineClient(server.url) as client:
            tasks = [
                asyncio.ensure_future(
                    client.generate(GenerateRequest([1, n + 2], SamplingParams(20), f"r{n}"))
                )
                for n in range(16)
            ]
            while engine.running < 16:  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0.001)
            if arm == "publish":
                await publish([client], folder, 1, WeightsSettings())
            else:
                await _probe(client, arm)
            for _ in range(16 * 20):
                step.release()
            answers = await asyncio.gather(*tasks)
        return engine.aborted, [answer.finish_reason for answer in answers]

    aborted, reasons = asyncio.run(main())
    expected = 16 if arm == "version" else 0
    assert aborted == expected
    assert reasons.count("abort") == expected


async def _probe(client, arm):
    await client.pause("retract")
    if arm != "pause":
        await client.flush_cache()
    if arm.startswith("version"):
        body = {"new_version": "1"}
        if arm == "version-abort-off":
            body["abort_all_requests"] = False
        await client._post("/update_weight_version", body)
    await client.resume()
