"""A reward for answers that must be JSON of a stated form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from relax_agent.envs.rewards.answers import AnswerReward
from relax_agent.envs.tasks import Task
from relax_agent.envs.transcript import Transcript
from relax_agent.errors import ConfigError, EnvError

_FENCED = re.compile(r"```[ \t]*(?:json|JSON)?[ \t]*\r?\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class JsonMatch(AnswerReward):
    """1 if the answer is JSON that fits a JSON schema, else 0, or with ``partial`` a share.

    The JSON may be the whole answer, the last fenced block of it, or what lies between its first
    and its last bracket. References to other documents are never fetched.
    """

    schema: Mapping[str, Any] | None = field(default=None, hash=False)
    """The JSON schema; without one, each task's own in ``task.data["schema"]``."""
    partial: bool = False
    """Give the share of places that fit. Places are the value itself (that it is JSON, its type,
    what the schema says of it as a whole) and, one each, the items of a list, or the properties of
    an object: those that are required, and those that are there and that the schema knows.
    """

    def __post_init__(self) -> None:
        if self.schema is not None:
            try:
                _validator(self.schema)
            except ValueError as error:
                raise ConfigError(f"json_match: {error}") from None

    def __call__(self, task: Task, transcript: Transcript) -> float:
        """Return how well the final answer fits, from 0 to 1."""
        schema = task.data.get("schema") if self.schema is None else self.schema
        if schema is None:
            raise EnvError(
                f"task {task.id!r} has no schema", hint="JsonMatch(schema) or task.data['schema']"
            )
        answer = self.answer(transcript)
        try:
            return 0.0 if answer is None else self.compare(answer, schema)
        except ValueError as error:
            raise EnvError(f"task {task.id!r}: {error}") from None

    def compare(self, answer: str, gold: Any) -> float:
        """Return how well ``answer`` fits the schema ``gold``. Raises ValueError if it is none."""
        from referencing.exceptions import Unresolvable

        validator = _validator(gold)
        value = read_json(answer)
        if value is _NOTHING:
            return 0.0
        try:
            if not self.partial:
                return float(validator.is_valid(value))
            return _share(validator, gold, value)
        except RecursionError:
            return 0.0
        except Unresolvable as error:
            raise ValueError(f"its schema cannot be resolved: {error.ref}") from None


_NOTHING: Any = object()


def read_json(text: str) -> Any:
    """Return the JSON value in a text, or ``_NOTHING``. NaN and Infinity are not JSON."""
    for candidate in _candidates(text.strip()):
        try:
            return json.loads(candidate, parse_constant=_refuse)
        except (ValueError, RecursionError):
            continue
    return _NOTHING


def _candidates(text: str) -> Iterator[str]:
    yield text
    blocks = _FENCED.findall(text)
    if blocks:
        yield blocks[-1]
    begin = min((n for n in (text.find("{"), text.find("[")) if n >= 0), default=-1)
    end = max(text.rfind("}"), text.rfind("]"))
    if 0 <= begin < end:
        yield text[begin : end + 1]


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _validator(schema: Any) -> Any:
    """Return a validator. Raises ValueError for a schema that is none."""
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    kind: Any = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"its schema is wrong: {error.message[:200]}") from None
    return kind(schema, registry=Registry())


def _share(validator: Any, schema: Any, value: Any) -> float:
    required: set[Any] = set()
    places: set[Any] = set()
    if isinstance(value, dict) and isinstance(schema, Mapping):
        required = set(schema.get("required", ()))
        places = required | (schema.get("properties", {}).keys() & value.keys())
    elif isinstance(value, list):
        places = set(range(len(value)))
    wrong: set[Any] = {name for name in required if name not in value}
    whole_fits = True
    for error in validator.iter_errors(value):
        if error.absolute_path and error.absolute_path[0] in places:
            wrong.add(error.absolute_path[0])
        elif len(error.absolute_schema_path) != 1 or error.validator != "required":
            whole_fits = False
    return (whole_fits + len(places - wrong)) / (1 + len(places))


json_match = JsonMatch()
