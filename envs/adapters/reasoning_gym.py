"""``relax/ReasoningGym-v0``: the data sets of reasoning-gym as environments of one turn.

    env = from_reasoning_gym("chain_sum", size=1000, max_terms=4)
    env = from_reasoning_gym({"chain_sum": 2.0, "leg_counting": 1.0})     # a weighted mixture

The model is asked one question, its answer is scored by the data set's own function, and the
episode is over. Tasks for training and for evaluation come from different seeds. Questions and gold
answers stay in worker processes (:mod:`relax_agent.envs.adapters.reasoning_gym_worker`), which are
killed when scoring takes too long; an answer on which scoring fails earns nothing.

All environments of one process share the workers. Tested with reasoning-gym 0.1.25.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any, Literal

from relax_agent.envs.adapters.common import require, unknown
from relax_agent.envs.core import Env, Info, StepResult
from relax_agent.envs.registration import make
from relax_agent.envs.rewards.workers import WorkerFailed, WorkerPool
from relax_agent.envs.tasks import TaskSet
from relax_agent.errors import ChildDied, ConfigError, EnvError
from relax_agent.messages import AssistantMessage, Message, Observation, system, user

_EVAL_SEEDS = 1 << 31
"""Held-out items come from seeds that are higher by this; numpy takes none beyond 32 bits."""
_GENERATE_S = 60.0
_MEMORY_BYTES = 8 << 30
_PROMPTS = {
    "tags": "Give the final answer, and nothing else, between <answer> and </answer>.",
    "text": "Answer with the final answer alone.",
}
_WORKERS = WorkerPool(
    "relax_agent.envs.adapters.reasoning_gym_worker:work",
    memory_bytes=_MEMORY_BYTES,
    env={"PYTHONHASHSEED": "0"},
)


class ReasoningGymEnv(Env):
    """One question of a data set. See the module's docstring."""

    def __init__(
        self,
        dataset: str | Mapping[str, float],
        *,
        config: Mapping[str, Any] | None = None,
        train_size: int = 1000,
        eval_size: int = 100,
        seed: int = 0,
        answer: Literal["tags", "text"] = "tags",
        tag: str = "answer",
        system_prompt: str | None = None,
        score_timeout_s: float = 10.0,
    ) -> None:
        """Make the environment.

        Args:
            dataset: The data set's name, or the weights of several.
            config: Arguments of the data set; for several, ``{name: arguments}``.
            train_size: Tasks to train on.
            eval_size: Tasks to hold out.
            seed: Fixes the tasks.
            answer: ``tags``: the answer is what stands between the last ``<answer>`` and
                ``</answer>``; ``text``: the whole message.
            tag: The word in the tags.
            system_prompt: What to say before the question; by default how to answer. Empty: none.
            score_timeout_s: Seconds that scoring may take; past them the answer earns nothing.
        """
        if answer not in _PROMPTS or not tag:
            raise ConfigError(f"answer={answer!r}, tag={tag!r} is not known", hint="tags, text")
        if min(train_size, eval_size) < 0 or train_size < 1 or not 0 <= seed < _EVAL_SEEDS >> 1:
            raise ConfigError(
                f"train_size={train_size}, eval_size={eval_size}, seed={seed} make no data set",
                hint=f"sizes of 1 or more, a seed from 0 to {(_EVAL_SEEDS >> 1) - 1}",
            )
        self._dataset, self._config = _settled(dataset, dict(config or {}))
        check_config(self._dataset, {**self._config, "seed": seed, "size": 1})
        self._seed, self._sizes = seed, {"train": train_size, "eval": eval_size}
        self._tag = tag if answer == "tags" else None
        told = _PROMPTS[answer].replace("answer>", f"{tag}>")
        self._system_prompt = told if system_prompt is None else system_prompt
        self._score_timeout_s = score_timeout_s
        self.tasks: TaskSet = _task_ids(train_size, eval_size, self._fingerprint())
        self._item: dict[str, Any] | None = None
        self._task_id = ""

    def _fingerprint(self) -> str:
        version = importlib.metadata.version("reasoning_gym")
        row = [version, self._dataset, self._config, self._seed, self._sizes]
        return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Ask the question of ``options["task"]``, or of a task that the seed chooses."""
        await super().reset(seed=seed, options=options)
        given = dict(options or {})
        task_id, split = given.pop("task", None), given.pop("split", "train")
        if given:
            raise EnvError(f"unknown reset option {next(iter(given))!r}", hint="task or split")
        self._task_id = self._known(task_id) or self.rng.choice(self.tasks.ids(split))
        self._item = self._arguments(self._task_id)
        question = await _WORKERS.call(
            {**self._item, "answer": None, "score": False}, timeout_s=_GENERATE_S
        )
        messages: list[Message] = [user(question)]
        if self._system_prompt:
            messages.insert(0, system(self._system_prompt))
        return messages, {"task": self._task_id}

    def _known(self, task_id: str | None) -> str | None:
        if task_id is not None and task_id not in self.tasks:
            raise EnvError(f"there is no task {task_id!r}", hint=f"e.g. {self.tasks.ids()[0]!r}")
        return task_id

    def _arguments(self, task_id: str) -> dict[str, Any]:
        """Return what tells a worker which item is meant."""
        split, _, number = task_id.partition("-")
        seed = self._seed + (_EVAL_SEEDS if split == "eval" else 0)
        config = {**self._config, "seed": seed, "size": self._sizes[split]}
        return {"dataset": self._dataset, "config": config, "index": int(number)}

    async def step(self, action: AssistantMessage) -> StepResult:
        """Score the answer; the episode is over."""
        if self._item is None:
            raise EnvError("step() outside an episode", hint="await env.reset() first")
        item, self._item = self._item, None
        answer = extract(action.text, self._tag)
        info: Info = {"task": self._task_id}
        score, failure = await self._score(item, answer)
        if failure:
            info["score_failed"] = failure
        info["metrics"] = {
            "success": float(score >= 1),
            "score": score,
            "answered": float(answer is not None),
            "score_failed": float(failure is not None),
        }
        return [], score, True, False, info

    async def _score(self, item: dict[str, Any], answer: str | None) -> tuple[float, str | None]:
        """Return the score, and why there is none if scoring fails."""
        request = {**item, "answer": answer, "score": True}
        try:
            score = await _WORKERS.call(request, timeout_s=self._score_timeout_s)
        except (WorkerFailed, ChildDied) as error:
            return 0.0, str(error)
        if not math.isfinite(score):
            return 0.0, f"the score is {score}"
        return score, None

    async def close(self) -> None:
        """End the episode. The workers stay, for the other environments."""
        self._item = None


def extract(text: str, tag: str | None) -> str | None:
    """Return the answer within a message: the last tagged part, or all of it without a tag."""
    if tag is None:
        return text.strip() or None
    name = re.escape(tag)
    found = re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return found[-1].strip() if found else None


def _settled(
    dataset: str | Mapping[str, float], config: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return name and arguments; several data sets become reasoning-gym's composite one."""
    for key in ("seed", "size"):
        if key in config:
            raise ConfigError(f"{key} is not part of config", hint="seed=…, train_size=…")
    if isinstance(dataset, str):
        return dataset, config
    if not dataset:
        raise ConfigError("there is no data set", hint='"chain_sum", or {"chain_sum": 1.0, …}')
    strange = config.keys() - dataset.keys()
    if strange:
        raise ConfigError(
            f"config is for {', '.join(sorted(strange))}, which is not among the data sets",
            hint="config={name: arguments}",
        )
    parts = [
        {"name": name, "weight": float(weight), "config": dict(config.get(name, {}))}
        for name, weight in dataset.items()
    ]
    return "composite", {"datasets": parts}


