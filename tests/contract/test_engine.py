"""What every engine promises: scripted, embedded and real SGLang pass the same tests."""

from __future__ import annotations

import asyncio

import aiohttp
import numpy as np
import pytest
from engine_support import ALL_KINDS, MODEL_KINDS, PROMPT

from relax_agent.errors import EngineRejected

every_engine = pytest.mark.parametrize("subject", ALL_KINDS, indirect=True)
every_model = pytest.mark.parametrize("subject", MODEL_KINDS, indirect=True)
TOLERANCE = {"embedded": 1e-5, "sglang": 1e-3}


def full_forward(model, ids):
    """Logits ``[tokens, vocabulary]`` and chosen experts ``[tokens, layers, 2]``, no cache."""
    import torch

    with torch.no_grad():
        output = model(torch.tensor([ids]), output_router_logits=True, use_cache=False)
    chosen = [logits.view(len(ids), -1).topk(2, -1).indices for logits in output.router_logits]
    return output.logits[0].double(), torch.stack(chosen, 1).numpy()


def expected_logprobs(model, answer, prompt=PROMPT, temperature=1.0, bias=()):
    logits, _ = full_forward(model, [*prompt, *answer.output_ids])
    for token, value in bias:
        logits[:, token] += value
    logprobs = (logits / temperature).log_softmax(-1)
    rows = range(len(prompt) - 1, len(prompt) - 1 + len(answer.output_ids))
    return [float(logprobs[row, token]) for row, token in zip(rows, answer.output_ids, strict=True)]


@every_engine
def test_an_answer_has_one_logprob_and_one_version_per_token(subject):
    answer = subject.run(subject.ask(tokens=12))
    assert len(answer.output_ids) == len(answer.logprobs) == len(answer.versions) == 12
    assert all(value <= 0 for value in answer.logprobs)
    assert len(set(answer.versions)) == 1
    assert answer.prompt_tokens == len(PROMPT)
    assert answer.routes is None


@every_engine
def test_greedy_answers_repeat(subject):
    first, second = subject.run(subject.greedy()), subject.run(subject.greedy())
    assert first.output_ids == second.output_ids


@every_engine
def test_requests_at_the_same_time_do_not_disturb_each_other(subject):
    async def main():
        prompts = [[n + 3, n + 4, *PROMPT[: n % 5 + 1]] for n in range(10)]
        alone = [await subject.greedy(prompt) for prompt in prompts]
        together = await asyncio.gather(*(subject.greedy(prompt) for prompt in prompts))
        assert [a.output_ids for a in alone] == [a.output_ids for a in together]

    subject.run(main())


@every_engine
def test_seeded_requests_repeat_where_seeds_are_honoured(subject):
    """Real SGLang takes the seed and ignores it; if that changes, this test says so."""

    async def main():
        return [await subject.ask(tokens=32, seed=seed) for seed in (5, 5, 6)]

    first, again, other = subject.run(main())
    assert (first.output_ids == again.output_ids) is subject.honours_seeds
    assert first.output_ids != other.output_ids


@every_engine
def test_a_stop_token_ends_the_answer_and_is_its_last_token(subject):
    async def main():
        whole = await subject.greedy(tokens=8)
        stop = whole.output_ids[4]
        return whole, await subject.greedy(tokens=8, stop_token_ids=[stop], ignore_eos=False)

    whole, stopped = subject.run(main())
    assert stopped.finish_reason == "stop"
    assert (
        stopped.output_ids == whole.output_ids[: whole.output_ids.index(stopped.output_ids[-1]) + 1]
    )


@every_engine
def test_the_token_limit_ends_the_answer(subject):
    answer = subject.run(subject.ask(tokens=5))
    assert (answer.finish_reason, len(answer.output_ids)) == ("length", 5)


