"""The scripted engine by itself: what tests of other parts build on."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from relax_agent.engines import Engine, GenerateRequest, SamplingParams
from relax_agent.engines.client import EngineClient
from relax_agent.engines.scripted import Fault, Reply, ScriptedEngine, made_up_routes
from relax_agent.engines.wire import RouteShape
from relax_agent.errors import EngineRejected, EngineUnavailable, MissingLogprobs

SHAPE = RouteShape(3, 2, 8)


def request(ids=(1, 2, 3), tokens=3, rid="r", **options):
    routes = options.pop("routes", False)
    return GenerateRequest(list(ids), SamplingParams(tokens, **options), rid, routes)


def generate(engine, *requests):
    async def main():
        return [await engine.generate(each) for each in requests]

    return asyncio.run(main())


def test_both_forms_of_an_engine_keep_the_protocol():
    assert isinstance(ScriptedEngine(), Engine)
    assert isinstance(EngineClient("http://127.0.0.1:1"), Engine)


def test_replies_come_in_order_and_run_out_with_an_error():
    engine = ScriptedEngine([Reply([5]), Reply([6])])
    answers = generate(engine, request(), request())
    assert [answer.output_ids for answer in answers] == [[5], [6]]
    with pytest.raises(EngineUnavailable, match="no reply"):
        generate(engine, request())


def test_a_function_sees_the_request():
    engine = ScriptedEngine(lambda r: Reply([len(r.input_ids)]))
    assert generate(engine, request([9] * 7))[0].output_ids == [7]


def test_limits_and_stop_tokens_cut_the_scripted_answer():
    engine = ScriptedEngine(lambda _: Reply([5, 6, 7, 8]))
    limit, stop, whole = generate(
        engine, request(tokens=2), request(tokens=9, stop_token_ids=[6]), request(tokens=9)
    )
    assert (limit.output_ids, limit.finish_reason) == ([5, 6], "length")
    assert (stop.output_ids, stop.finish_reason) == ([5, 6], "stop")
    assert (whole.output_ids, whole.finish_reason) == ([5, 6, 7, 8], "stop")


@pytest.mark.parametrize("count", [0, 2])
def test_an_answer_can_be_aborted_after_some_tokens(count):
    answer = generate(ScriptedEngine([Reply([5, 6, 7], abort_after=count)]), request())[0]
    assert (answer.output_ids, answer.finish_reason) == ([5, 6, 7][:count], "abort")


def test_missing_logprobs_fail_in_process_too():
    with pytest.raises(MissingLogprobs):
        generate(ScriptedEngine([Reply([5], fault=Fault.NO_LOGPROBS)]), request())


def test_scripted_routes_are_returned_from_the_asked_position():
    routes = np.arange(30, dtype=np.uint8).reshape(5, 3, 2) % 8
    engine = ScriptedEngine([Reply([5, 6, 7], routes=routes)], route_shape=SHAPE)
    asked = GenerateRequest([1, 2, 3], SamplingParams(3), "r", True, 2)
    assert np.array_equal(generate(engine, asked)[0].routes, routes[2:])


def test_made_up_routes_name_each_expert_once():
    routes = made_up_routes([4, 4, 9], SHAPE)
    assert routes.shape == (3, 3, 2)
    assert (routes[..., 0] != routes[..., 1]).all()


def test_unseeded_answers_differ_and_seeded_ones_repeat():
    first, second, seeded, again = generate(
        ScriptedEngine(),
        request(tokens=8, rid="a"),
        request(tokens=8, rid="b"),
        request(tokens=8, rid="c", seed=1),
        request(tokens=8, rid="d", seed=1),
    )
    assert first.output_ids != second.output_ids
    assert seeded.output_ids == again.output_ids


def test_the_step_decides_how_far_an_answer_gets():
    """T136: after a pause at token 2 the next token is there, none is lost or repeated."""

    async def main():
        step, third = asyncio.Semaphore(2), asyncio.Event()

        async def limited():
            if step.locked():
                third.set()
            await step.acquire()

        engine = ScriptedEngine([Reply([5, 6, 7, 8])], step=limited)
        task = asyncio.ensure_future(engine.generate(request(tokens=4)))
        await third.wait()
        await engine.pause()
        engine.version = 1
        step.release()
        await engine.resume()
        step.release()
        return await task

    answer = asyncio.run(main())
    assert answer.output_ids == [5, 6, 7, 8]
    assert answer.versions == [0, 0, 1, 1]


@pytest.mark.parametrize(("by_version", "cached"), [(True, 0), (False, 4)])
def test_a_cache_whose_key_lacks_the_version_serves_stale_prefixes(by_version, cached):
    """T94: the failure can be played, so that tests against it can fail."""

    async def main():
        engine = ScriptedEngine(cache_by_version=by_version)
        await engine.generate(request([1, 2, 3, 4, 5], 1))
        engine.version = 1
        return await engine.generate(request([1, 2, 3, 4, 5], 1))

    assert asyncio.run(main()).cached_tokens == cached


def test_a_failing_step_is_no_silent_end():
    async def broken():
        raise OSError("step")

    with pytest.raises(OSError, match="step"):
        generate(ScriptedEngine(step=broken), request())


def test_the_same_id_twice_is_refused():
    async def main():
        engine = ScriptedEngine()
        both = (engine.generate(request()), engine.generate(request()))
        return await asyncio.gather(*both, return_exceptions=True)

    assert isinstance(asyncio.run(main())[1], EngineRejected)


def test_the_dead_answer_nothing():
    async def main():
        engine = ScriptedEngine()
        engine.die()
        for call in (engine.pause, engine.resume, engine.flush_cache, engine.model_info):
            with pytest.raises(EngineUnavailable):
                await call()
        return await engine.health()

    assert asyncio.run(main()) is False
