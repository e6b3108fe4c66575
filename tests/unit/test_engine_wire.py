"""The JSON of `/generate`, read and written."""

from __future__ import annotations

import numpy as np
import pytest

from relax_agent.engines import GenerateRequest, SamplingParams
from relax_agent.engines.wire import (
    RouteShape,
    decode_result,
    decode_routes,
    encode_request,
    encode_routes,
    version_spans,
    wire_rid,
)
from relax_agent.errors import ConfigError, EngineError, MissingLogprobs

REQUEST = GenerateRequest([1, 2, 3], SamplingParams(4), "r")
SHAPE = RouteShape(layers=2, top_k=2, experts=300)


def body(**meta):
    known = {
        "finish_reason": {"type": "length", "length": 2},
        "output_token_logprobs": [[-0.5, 880, None], [-0.7, 9, None]],
        "weight_version": "3",
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
    }
    return {"output_ids": [880, 9], "meta_info": known | meta}


def decode(request=REQUEST, shape=None, **meta):
    return decode_result(body(**meta), request, shape, "engine")


def test_a_plain_answer_is_read():
    answer = decode(cached_tokens=2)
    assert answer.output_ids == [880, 9]
    assert answer.logprobs == [-0.5, -0.7]
    assert answer.versions == [3, 3]
    assert (answer.finish_reason, answer.prompt_tokens, answer.cached_tokens) == ("length", 3, 2)


def test_the_sampled_token_counts_not_the_first_of_a_top_k_dictionary():
    """T91"""
    ranked = [{"512": -0.10, "880": -2.30}, {"9": -0.7}]
    assert decode(output_token_logprobs=ranked).logprobs == [-2.30, -0.7]


@pytest.mark.parametrize(
    "entries",
    [
        None,
        [],
        [[-0.5, 880, None]],
        [[-0.5, 512, None], [-0.7, 9, None]],
        [[None, 880, None], [-0.7, 9, None]],
        [[float("nan"), 880, None], [-0.7, 9, None]],
        [{"512": -0.1}, {"9": -0.7}],
    ],
)
def test_a_token_without_its_own_logprob_is_an_error(entries):
    """T92, T91"""
    with pytest.raises(MissingLogprobs):
        decode(output_token_logprobs=entries)


def test_an_empty_answer_needs_no_logprobs():
    meta = body(finish_reason={"type": "abort"}, output_token_logprobs=None, weight_versions=[])
    answer = decode_result({**meta, "output_ids": []}, REQUEST, None, "engine")
    assert (answer.output_ids, answer.finish_reason) == ([], "abort")


def test_versions_follow_the_spans_and_fall_back_to_the_final_one():
    spans = [
        {"version": "default", "start": 0, "end": 1},
        {"version": "7", "start": 1, "end": 2},
    ]
    assert decode(weight_versions=spans).versions == [0, 7]
    assert decode(weight_versions=None, weight_version="5").versions == [5, 5]


@pytest.mark.parametrize(
    "meta",
    [
        {"weight_versions": [{"version": "1", "start": 0, "end": 1}]},
        {"weight_versions": [{"version": "1", "start": 1, "end": 2}]},
        {"weight_versions": [{"version": "v1", "start": 0, "end": 2}]},
        {"finish_reason": None},
        {"finish_reason": {"type": "tired"}},
        {"output_token_logprobs": [880, 9]},
    ],
)
def test_what_does_not_fit_together_is_an_engine_error(meta):
    with pytest.raises(EngineError):
        decode(**meta)


def test_version_spans_are_what_the_decoder_reads():
    versions = [0, 0, 2, 2, 2, 3]
    spans = version_spans(versions)
    assert [span["end"] - span["start"] for span in spans] == [2, 3, 1]
    entries = [[-1.0, 5, None]] * 6
    meta = {"weight_versions": spans, "output_token_logprobs": entries}
    message = {"output_ids": [5] * 6, "meta_info": body(**meta)["meta_info"]}
    assert decode_result(message, REQUEST, None, "engine").versions == versions


@pytest.mark.parametrize(("experts", "dtype"), [(8, np.uint8), (256, np.uint8), (300, np.uint16)])
def test_routes_survive_the_wire_in_the_smallest_type(experts, dtype):
    """T103"""
    shape = RouteShape(2, 2, experts)
    routes = np.arange(16).reshape(4, 2, 2) % experts
    routes[0, 0, 0] = experts - 1
    decoded = decode_routes(encode_routes(routes.astype(dtype)), shape)
    assert decoded.dtype == dtype
    assert np.array_equal(decoded, routes)


@pytest.mark.parametrize("text", ["?", "AAA=", encode_routes(np.array([1, 2, 3]))])
def test_damaged_routes_are_an_error(text):
    with pytest.raises(EngineError):
        decode_routes(text, SHAPE)


@pytest.mark.parametrize("value", [-1, 300])
def test_expert_ids_outside_the_model_are_an_error(value):
    with pytest.raises(EngineError, match="300 experts"):
        decode_routes(encode_routes(np.array([0, 0, 0, value])), SHAPE)


def test_routes_must_cover_the_asked_positions():
    """T97: 3 + 2 - 1 positions, of which the first is known."""
    request = GenerateRequest([1, 2, 3], SamplingParams(4), "r", True, 1)
    good = encode_routes(np.ones((3, 2, 2)))
    assert decode(request, SHAPE, routed_experts=good).routes.shape == (3, 2, 2)
    with pytest.raises(EngineError, match="2 positions instead of 3"):
        decode(request, SHAPE, routed_experts=encode_routes(np.ones((2, 2, 2))))


def test_routes_that_were_asked_for_and_do_not_come_are_an_error():
    request = GenerateRequest([1, 2, 3], SamplingParams(4), "r", True)
    with pytest.raises(EngineError, match="enable-return-routed-experts"):
        decode(request, SHAPE)


def test_an_aborted_answer_may_have_fewer_routes_or_none():
    request = GenerateRequest([1, 2, 3], SamplingParams(4), "r", True)
    aborted = {"finish_reason": {"type": "abort"}}
    assert decode(request, SHAPE, **aborted).routes is None
    short = encode_routes(np.ones((3, 2, 2)))
    assert decode(request, SHAPE, routed_experts=short, **aborted).routes.shape == (3, 2, 2)


def test_a_request_says_only_what_was_asked():
    payload = encode_request(REQUEST)
    assert payload["sampling_params"] == {"max_new_tokens": 4, "temperature": 1.0}
    assert payload["return_logprob"] is True
    assert "return_routed_experts" not in payload
    assert "extra_key" not in payload
    params = SamplingParams(4, 0.5, [7], seed=3, logit_bias={5: 1.5})
    payload = encode_request(GenerateRequest([1], params, "r", True, 9), "v2")
    assert payload["sampling_params"]["stop_token_ids"] == [7]
    assert payload["sampling_params"]["sampling_seed"] == 3
    assert payload["sampling_params"]["logit_bias"] == {"5": 1.5}
    assert (payload["routed_experts_start_len"], payload["extra_key"]) == (9, "v2")


def test_no_id_on_the_wire_is_the_start_of_another():
    """T148, for aborts: SGLang matches them by prefix."""
    assert not wire_rid("x12").startswith(wire_rid("x1"))


def test_stop_tokens_and_ignoring_them_contradict_each_other():
    with pytest.raises(ConfigError):
        SamplingParams(4, stop_token_ids=[2], ignore_eos=True)
