"""What `/generate` accepts, and how it says no."""

import pytest

from relax_agent.engines.embedded.requests import Limits, parse_generate
from relax_agent.errors import EngineRejected

LIMITS = Limits(
    context_length=100, max_total_tokens=80, vocabulary=50, stop_token_ids=frozenset({2})
)


def parse(params=None, **body):
    full = {"input_ids": [1, 2, 3], "sampling_params": params or {}} | body
    return parse_generate(full, LIMITS, default_seed=7)


def test_defaults_are_those_of_sglang():
    job = parse({"max_new_tokens": 5})
    assert (job.sampling.temperature, job.sampling.seed) == (1.0, 7)
    assert job.sampling.stop_token_ids == {2}
    assert not job.return_logprob
    assert not job.return_routes
    assert job.rid


def test_stop_tokens_add_to_the_models_own_unless_it_is_ignored():
    params = {"max_new_tokens": 5, "stop_token_ids": [4]}
    assert parse(params).sampling.stop_token_ids == {2, 4}
    assert parse(params | {"ignore_eos": True}).sampling.stop_token_ids == {4}


def test_an_unknown_sampling_parameter_is_refused_by_name():
    with pytest.raises(EngineRejected, match="unknown field `tempreature`"):
        parse({"tempreature": 1.0})


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p", "presence_penalty", "stop", "regex"])
def test_what_would_not_happen_is_refused(key):
    with pytest.raises(EngineRejected, match=key):
        parse({key: 0.5 if key != "top_k" else 5})


def test_values_that_change_nothing_are_accepted():
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "n": 1}
    assert parse(neutral | {"max_new_tokens": 1}).sampling.temperature == 1.0


def test_too_long_a_prompt_is_refused_with_the_numbers():
    with pytest.raises(EngineRejected, match=r"The input \(100 tokens\).*\(100 tokens\)"):
        parse(input_ids=[1] * 100)
    with pytest.raises(EngineRejected, match=r"total of 101 tokens: 51 tokens .* and 50 tokens"):
        parse({"max_new_tokens": 50}, input_ids=[1] * 51)
    with pytest.raises(EngineRejected, match="max_total_tokens of 80"):
        parse({"max_new_tokens": 50}, input_ids=[1] * 40)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "empty"),
        ([1, 50], r"input_ids\[1\] is 50, but the vocabulary has 50"),
        ([1, -1], r"input_ids\[1\] is -1"),
        ([1, "2"], "list of integers"),
        ([[1]], "list of integers"),
        ([True], "list of integers"),
        ("text", "list of integers"),
        (None, "list of integers"),
    ],
)
def test_bad_token_ids_are_refused(ids, words):
    with pytest.raises(EngineRejected, match=words):
        parse(input_ids=ids)


@pytest.mark.parametrize(
    "body",
    [
        {"stream": True},
        {"text": "hello"},
        {"image_data": "x"},
        {"rid": ["a"]},
        {"rid": ""},
        {"logprob_start_len": 3},
        {"top_logprobs_num": 5},
        {"routed_experts_start_len": -1},
        {"sampling_params": [1]},
        {"sampling_params": {"temperature": -1}},
        {"sampling_params": {"temperature": float("nan")}},
        {"sampling_params": {"max_new_tokens": 1.5}},
        {"sampling_params": {"logit_bias": {"x": 1}}},
        {"sampling_params": {"logit_bias": {"77": 1}}},
        {"sampling_params": {"logit_bias": {"7": float("inf")}}},
    ],
)
def test_malformed_requests_are_refused(body):
    with pytest.raises(EngineRejected):
        parse(**body)


def test_unknown_keys_beside_sampling_params_are_ignored_as_in_sglang():
    assert parse({"max_new_tokens": 1}, no_logs=True).rid