def check_config(name: str, config: Mapping[str, Any]) -> None:
    """Raise an error that names what is wrong with a data set's name or arguments."""
    require("reasoning_gym", "reasoning-gym", install="reasoning-gym==0.1.25")
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise unknown("data set", name, DATASETS, where=" data sets in reasoning-gym")
    if name == "composite":
        _check_parts(config)
    kind = DATASETS[name][1]
    known = {field.name for field in fields(kind)}
    wrong = sorted(config.keys() - known)
    if wrong:
        names = ", ".join(sorted(known - {"seed", "size"})) or "none"
        raise ConfigError(f"{name} has no argument {wrong[0]!r}", hint=f"arguments: {names}")
    try:
        from relax_agent.envs.adapters.reasoning_gym_worker import arguments

        made = kind(**arguments(name, config))
        if hasattr(made, "validate"):
            made.validate()
    except (AssertionError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{name}: {error or 'an argument is out of bounds'}") from error


def _check_parts(config: Mapping[str, Any]) -> None:
    parts = config.get("datasets")
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise ConfigError(
            "a composite data set needs its parts", hint='dataset={"chain_sum": 1.0, …}'
        )
    for part in parts:
        check_config(str(part.get("name")), part.get("config", {}))


@lru_cache(maxsize=8)
def _task_ids(train_size: int, eval_size: int, fingerprint: str) -> TaskSet:
    return TaskSet.of_ids(
        [f"train-{i:06}" for i in range(train_size)],
        [f"eval-{i:06}" for i in range(eval_size)],
        fingerprint,
    )


def from_reasoning_gym(
    dataset: str | Mapping[str, float],
    *,
    size: int = 1000,
    eval_size: int = 100,
    seed: int = 0,
    answer: Literal["tags", "text"] = "tags",
    tag: str = "answer",
    system_prompt: str | None = None,
    score_timeout_s: float = 10.0,
    **config: Any,
) -> Env:
    """Make a data set of reasoning-gym an environment of one turn.

    Args:
        dataset: The data set's name, or the weights of several.
        size: Tasks to train on.
        eval_size: Tasks to hold out.
        seed: Fixes the tasks.
        answer: Where the answer stands; see :class:`ReasoningGymEnv`, also for what follows.
        tag: The word in the tags.
        system_prompt: What to say before the question.
        score_timeout_s: Seconds that scoring may take.
        **config: Arguments of the data set; for several, ``name={…}``.
    """
    return make(
        "relax/ReasoningGym-v0",
        dataset=dataset if isinstance(dataset, str) else dict(dataset),
        config=config,
        train_size=size,
        eval_size=eval_size,
        seed=seed,
        answer=answer,
        tag=tag,
        system_prompt=system_prompt,
        score_timeout_s=score_timeout_s,
    )
