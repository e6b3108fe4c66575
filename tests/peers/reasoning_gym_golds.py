"""Runs in a worker: the gold answer of an item, and what the data set itself gives for it."""

from relax_agent.envs.adapters.reasoning_gym_worker import _item


def gold(dataset, config, index):
    made, item = _item(dataset, config, index)
    answer = item["answer"]
    return {"answer": answer, "score": float(made.score_answer(answer, item))}
