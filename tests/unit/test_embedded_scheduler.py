"""Continuous batching, pauses and weight updates, seen from the scheduler's interface."""

import threading
from concurrent.futures import wait

import numpy as np
import pytest
import torch
from embedded_support import (
    EOS,
    Reference,
    dense_config,
    job,
    make_scheduler,
    moe_config,
    prompt,
    save_model,
)
from safetensors.torch import load_file, save

from relax_agent.errors import EngineError, EngineRejected

WAIT_S = 60


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("moe")
    return [save_model(root / str(seed), moe_config(), seed) for seed in range(3)]


@pytest.fixture(scope="module")
def references(folders):
    return [Reference(folder) for folder in folders]


@pytest.fixture
def scheduler(folders):
    scheduler = make_scheduler(folders[0])
    scheduler.start()
    yield scheduler
    scheduler.stop()


def run(scheduler, *jobs):
    sequences = [scheduler.submit(one) for one in jobs]
    return [sequence.done.result(WAIT_S) for sequence in sequences]


def held(scheduler):
    return len(scheduler.batch.running), len(scheduler.batch.waiting)


def check_logprobs(outcome, reference, temperature=1.0, bias=None):
    ids = outcome.job.input_ids + outcome.output_ids
    expected = reference.logprobs(ids, len(outcome.job.input_ids), temperature, bias)
    assert outcome.logprobs == pytest.approx(expected, abs=1e-5)


class StopAfter:
    """Pauses a scheduler from within its own thread, after a number of forwards."""

    def __init__(self, scheduler, steps, mode):
        self.scheduler, self.left, self.mode = scheduler, steps, mode
        self._step, scheduler.batch.step = scheduler.batch.step, self

    def __call__(self, **options):
        self._step(**options)
        self.left -= 1
        if not self.left:
            self.scheduler._pause(self.mode)
            self.scheduler.batch.step = self._step


def paused_after(scheduler, steps, mode, *jobs):
    """Submit jobs, let some forwards happen, and wait until the pause is in force."""
    StopAfter(scheduler, steps, mode)
    sequences = [scheduler.submit(one) for one in jobs]
    while not scheduler.paused:
        scheduler.call(lambda: None).result(WAIT_S)
    return sequences


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def update(scheduler, folder, version, parts=3):
    tensors = list(tensors_of(folder).items())
    scheduler.begin_update().result(WAIT_S)
    for part in range(parts):
        scheduler.add_bucket(save(dict(tensors[part::parts])), version).result(WAIT_S)
    scheduler.end_update().result(WAIT_S)


# Exactness.


def test_logprobs_and_routes_of_concurrent_mixed_requests_are_those_of_transformers(
    scheduler, references
):
    jobs = [
        job(scheduler, prompt(n, n), seed=n, max_new_tokens=5 + n % 17, return_routed_experts=True)
        for n in (1, 2, 5, 16, 33, 34, 90, 300)
    ]
    for outcome in run(scheduler, *jobs):
        check_logprobs(outcome, references[0])
        ids = outcome.job.input_ids + outcome.output_ids
        assert np.array_equal(outcome.routes, references[0].routes(ids[:-1]))


def test_temperature_and_bias_are_in_the_logprobs(scheduler, references):
    bias = {"7": 3.0, "9": -2.0}
    (outcome,) = run(
        scheduler, job(scheduler, prompt(12), temperature=0.6, logit_bias=bias, max_new_tokens=20)
    )
    check_logprobs(outcome, references[0], 0.6, {7: 3.0, 9: -2.0})


def test_greedy_is_greedy_for_every_row(scheduler, references):
    prompts = [prompt(n, 3) for n in (3, 11, 40)]
    outcomes = run(
        scheduler, *(job(scheduler, p, temperature=0, max_new_tokens=15) for p in prompts)
    )
    for p, outcome in zip(prompts, outcomes, strict=True):
        assert outcome.output_ids == references[0].greedy(p, 15)
        check_logprobs(outcome, references[0])