@every_engine
def test_an_aborted_request_returns_its_part_and_is_no_stop(subject):
    """T118. And the id is matched whole: ``x1`` does not end ``x12``."""

    async def main():
        tasks = [
            asyncio.ensure_future(subject.ask([n + 3, *PROMPT], 1200, rid=rid, routes=True))
            for n, rid in enumerate(("x1", "x12"))
        ]
        await asyncio.sleep(0)
        await subject.ask([7, 8, 9], 16)
        await subject.engine.abort("x1")
        ended = await tasks[0]
        await subject.ask([7, 8, 9], 4)
        assert not tasks[1].done()
        await subject.engine.abort()
        return ended, await tasks[1]

    for answer in subject.run(main()):
        assert answer.finish_reason == "abort"
        count = len(answer.output_ids)
        assert 0 < count < 1200
        assert len(answer.logprobs) == len(answer.versions) == count
        assert len(answer.routes) <= len(PROMPT) + count


@every_engine
def test_routes_cover_all_positions_but_the_last_token(subject):
    answer = subject.run(subject.greedy(tokens=8, routes=True))
    assert answer.routes.shape == (len(PROMPT) + 8 - 1, 3, 2)
    assert answer.routes.dtype == np.uint8
    assert answer.routes.max() < 8
    assert (answer.routes[..., 0] != answer.routes[..., 1]).all()


@every_engine
def test_routes_start_returns_the_tail_also_from_a_cached_prefix(subject):
    async def main():
        whole = await subject.greedy(tokens=6, routes=True)
        return whole, await subject.greedy(tokens=6, routes=True, start=4)

    whole, tail = subject.run(main())
    assert tail.cached_tokens > 0
    assert np.array_equal(tail.routes, whole.routes[4:])


@every_engine
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_requests_live_through_an_update_and_tell_their_versions(subject, mode):
    """T139: nothing is aborted."""

    async def main():
        tasks = await subject.start_long(4)
        version = await subject.load(subject.models.other, mode)
        answers = await asyncio.gather(*tasks)
        await subject.load(subject.models.base)
        return version, answers

    version, answers = subject.run(main())
    for answer in answers:
        assert (answer.finish_reason, len(answer.output_ids)) == ("length", 300)
        assert len(set(answer.versions)) == 2
        assert answer.versions == sorted(answer.versions)
        assert answer.versions[-1] == version


@every_engine
def test_nothing_is_sampled_during_a_pause(subject):
    async def main():
        tasks = await subject.start_long(2)
        await subject.engine.pause("retract")
        late = asyncio.ensure_future(subject.ask(tokens=2))
        done, _ = await asyncio.wait([*tasks, late], timeout=0.3)
        await subject.engine.resume()
        answers = await asyncio.gather(*tasks, late)
        return done, answers

    done, answers = subject.run(main())
    assert not done
    assert [answer.finish_reason for answer in answers] == ["length"] * 3


@every_engine
def test_pause_with_abort_returns_all_running_requests(subject):
    async def main():
        tasks = await subject.start_long(2)
        await subject.engine.pause("abort")
        answers = await asyncio.gather(*tasks)
        await subject.engine.resume()
        return answers

    assert [answer.finish_reason for answer in subject.run(main())] == ["abort", "abort"]


@every_engine
def test_pausing_and_resuming_twice_is_harmless(subject):
    async def main():
        for call in ("pause", "pause", "resume", "resume"):
            await getattr(subject.engine, call)()
        return await subject.ask(tokens=3)

    assert subject.run(main()).finish_reason == "length"


@every_engine
def test_no_answer_builds_on_a_prefix_of_older_weights(subject):
    """T94, T140: also after an update in place, where the cache could not be flushed."""

    async def main():
        prompt = list(range(200, 240))
        await subject.ask(prompt, 2)
        warm = await subject.ask(prompt, 2)
        await subject.load(subject.models.other, "in_place")
        cold = await subject.greedy(prompt, 4)
        await subject.load(subject.models.base)
        return warm, cold

    warm, cold = subject.run(main())
    assert warm.cached_tokens > 0
    assert cold.cached_tokens == 0


@every_engine
def test_a_request_that_comes_in_the_pause_finds_no_prefix_of_older_weights(subject):
    """T95, T140: it was sent before the new weights came and is read after them."""

    async def main():
        prompt = list(range(240, 280))
        await subject.ask(prompt, 2)
        warm = await subject.ask(prompt, 2)
        before = asyncio.ensure_future(subject.ask([9, *prompt], 200))
        await subject.ask([7, 8, 9], 16)
        await subject.engine.pause("in_place")
        early = asyncio.ensure_future(subject.ask(prompt, 2))
        await asyncio.sleep(0.1)
        await subject.load(subject.models.other, "in_place")
        answers = await early, await before
        await subject.load(subject.models.base)
        return warm, *answers

    warm, early, before = subject.run(main())
    assert warm.cached_tokens > 0
    assert (early.cached_tokens, len(set(early.versions))) == (0, 1)
    assert len(before.output_ids) == 200


