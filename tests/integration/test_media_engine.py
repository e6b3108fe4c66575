"""Media through the embedded engine: what it answers is what a full forward would say."""

import asyncio
import base64

import aiohttp
import pytest
from media_support import (
    KINDS,
    FullForward,
    film_with_sound,
    media_of,
    picture,
    processor,
    prompt_of,
    tiny,
)

from relax_agent.engines.client import EngineClient
from relax_agent.engines.protocol import GenerateRequest, SamplingParams
from relax_agent.errors import EngineRejected

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def reference(kind):
    return FullForward(kind)


class Served:
    """One engine inside this process, spoken to over HTTP like any other."""

    def __init__(self, kind):
        from relax_agent.engines.embedded.__main__ import build_server
        from relax_agent.engines.embedded.settings import EmbeddedSettings

        settings = EmbeddedSettings(model_path=tiny(kind), random_seed=0)
        self.server = build_server(settings)
        self.counters = self.server.scheduler.batch.counters

    def run(self, scenario):
        from aiohttp.test_utils import TestServer

        async def main():
            async with TestServer(self.server.app()) as http:
                client = EngineClient(str(http.make_url("")))
                try:
                    async with asyncio.timeout(60):
                        return await scenario(client)
                finally:
                    await client.close()

        return asyncio.run(main())

    def post(self, body):
        """Send a body as it is; return status and answer."""

        async def scenario(client):
            async with (
                aiohttp.ClientSession() as session,
                session.post(client.url + "/generate", json=body) as answer,
            ):
                return answer.status, await answer.json()

        return self.run(scenario)

    def ask(self, *requests):
        """Ask all at once; return the answers."""

        async def scenario(client):
            return await asyncio.gather(*(client.generate(each) for each in requests))

        return self.run(scenario)


@pytest.fixture(scope="module")
def served(kind):
    served = Served(kind)
    yield served
    served.server.scheduler.stop()


def request(ids, media=(), rid="r", count=6, bias=None):
    sampling = SamplingParams(count, seed=3, logit_bias=bias or {}, ignore_eos=True)
    return GenerateRequest(ids, sampling, rid, media=media)


def check(answer, reference, ids, media):
    whole = [*ids, *answer.output_ids]
    expected = reference.logprobs(whole, media, len(ids))
    assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_log_probs_are_those_of_a_full_forward_in_every_turn(kind, served, reference):
    """T67: a medium in a later turn leaves what came before in place, positions included."""
    history, seen = [5, 6, 7], []
    for number, medium in enumerate([*media_of(kind), media_of(kind)[0]]):
        known = len(history)
        added = processor(kind).layout(medium).ids
        history, seen = [*history, *added, 9, 11 + number], [*seen, medium]
        (answer,) = served.ask(request(history, seen, f"turn{number}"))
        check(answer, reference, history, seen)
        if number:
            assert answer.cached_tokens >= known - 1
        history = [*history, *answer.output_ids]


def test_requests_with_and_without_media_share_a_batch(kind, served, reference):
    """T76, T77: a text beside media, and no media told by an empty list."""
    asked = [
        prompt_of(kind, [5, 6], medium, [7 + at]) for at, medium in enumerate(media_of(kind, 1))
    ]
    asked += [([5, 6, 7, 8], []), prompt_of(kind, [8], *media_of(kind, 2), [9])]
    answers = served.ask(
        *(request(ids, media, f"b{at}", count=4 + at) for at, (ids, media) in enumerate(asked))
    )
    for answer, (ids, media) in zip(answers, asked, strict=True):
        check(answer, reference, ids, media)


def test_equal_ids_with_another_picture_share_no_cache(kind, served, reference):
    ids, one = prompt_of(kind, [5, 6, 7], picture(21), [8, 9])
    same, other = prompt_of(kind, [5, 6, 7], picture(22), [8, 9])
    assert ids == same
    first, second, third = (
        served.ask(request(ids, media, f"c{at}"))[0] for at, media in enumerate((one, other, one))
    )
    assert second.cached_tokens <= 4 < third.cached_tokens
    assert first.logprobs == pytest.approx(third.logprobs, abs=TOLERANCE)
    check(second, reference, ids, other)


def test_a_placeholder_is_never_sampled(kind, served, reference):
    """T70: the policy is driven towards placeholders by all force, and still writes none."""
    pads = processor(kind).suppressed_ids
    ids, media = prompt_of(kind, [5, 6], picture(3), [7])
    (answer,) = served.ask(request(ids, media, "pads", 12, bias=dict.fromkeys(pads, 100.0)))
    assert not set(answer.output_ids) & set(pads)
    check(answer, reference, ids, media)


def test_placeholders_that_do_not_fit_are_refused_with_a_reason(kind, served):
    """T65: tokens and features that differ in number never meet in a forward."""
    ids, media = prompt_of(kind, [5], picture(4), [6])
    pad = processor(kind).placeholder_ids["image"]
    cut = [token for at, token in enumerate(ids) if token != pad or at != ids.index(pad)]
    cases = [
        (cut, media, "takes"),
        (ids, [], "0 came with the prompt"),
        ([5, 6, 7], media, "without placeholders"),
        (ids, [picture(4, 128, 128)], "differs"),
        (ids, [type(media[0])(b"no picture")], "not an image"),
    ]
    for wrong, with_media, words in cases:
        with pytest.raises(EngineRejected, match=words):
            served.ask(request(wrong, with_media))


def test_media_are_read_from_the_request_and_from_nowhere_else(kind, served):
    for item in ("http://localhost/a.png", "file:///etc/hosts", "/etc/hosts", {"url": "a"}, "!"):
        body = {"input_ids": [5], "image_data": [item]}

        status, said = served.post(body)
        assert status == 400 and "base64" in said["error"]["message"]


def test_bare_base64_is_read_as_sglang_reads_it(kind, served, reference):
    ids, media = prompt_of(kind, [5], picture(6), [6])
    body = {
        "input_ids": ids,
        "image_data": base64.b64encode(media[0].data).decode(),
        "sampling_params": {"max_new_tokens": 2},
        "return_logprob": True,
    }

    _, said = served.post(body)
    found = [entry[0] for entry in said["meta_info"]["output_token_logprobs"]]
    expected = reference.logprobs([*ids, *said["output_ids"]], media, len(ids))
    assert found == pytest.approx(expected, abs=TOLERANCE)


def test_a_model_of_text_says_that_it_takes_no_media(tmp_path):
    from embedded_support import dense_config, save_model

    from relax_agent.engines.embedded.__main__ import build_server
    from relax_agent.engines.embedded.settings import EmbeddedSettings

    served = Served.__new__(Served)
    folder = save_model(tmp_path, dense_config())
    served.server = build_server(EmbeddedSettings(model_path=folder, random_seed=0))
    try:
        with pytest.raises(EngineRejected, match="takes no image"):
            served.ask(request([5, 6], [picture()]))
    finally:
        served.server.scheduler.stop()


def test_sound_in_a_film_is_heard(served, kind, reference):
    """T85: a film brings its sound to models that hear; to the others it is a silent film."""
    film_ids, media = prompt_of(kind, [5, 6], film_with_sound(), [7])
    pads = processor(kind).placeholder_ids
    heard = sum(token == pads.get("audio") for token in film_ids)
    assert (heard > 0) == (kind == "qwen3_omni")
    features = processor(kind).features(media)
    assert ("input_features" in features) == ("audio" in pads)
    (answer,) = served.ask(request(film_ids, media))
    assert len(answer.output_ids) == 6
