"""Random histories of a batch: whatever happens, what comes out is exact."""

import random

import numpy as np
import pytest
import torch
from embedded_support import Reference, job, make_scheduler, moe_config, prompt, save_model

from relax_agent.engines.embedded.sequence import Sequence
from relax_agent.engines.embedded.weights import WeightSession, checkpoint_shapes, read_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("moe")
    return [save_model(root / str(seed), moe_config(), seed) for seed in range(3)]


@pytest.fixture(scope="module")
def references(folders):
    return {str(at): Reference(folder) for at, folder in enumerate(folders)}


class History:
    """Random events on a batch that is driven by hand."""

    def __init__(self, folders, seed):
        self.random = random.Random(seed)
        self.folders = folders
        self.scheduler = make_scheduler(
            folders[0], max_total=320, cache_tokens=200, max_running=6, max_prefill=60
        )
        self.batch = self.scheduler.batch
        self.open, self.mixed = [], set()
        self.stems = [prompt(n, seed) for n in (3, 30, 60)]

    def submit(self):
        ids = self.random.choice(self.stems) + prompt(self.random.randint(0, 9), len(self.open))
        if self.open and self.random.random() < 0.5:  # a next turn
            before = self.random.choice(self.open)
            ids = [*before.tokens[:180], *ids[:20]]
        one = job(
            self.scheduler, ids, seed=len(self.open), rid=str(len(self.open) % 7),
            max_new_tokens=self.random.randint(0, 100), temperature=self.random.choice([0, 0.7, 1]),
            return_routed_experts=True, logprob_start_len=-self.random.randint(0, 1),
        )  # fmt: skip
        self.open.append(Sequence(one))
        self.batch.enqueue(self.open[-1])

    def steps(self):
        for _ in range(self.random.randint(1, 12)):
            self.batch.step()

    def abort(self):
        rid = str(self.random.randrange(7))
        self.batch.abort(lambda sequence: sequence.job.rid == rid)

    def retract(self):
        self.batch.retract_all()

    def update(self):
        if self.random.random() < 0.3:
            self.mixed |= {id(sequence) for sequence in self.batch.running}
        else:
            self.batch.retract_all()
        at = self.random.randrange(len(self.folders))
        session = WeightSession(self.batch.runner.model, checkpoint_shapes(self.folders[at]))
        session.add(read_folder(self.folders[at]))
        session.commit()
        self.batch.new_weights(str(at))

    def play(self, events):
        kinds = [self.submit] * 5 + [self.steps] * 6 + [self.abort, self.retract, self.update]
        for _ in range(events):
            self.random.choice(kinds)()
        while self.batch.running or self.batch.waiting:
            self.batch.step()


def check(outcome, references):
    ids, start = outcome.job.input_ids + outcome.output_ids, len(outcome.job.input_ids)
    done = 0
    for version, begin, end in outcome.spans:
        assert begin == done
        expected = references[version].logprobs(ids, start, outcome.job.sampling.temperature)
        assert outcome.logprobs[begin:end] == pytest.approx(expected[begin:end], abs=2e-5)
        done = end
    assert done == len(outcome.output_ids) == len(outcome.logprobs)


def check_routes(outcome, references):
    """Each position has the routes of the first weights that read it."""
    ids, start = outcome.job.input_ids + outcome.output_ids, len(outcome.job.input_ids)
    if outcome.routes is None:
        assert outcome.finish_reason["type"] == "abort"
        return
    assert len(outcome.routes) == len(ids) - 1
    for version, begin, end in outcome.spans:
        first, last = (0 if begin == 0 else start + begin - 1), start + end - 1
        expected = references[version].routes(ids[:-1])[first:last]
        assert np.array_equal(outcome.routes[first:last], expected)


@pytest.mark.parametrize("seed", range(4))
@torch.inference_mode()
def test_any_history_ends_with_exact_answers_and_nothing_held(folders, references, seed):
    history = History(folders, seed)
    history.play(60)
    batch = history.batch
    assert not batch.running and not batch.waiting
    assert batch.runner.slots.rows * batch.runner.slots.capacity <= 320
    assert len(batch.tree) <= 200
    kinds = set()
    for sequence in history.open:
        outcome = sequence.done.result(0)
        kinds.add(outcome.finish_reason["type"])
        if id(sequence) not in history.mixed:
            check(outcome, references)
            check_routes(outcome, references)
    assert "length" in kinds
    assert batch.counters["retractions"] > 0
    assert batch.counters["cached_tokens"] > 0