@every_engine
def test_flush_forgets_prefixes(subject):
    async def main():
        prompt = list(range(300, 340))
        await subject.ask(prompt, 2)
        warm = await subject.ask(prompt, 2)
        await subject.engine.flush_cache()
        return warm.cached_tokens, (await subject.ask(prompt, 2)).cached_tokens

    warm, cold = subject.run(main())
    assert (warm > 0, cold) == (True, 0)


@every_engine
def test_flush_is_refused_while_requests_hold_the_cache(subject):
    async def main():
        tasks = await subject.start_long(1)
        await subject.engine.pause("in_place")
        try:
            with pytest.raises(EngineRejected):
                await subject.engine.flush_cache()
        finally:
            await subject.engine.resume()
        return await tasks[0]

    assert subject.run(main()).finish_reason == "length"


@every_engine
@pytest.mark.parametrize("which", ["missing", "unknown", "misshapen", "nowhere"])
def test_weights_that_do_not_fit_are_refused_and_change_nothing(subject, which):
    """T145. Real SGLang would take the first two silently and die of the third."""
    folder = getattr(subject.models, which, subject.models.base.parent / "nowhere")

    async def main():
        before = await subject.greedy(tokens=16)
        with pytest.raises(EngineRejected):
            await subject.load(folder)
        return before, await subject.greedy(tokens=16)

    before, after = subject.run(main())
    assert before.output_ids == after.output_ids
    assert before.logprobs == pytest.approx(after.logprobs, abs=1e-6)
    assert before.versions == after.versions


@every_engine
def test_weights_come_from_memory_where_that_is_offered(subject):
    async def main():
        engine, bucket = subject.engine, (subject.models.other / "model.safetensors").read_bytes()
        version = next(subject.versions)
        await engine.pause()
        await engine.begin_weight_update()
        try:
            if not subject.takes_tensors:
                with pytest.raises(EngineRejected):
                    await engine.update_weights_from_tensor(bucket, version)
                return None
            await engine.update_weights_from_tensor(bucket, version)
        finally:
            await engine.end_weight_update()
            await engine.flush_cache()
            await engine.resume()
        from_memory = await subject.greedy(tokens=16)
        await subject.load(subject.models.other)
        from_disk = await subject.greedy(tokens=16)
        await subject.load(subject.models.base)
        return version, from_memory, from_disk

    result = subject.run(main())
    if subject.takes_tensors:
        version, from_memory, from_disk = result
        assert from_memory.versions == [version] * 16
        assert from_memory.output_ids == from_disk.output_ids
        assert from_memory.logprobs == pytest.approx(from_disk.logprobs, abs=1e-6)


@every_engine
@pytest.mark.parametrize("which", ["missing", "unknown", "misshapen"])
def test_tensors_that_do_not_fit_are_refused_and_change_nothing(subject, which):
    """T145, for the way that goes through memory."""
    if not subject.takes_tensors:
        return  # that it takes none at all is tested above

    async def main():
        engine = subject.engine
        bucket = (getattr(subject.models, which) / "model.safetensors").read_bytes()
        before = await subject.greedy(tokens=16)
        await engine.pause()
        await engine.begin_weight_update()
        with pytest.raises(EngineRejected):
            try:
                await engine.update_weights_from_tensor(bucket, next(subject.versions))
            finally:
                await engine.end_weight_update()
        await engine.resume()
        return before, await subject.greedy(tokens=16)

    before, after = subject.run(main())
    assert (before.output_ids, before.versions) == (after.output_ids, after.versions)


@every_engine
def test_the_engine_says_how_it_is_and_what_it_serves(subject):
    async def main():
        version = await subject.load(subject.models.base)
        engine = subject.engine
        return version, await engine.health(), await engine.model_info(), await engine.server_info()

    version, healthy, model, server = subject.run(main())
    assert healthy is True
    assert model["model_path"] == str(subject.models.base)
    assert model["weight_version"] == str(version)
    assert server