def test_prompt_logprobs_are_those_of_a_full_forward(scheduler, references):
    ids = prompt(50)
    run(scheduler, job(scheduler, ids))  # so that a cached prefix could get in the way
    (outcome,) = run(scheduler, job(scheduler, ids, logprob_start_len=0))
    assert outcome.prompt_logprobs == pytest.approx(references[0].logprobs(ids, 1), abs=1e-5)
    entries = outcome.to_json()["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == ids
    assert entries[0][0] is None


def test_a_seed_gives_the_same_tokens_alone_and_in_company(scheduler):
    ids = prompt(20)
    (alone,) = run(scheduler, job(scheduler, ids, seed=5, max_new_tokens=30))
    others = [job(scheduler, prompt(n), seed=n, max_new_tokens=n) for n in range(1, 25)]
    together = run(scheduler, *others[:12], job(scheduler, ids, seed=5, max_new_tokens=30), *others)
    assert together[12].output_ids == alone.output_ids
    different = run(scheduler, job(scheduler, ids, seed=6, max_new_tokens=30))[0]
    assert different.output_ids != alone.output_ids


def test_a_stop_token_ends_the_answer_and_stays_in_it(scheduler):
    want = {str(token): 1e4 for token in (EOS,)}
    (outcome,) = run(scheduler, job(scheduler, prompt(4), logit_bias=want))
    assert outcome.output_ids == [EOS]
    assert outcome.finish_reason == {"type": "stop", "matched": EOS}
    (outcome,) = run(
        scheduler, job(scheduler, prompt(4), logit_bias=want, ignore_eos=True, max_new_tokens=3)
    )
    assert outcome.output_ids == [EOS] * 3
    assert outcome.finish_reason == {"type": "length", "length": 3}


def test_zero_new_tokens_only_read_the_prompt(scheduler):
    (outcome,) = run(scheduler, job(scheduler, prompt(4), max_new_tokens=0))
    assert (outcome.output_ids, outcome.finish_reason["type"]) == ([], "length")


# The prefix cache.


def test_group_members_share_the_prompt_and_the_second_turn_continues_the_first(
    scheduler, references
):
    ids = prompt(60)
    group = run(
        scheduler,
        *(job(scheduler, ids, seed=s, max_new_tokens=10, return_routed_experts=True)
          for s in range(6)),
    )  # fmt: skip
    assert sorted(outcome.cached_tokens for outcome in group) == [0, *[59] * 5]
    second = [o.job.input_ids + o.output_ids + prompt(7, s) for s, o in enumerate(group)]
    again = run(
        scheduler,
        *(job(scheduler, ids, seed=9, max_new_tokens=6, return_routed_experts=True)
          for ids in second),
    )  # fmt: skip
    for first, outcome in zip(group, again, strict=True):
        assert outcome.cached_tokens == 60 + len(first.output_ids) - 1
        check_logprobs(outcome, references[0])
        all_ids = outcome.job.input_ids + outcome.output_ids
        assert np.array_equal(outcome.routes, references[0].routes(all_ids[:-1]))


def test_routes_begin_where_they_are_asked_to(scheduler, references):
    ids = prompt(30)
    (outcome,) = run(
        scheduler,
        job(scheduler, ids, return_routed_experts=True, routed_experts_start_len=25),
    )
    full = references[0].routes((ids + outcome.output_ids)[:-1])
    assert np.array_equal(outcome.routes, full[25:])


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_no_hit_on_a_prefix_that_older_weights_computed(scheduler, folders, references, mode):
    """T94, T140."""
    ids = prompt(40)
    waiting = paused_after(scheduler, 5, mode, job(scheduler, ids, max_new_tokens=20))
    update(scheduler, folders[1], "1")
    scheduler.resume().result(WAIT_S)
    waiting[0].done.result(WAIT_S)
    (outcome,) = run(scheduler, job(scheduler, [*ids[:30], *prompt(5, 8)]))
    assert outcome.cached_tokens == (30 if mode == "retract" else 0)
    check_logprobs(outcome, references[1])


def test_weights_under_an_old_name_still_empty_the_cache(scheduler, folders, references):
    ids = prompt(40)
    run(scheduler, job(scheduler, ids))
    scheduler.load_folder(folders[2], "0").result(WAIT_S)
    (outcome,) = run(scheduler, job(scheduler, ids))
    assert outcome.cached_tokens == 0
    check_logprobs(outcome, references[2])


def test_a_full_cache_and_a_small_one_still_answer_right(folders, references):
    scheduler = make_scheduler(folders[0], cache_tokens=50)
    scheduler.start()
    prompts = [prompt(n % 45 + 1, n) for n in range(40)]
    for outcome in run(scheduler, *(job(scheduler, p, max_new_tokens=9) for p in prompts)):
        check_logprobs(outcome, references[0])
    assert len(scheduler.batch.tree) <= 50
    scheduler.stop()


# Pausing and new weights.


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_request_lives_through_an_update_with_the_right_logprobs_on_both_sides(
    scheduler, folders, references, mode
):
    jobs = [
        job(scheduler, prompt(n, 1), seed=n, max_new_tokens=24, ignore_eos=True,
            return_routed_experts=True)
        for n in (10, 21, 35)
    ]  # fmt: skip
    waiting = paused_after(scheduler, 9, mode, *jobs)
    update(scheduler, folders[1], "1")
    assert not any(sequence.done.done() for sequence in waiting)
    scheduler.resume().result(WAIT_S)
    for sequence in waiting:
        outcome = sequence.done.result(WAIT_S)
        (old, start, middle), (new, again, end) = outcome.spans
        assert (old, new, start, end) == ("0", "1", 0, 24)
        assert middle == again
        assert outcome.retractions == (mode == "retract")
        before, after = (
            reference.logprobs(
                outcome.job.input_ids + outcome.output_ids, len(outcome.job.input_ids)
            )
            for reference in references[:2]
        )
        assert outcome.logprobs[:middle] == pytest.approx(before[:middle], abs=1e-5)
        if mode == "retract":  # all keys are those of the new weights
            assert outcome.logprobs[middle:] == pytest.approx(after[middle:], abs=1e-5)
        else:  # the first new token's input went through the new weights over old keys
            assert outcome.logprobs[middle:] != pytest.approx(before[middle:], abs=1e-3)
        ids = (outcome.job.input_ids + outcome.output_ids)[:-1]
        read = len(outcome.job.input_ids) + middle - 1
        assert np.array_equal(outcome.routes[:read], references[0].routes(ids)[:read])
        if mode == "retract":
            assert np.array_equal(outcome.routes[read:], references[1].routes(ids)[read:])


def test_in_place_without_new_weights_changes_nothing(scheduler, references):
    ids = prompt(15)
    (plain,) = run(scheduler, job(scheduler, ids, max_new_tokens=20, ignore_eos=True))
    for mode in ("in_place", "retract"):
        (sequence,) = paused_after(
            scheduler, 6, mode, job(scheduler, ids, max_new_tokens=20, ignore_eos=True)
        )
        scheduler.resume().result(WAIT_S)
        outcome = sequence.done.result(WAIT_S)
        assert outcome.output_ids == plain.output_ids  # T136: no token lost, none twice
        assert outcome.spans == [("0", 0, 20)]
        check_logprobs(outcome, references[0])


def test_abort_returns_what_there_is(scheduler, references):
    jobs = [job(scheduler, prompt(9), seed=s, rid=f"r{s}", max_new_tokens=200, ignore_eos=True,
                return_routed_experts=True) for s in (1, 10)]  # fmt: skip
    sequences = paused_after(scheduler, 8, "in_place", *jobs)
    assert scheduler.abort("r1").result(WAIT_S) == 1  # T148: exactly r1, not r10
    outcome = sequences[0].done.result(WAIT_S)
    assert not sequences[1].done.done()
    assert outcome.finish_reason["type"] == "abort"
    assert 6 <= len(outcome.output_ids) <= 8
    check_logprobs(outcome, references[0])
    assert len(outcome.routes) == 9 + len(outcome.output_ids) - 1
    assert scheduler.abort(None).result(WAIT_S) == 1
    assert scheduler.abort("nobody").result(WAIT_S) == 0
    assert sequences[1].done.result(WAIT_S).finish_reason["type"] == "abort"


def test_a_retracted_request_that_is_aborted_keeps_its_routes(scheduler, references):
    """A request that waits for its second reading still knows the routes of the first."""
    (sequence,) = paused_after(
        scheduler, 8, "retract",
        job(scheduler, prompt(9), max_new_tokens=200, ignore_eos=True, return_routed_experts=True),
    )  # fmt: skip
    scheduler.abort(None).result(WAIT_S)
    outcome = sequence.done.result(WAIT_S)
    ids = outcome.job.input_ids + outcome.output_ids
    assert np.array_equal(outcome.routes, references[0].routes(ids[:-1]))


def test_pause_abort_ends_all_and_later_requests_wait(scheduler):
    jobs = [job(scheduler, prompt(9), seed=s, max_new_tokens=200) for s in range(3)]
    sequences = paused_after(scheduler, 4, "abort", *jobs)
    assert {s.done.result(WAIT_S).finish_reason["type"] for s in sequences} == {"abort"}
    late = scheduler.submit(job(scheduler, prompt(5)))
    scheduler.call(lambda: None).result(WAIT_S)
    assert not late.done.done()
    assert held(scheduler) == (0, 1)
    scheduler.resume().result(WAIT_S)
    assert late.done.result(WAIT_S).finish_reason["type"] in ("length", "stop")


def test_a_new_version_number_aborts_nothing(scheduler):
    """T139: pause, flush, version: none of them ends a request."""
    jobs = [job(scheduler, prompt(9), seed=s, max_new_tokens=30, ignore_eos=True) for s in range(4)]
    sequences = paused_after(scheduler, 5, "retract", *jobs)
    assert scheduler.flush_cache().result(WAIT_S)
    scheduler.set_version("5").result(WAIT_S)
    scheduler.resume().result(WAIT_S)
    outcomes = [sequence.done.result(WAIT_S) for sequence in sequences]
    assert {outcome.finish_reason["type"] for outcome in outcomes} == {"length"}
    assert [span[0] for span in outcomes[0].spans] == ["0", "5"]
    assert scheduler.batch.counters["aborted"] == 0


def test_flushing_is_refused_while_rows_are_held(scheduler):
    (sequence,) = paused_after(scheduler, 4, "in_place", job(scheduler, prompt(9)))
    assert not scheduler.flush_cache().result(WAIT_S)
    scheduler.resume().result(WAIT_S)
    sequence.done.result(WAIT_S)
    assert scheduler.flush_cache().result(WAIT_S)
    assert len(scheduler.batch.tree) == 0


def test_without_a_pause_new_weights_wait_for_running_requests(scheduler, folders, references):
    long = scheduler.submit(job(scheduler, prompt(9), max_new_tokens=200, ignore_eos=True))
    while not scheduler.batch.running:
        scheduler.call(lambda: None).result(WAIT_S)
    done = scheduler.load_folder(folders[1], "1")
    late = scheduler.submit(job(scheduler, prompt(9), max_new_tokens=5))
    wait([done], WAIT_S)
    assert done.exception() is None
    outcome = long.done.result(0)
    assert outcome.spans == [("0", 0, 200)]
    check_logprobs(outcome, references[0])
    assert late.done.result(WAIT_S).version == "1"
    check_logprobs(late.done.result(0), references[1])


# Weights that do not fit.


def broken(folder, kind):
    tensors = tensors_of(folder)
    name = "model.layers.0.mlp.experts.3.gate_proj.weight"
    if kind == "missing":
        del tensors[name]
    elif kind == "shape":
        tensors[name] = tensors[name][:5].clone()
    elif kind == "unknown":
        tensors["model.layers.9.extra.weight"] = torch.zeros(2)
    elif kind == "integer":
        tensors[name] = torch.zeros_like(tensors[name], dtype=torch.int64)
    return tensors


@pytest.mark.parametrize("kind", ["missing", "shape", "unknown", "integer"])
def test_weights_that_do_not_fit_are_named_and_the_old_ones_stay(
    scheduler, folders, references, kind
):
    """T145."""
    scheduler.begin_update().result(WAIT_S)
    tensors = broken(folders[1], kind)
    bad = "extra" if kind == "unknown" else r"experts\.3\.gate_proj"
    with pytest.raises(EngineRejected, match=bad):
        scheduler.add_bucket(save(tensors), "1").result(WAIT_S)
        scheduler.end_update().result(WAIT_S)
    (outcome,) = run(scheduler, job(scheduler, prompt(20)))
    assert outcome.version == "0"
    check_logprobs(outcome, references[0])


def test_a_tensor_given_twice_is_refused(scheduler, folders):
    scheduler.begin_update().result(WAIT_S)
    bucket = save({"model.norm.weight": tensors_of(folders[0])["model.norm.weight"]})
    scheduler.add_bucket(bucket, "1").result(WAIT_S)
    with pytest.raises(EngineRejected, match=r"given twice: model\.norm\.weight"):
        scheduler.add_bucket(bucket, "1").result(WAIT_S)


def test_sessions_are_opened_once_and_closed_once(scheduler, folders):
    with pytest.raises(EngineRejected, match="must run between"):
        scheduler.add_bucket(b"", "1").result(WAIT_S)
    with pytest.raises(EngineRejected, match="no weight-update session"):
        scheduler.end_update().result(WAIT_S)
    scheduler.begin_update().result(WAIT_S)
    with pytest.raises(EngineRejected, match="already open"):
        scheduler.begin_update().result(WAIT_S)
    with pytest.raises(EngineRejected, match="not a safetensors file"):
        scheduler.add_bucket(b"nonsense", "1").result(WAIT_S)
    with pytest.raises(EngineRejected, match="missing"):
        scheduler.end_update().result(WAIT_S)
    update(scheduler, folders[1], "1")  # a failed session is over
    assert scheduler.version == "1"


def test_a_folder_without_weights_is_refused(scheduler, tmp_path):
    with pytest.raises(EngineRejected, match="no safetensors file"):
        scheduler.load_folder(tmp_path, "1").result(WAIT_S)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(EngineRejected, match=r"cannot read .*model\.safetensors"):
        scheduler.load_folder(tmp_path, "1").result(WAIT_S)


def test_a_tied_head_may_be_left_out_or_repeated_but_not_differ(tmp_path):
    folders = [
        save_model(tmp_path / str(s), dense_config(tie_word_embeddings=True), s) for s in (0, 1)
    ]
    scheduler, reference = make_scheduler(folders[0]), Reference(folders[1])
    scheduler.start()
    tensors = tensors_of(folders[1])
    assert "lm_head.weight" not in tensors
    update(scheduler, folders[1], "1")
    check_logprobs(run(scheduler, job(scheduler, prompt(8)))[0], reference)
    head = tensors["model.embed_tokens.weight"]
    scheduler.begin_update().result(WAIT_S)
    scheduler.add_bucket(save(tensors | {"lm_head.weight": head.clone()}), "2").result(WAIT_S)
    scheduler.end_update().result(WAIT_S)
    check_logprobs(run(scheduler, job(scheduler, prompt(8)))[0], reference)
    scheduler.begin_update().result(WAIT_S)
    scheduler.add_bucket(save(tensors | {"lm_head.weight": head + 1}), "3").result(WAIT_S)
    with pytest.raises(EngineRejected, match=r"differ from it: lm_head\.weight"):
        scheduler.end_update().result(WAIT_S)
    scheduler.stop()


# Trouble.


def test_nan_weights_fail_requests_and_leave_no_trace(scheduler, folders, references):
    tensors = tensors_of(folders[1])
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], torch.nan)
    tensors["model.layers.0.self_attn.v_proj.weight"].fill_(torch.nan)
    scheduler.begin_update().result(WAIT_S)
    scheduler.add_bucket(save(tensors), "1").result(WAIT_S)
    scheduler.end_update().result(WAIT_S)
    failed = [scheduler.submit(job(scheduler, prompt(n))) for n in (5, 50, 70)]
    for sequence in failed:
        with pytest.raises(EngineError, match="NaN"):
            sequence.done.result(WAIT_S)
    scheduler.load_folder(folders[2], "2").result(WAIT_S)
    for outcome in run(scheduler, *(job(scheduler, prompt(n)) for n in (3, 5, 40, 50))):
        check_logprobs(outcome, references[2])


