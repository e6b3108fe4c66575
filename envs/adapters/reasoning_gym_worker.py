"""The side of the reasoning-gym adapter that has the answers: it runs in processes of its own.

A worker makes the items of a data set and scores answers with the data set's own function. It is a
process of its own because of what it does there:

* Some scoring functions take their time, or for ever, over an answer like ``9**9**9**9``. The
  process is killed at the time limit.
* Some data sets draw from the global generators, and some depend on the order of a set, which
  changes with Python's hash seed. Both are fixed here, so an item is the same in every process.
* Some scoring functions evaluate the answer as Python code. Here only literals and formulas get
  through; code is an answer like any other wrong one.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import random
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

_EVALUATE_ANSWERS = (
    "algorithmic.binary_matrix",
    "algorithmic.spiral_matrix",
    "algorithmic.string_insertion",
    "games.n_queens",
)
"""Modules whose scoring function calls ``eval`` on the answer."""
_PARSE_FORMULAS = ("games.countdown", "games.puzzle24")
"""Modules that have imported sympy's parser, which evaluates, under its own name."""
_NAME = re.compile(r"[^\W\d]\w*")
_NOT_A_FORMULA = re.compile(r"__|['\"`\\;:={}]|[\w)\]]\s*\.\s*[^\W\d]|\b(?:lambda|for|if|import)\b")
_HARMLESS = {"abs", "max", "min", "pow", "round", "sum"}


def work(
    *, dataset: str, config: Mapping[str, Any], index: int, answer: str | None, score: bool
) -> str | float:
    """Return the question of one item, or the score of an answer to it.

    Args:
        dataset: The data set's name.
        config: Its arguments, ``seed`` and ``size`` among them.
        index: The number of the item.
        answer: What was answered; None if no answer could be found.
        score: Whether to score the answer.
    """
    made, item = _item(dataset, json.dumps(config, sort_keys=True), index)
    if not score:
        return str(item["question"])
    return float(made.score_answer(answer, item))


@lru_cache(maxsize=512)
def _item(dataset: str, config: str, index: int) -> tuple[Any, dict[str, Any]]:
    made = _dataset(dataset, config)
    _seed(f"{dataset} {config} {index}")
    return made, made[index]


@lru_cache(maxsize=16)
def _dataset(name: str, config: str) -> Any:
    import reasoning_gym

    _harden()
    _seed(f"{name} {config}")
    return reasoning_gym.create_dataset(name, **arguments(name, json.loads(config)))


def arguments(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data set's arguments; the parts of a composite one become its own class."""
    if name != "composite":
        return dict(config)
    from reasoning_gym.composite import DatasetSpec

    return {**config, "datasets": [DatasetSpec(**each) for each in config["datasets"]]}


def _seed(text: str) -> None:
    """Seed the global generators of this process, which does nothing else."""
    random.seed(text)
    np.random.seed(random.getrandbits(32))


@lru_cache(maxsize=1)
def _harden() -> None:
    """Keep answers from being run as code."""
    import sympy

    for name in _EVALUATE_ANSWERS:
        _module(name).__dict__["eval"] = ast.literal_eval
    parse = formulas_only(sympy.parse_expr)
    sympy.parse_expr = parse
    for name in _PARSE_FORMULAS:
        _module(name).__dict__["parse_expr"] = parse


def _module(name: str) -> Any:
    return importlib.import_module(f"reasoning_gym.{name}")


def formulas_only(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Return sympy's parser for strings that are nothing but a formula."""
    dangerous = set(dir(builtins)) - _HARMLESS

    def parse_formula(text: str, *args: Any, **kwargs: Any) -> Any:
        if _NOT_A_FORMULA.search(text) or dangerous.intersection(_NAME.findall(text)):
            raise ValueError("this is no formula")
        return parse(text, *args, **kwargs)

    return parse_formula