@every_engine
def test_an_unknown_sampling_key_is_refused_by_name(subject):
    if subject.url is None:
        return  # no wire, no unknown keys

    async def main():
        body = {"rid": "k", "input_ids": PROMPT, "sampling_params": {"temprature": 1}}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{subject.url}/generate", json=body) as response,
        ):
            return response.status, await response.text()

    status, text = subject.run(main())
    assert status == 400
    assert "temprature" in text


@every_engine
@pytest.mark.parametrize(("prompt", "tokens"), [(3000, 1), (2000, 100)])
def test_what_does_not_fit_the_context_is_refused_with_the_reason(subject, prompt, tokens):
    with pytest.raises(EngineRejected, match=r"context.*2048"):
        subject.run(subject.ask([5] * prompt, tokens))


@every_engine
@pytest.mark.parametrize("ids", [[512], [3, -1]])
def test_a_token_outside_the_vocabulary_is_refused_and_ends_no_engine(subject, ids):
    """Real SGLang dies of it, so the client refuses."""
    with pytest.raises(EngineRejected):
        subject.run(subject.ask(ids, 2))
    assert subject.run(subject.ask(tokens=2)).finish_reason == "length"


@every_model
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(
    subject, reference, temperature
):
    answer = subject.run(subject.ask(tokens=40, temperature=temperature))
    expected = expected_logprobs(reference[subject.models.base], answer, temperature=temperature)
    assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE[subject.kind])


@every_model
def test_logit_bias_counts_in_logprobs(subject, reference):
    bias = {17: 6.0, 18: 5.0}
    answer = subject.run(subject.ask(tokens=40, logit_bias=bias))
    assert set(answer.output_ids) & {17, 18}
    expected = expected_logprobs(reference[subject.models.base], answer, bias=bias.items())
    assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE[subject.kind])


@every_model
def test_greedy_takes_the_most_likely_token(subject, reference):
    answer = subject.run(subject.greedy(tokens=40))
    model = reference[subject.models.base]
    logits, _ = full_forward(model, [*PROMPT, *answer.output_ids])
    best = logits.argmax(-1)[len(PROMPT) - 1 : -1].tolist()
    assert answer.output_ids == best
    expected = expected_logprobs(model, answer)
    assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE[subject.kind])


@every_model
def test_routes_are_the_experts_that_the_model_chooses(subject, reference):
    answer = subject.run(subject.ask(tokens=40, routes=True))
    ids = [*PROMPT, *answer.output_ids]
    _, chosen = full_forward(reference[subject.models.base], ids)
    assert np.array_equal(answer.routes, chosen[:-1])


@every_model
def test_after_an_update_the_new_weights_answer(subject, reference):
    async def main():
        version = await subject.load(subject.models.other)
        answer = await subject.ask(tokens=24, routes=True)
        await subject.load(subject.models.base)
        return version, answer

    version, answer = subject.run(main())
    model = reference[subject.models.other]
    assert answer.versions == [version] * 24
    assert answer.logprobs == pytest.approx(
        expected_logprobs(model, answer), abs=TOLERANCE[subject.kind]
    )
    _, chosen = full_forward(model, [*PROMPT, *answer.output_ids])
    assert np.array_equal(answer.routes, chosen[:-1])


@every_model
def test_after_a_retraction_the_rest_is_sampled_as_if_the_cache_were_new(subject, reference):
    """The tail of an interrupted answer has the new weights' log-probs, prefix included."""

    async def main():
        tasks = await subject.start_long(1)
        version = await subject.load(subject.models.other, "retract")
        answer = await tasks[0]
        await subject.load(subject.models.base)
        return version, answer

    version, answer = subject.run(main())
    cut = answer.versions.index(version)
    assert 0 < cut < 300
    old, new = (
        expected_logprobs(reference[folder], answer, [100, *PROMPT])
        for folder in (subject.models.base, subject.models.other)
    )
    assert answer.logprobs == pytest.approx(old[:cut] + new[cut:], abs=TOLERANCE[subject.kind])