def test_an_error_in_a_forward_fails_its_requests_and_the_engine_goes_on(scheduler, references):
    forward = scheduler.batch.runner.forward

    def fail(*args):
        scheduler.batch.runner.forward = forward
        raise RuntimeError("out of luck")

    scheduler.batch.runner.forward = fail
    with pytest.raises(EngineError, match="out of luck"):
        run(scheduler, job(scheduler, prompt(5)))
    check_logprobs(run(scheduler, job(scheduler, prompt(5)))[0], references[0])


def test_a_dead_scheduler_fails_what_is_open_and_says_so(folders, monkeypatch):
    died = []
    scheduler = make_scheduler(folders[0], on_death=lambda: died.append(True))
    scheduler._run_drained = lambda: 1 / 0
    sequence = scheduler.submit(job(scheduler, prompt(5)))
    raised = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_type))
    scheduler.start()
    with pytest.raises(EngineError, match="died"):
        sequence.done.result(WAIT_S)
    scheduler._thread.join(WAIT_S)
    assert raised == [ZeroDivisionError]
    assert died
    assert not scheduler.alive


def test_more_requests_than_rows_or_slots_wait_their_turn(folders, references):
    scheduler = make_scheduler(folders[0], max_running=4, max_total=300, max_prefill=20)
    scheduler.start()
    sizes = [5, 80, 3, 120, 7, 9, 60, 2, 200, 1]
    jobs = [job(scheduler, prompt(n, n), max_new_tokens=12) for n in sizes]
    for outcome in run(scheduler, *jobs):
        check_logprobs(outcome, references[0])
    slots = scheduler.batch.runner.slots
    assert slots.rows * slots.capacity <= 300
    scheduler.stop()


def test_answers_that_outgrow_the_slots_are_retracted_and_come_out_right(folders, references):
    scheduler = make_scheduler(folders[0], max_total=400)
    scheduler.start()
    jobs = [
        job(
            scheduler, prompt(5, s), seed=s, max_new_tokens=150, ignore_eos=True,
            return_routed_experts=True,
        )
        for s in range(8)
    ]  # fmt: skip
    outcomes = run(scheduler, *jobs)
    for outcome in outcomes:
        check_logprobs(outcome, references[0])
        ids = outcome.job.input_ids + outcome.output_ids
        assert np.array_equal(outcome.routes, references[0].routes(ids[:-1]))
    assert outcomes[0].retractions == 0
    assert outcomes[-1].retractions > 0
    slots = scheduler.batch.runner.slots
    assert slots.rows * slots.capacity <= 400
    scheduler.stop()


def test_many_requests_leave_nothing_behind(scheduler):
    rows = set()
    for round_ in range(12):
        jobs = [job(scheduler, prompt(n, round_), max_new_tokens=6) for n in range(1, 21)]
        sequences = [scheduler.submit(one) for one in jobs]
        for sequence in sequences[::3]:
            scheduler.cancel(sequence)
        wait([sequence.done for sequence in sequences], WAIT_S)
        assert held(scheduler) == (0, 0)
        rows.add(scheduler.batch.runner.slots.rows)
        assert len(scheduler.batch.tree) <= 4096
    assert max(rows) <= 32
