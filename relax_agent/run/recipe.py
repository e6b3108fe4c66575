"""The recipe: one YAML file that says everything about a run.

Each part of the system declares its own settings; :class:`Recipe` puts them together. The file is
read, ``--set a.b=c`` changes are laid over it, and the whole is validated at once, before anything
is started. A key that does not exist is an error that names the nearest one that does.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from relax_agent.engines.settings import EngineSettings
from relax_agent.errors import ConfigError, UnknownKeyError
from relax_agent.models.settings import ModelSettings
from relax_agent.queue.settings import QueueSettings
from relax_agent.rendering import RendererSettings
from relax_agent.rollout.settings import RolloutSettings
from relax_agent.trainers.algorithms import AlgorithmSettings
from relax_agent.trainers.settings import TrainerSettings
from relax_agent.weights import WeightsSettings

S = TypeVar("S", bound=BaseModel)

_NOT_IN_A_CHECKPOINT: dict[str, Any] = {
    **dict.fromkeys(("name", "runs", "steps", "tools", "engine", "weights"), True),
    **dict.fromkeys(("checkpoint", "eval", "goal"), True),
    "env": {"isolation"},
    "trainer": {"timeout_s", "threads", "ranks", "parallel", "micro_batch_tokens", "recompute"},
    "queue": {"lease_timeout_s", "no_progress_s"},
    "rollout": {
        "max_concurrent_episodes",
        "episode_timeout_s",
        "env_timeout_s",
        "max_failures_in_a_row",
    },
}
"""What a resumed run may have otherwise than the run that it goes on from."""

_SCIENTIFIC = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EnvSettings(_Settings):
    """Which environment the run is about."""

    id: str
    """A registered id, e.g. ``relax/Calculator-v0``."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's constructor."""
    modules: list[str] = Field(default_factory=list)
    """Modules to import first, so that they register their environments."""
    isolation: Literal["process"] | None = None
    """``process``: each environment runs in a process of its own; null: as it is registered."""


class ToolsSettings(_Settings):
    """Where the environment's tools run."""

    serve: str | None = None
    """A module of tools that the run serves over HTTP in a process of its own."""
    url: str | None = None
    """A tool server that already runs somewhere; its tools replace the environment's."""
    token_env: str | None = None
    """Name of the variable that holds the bearer token for ``url``."""
    workers: int = Field(default=1, ge=1)
    """Processes of the server that ``serve`` starts."""
    trace: bool = False
    """Whether the run folder gets ``tool_calls.jsonl``, one line for each call of a tool."""

    @model_validator(mode="after")
    def _one_source(self) -> ToolsSettings:
        if self.serve and self.url:
            raise ValueError("give either tools.serve or tools.url, not both")
        if self.workers > 1 and not self.serve:
            raise ValueError("tools.workers is of the server that tools.serve starts")
        return self


class CheckpointSettings(_Settings):
    """When the run saves itself."""

    every: int = Field(default=20, ge=1)
    """Steps between checkpoints; the last step always makes one."""
    keep: int = Field(default=2, ge=1)
    """How many checkpoints stay on disk."""


class EvalSettings(_Settings):
    """Greedy evaluation on held-out tasks, before and after training."""

    tasks: int = Field(default=512, ge=1)
    """How many held-out tasks."""
    every: int = Field(default=0, ge=0)
    """Steps between evaluations in between; 0 means only at the start and at the end."""


class GoalSettings(_Settings):
    """What the run must reach; a run that misses it ends with an exit status other than 0."""

    success_last: float | None = None
    """Least mean sampled success of the last 10 steps."""
    success_rise: float | None = None
    """Least rise of that over the mean of the first 3 steps."""
    greedy_rise: float | None = None
    """Least rise of greedy success on held-out tasks over the start."""
    routes_replayed: float = 0.99
    """Least share of routed choices that the trainer replayed (only where replay is on)."""


class Recipe(_Settings):
    """A whole run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run's folder is ``<runs>/<name>``."""
    runs: Path = Path("runs")
    """Where run folders are made."""
    seed: int = 0
    """Fixes tasks, model and sampling; parts that name a seed of their own keep it."""
    steps: int = Field(default=60, ge=1)
    """Optimizer steps of reinforcement learning."""
    model: ModelSettings
    renderer: RendererSettings = RendererSettings()
    env: EnvSettings
    tools: ToolsSettings = ToolsSettings()
    engine: EngineSettings = EngineSettings()
    rollout: RolloutSettings = RolloutSettings()
    queue: QueueSettings = QueueSettings()
    algorithm: AlgorithmSettings
    trainer: TrainerSettings = TrainerSettings()
    weights: WeightsSettings = WeightsSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    eval: EvalSettings = EvalSettings()
    goal: GoalSettings = GoalSettings()

    @model_validator(mode="after")
    def _parts_fit(self) -> Recipe:
        warm = self.trainer.warm_start
        if warm.enabled and warm.episodes < warm.batch_episodes:
            raise ValueError(
                f"trainer.warm_start.episodes={warm.episodes} is less than one batch:"
                f" trainer.warm_start.batch_episodes={warm.batch_episodes}"
            )
        if self.env.isolation and (self.tools.serve or self.tools.url):
            raise ValueError(
                "env.isolation=process runs the tools beside the environment, in its process;"
                " leave tools.serve and tools.url out"
            )
        if self.env.isolation and self.tools.trace:
            raise ValueError(
                "tools.trace tells of calls from this process, and env.isolation=process makes"
                " them in others; choose one of the two"
            )
        if self.engine.kind == "sglang" and self.weights.kind == "tensor":
            raise ValueError(
                "weights.kind=tensor sends safetensors, which only the embedded engine takes;"
                " use weights.kind=disk with engine.kind=sglang"
            )
        if self.trainer.temperature != self.rollout.temperature and (
            "temperature" in self.trainer.model_fields_set
        ):
            raise ValueError(
                f"trainer.temperature={self.trainer.temperature:g} differs from"
                f" rollout.temperature={self.rollout.temperature:g}: log-probs would not compare;"
                " leave trainer.temperature out"
            )
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> Recipe:
        """Refuse sizes that could only fail in the midst of a run."""
        context = self.rollout.max_context
        if context > self.trainer.micro_batch_tokens:
            raise ValueError(
                f"an episode of rollout.max_context={context} tokens does not fit into"
                f" trainer.micro_batch_tokens={self.trainer.micro_batch_tokens}"
            )
        if context > self.engine.max_total_tokens:
            raise ValueError(
                f"an episode of rollout.max_context={context} tokens does not fit into"
                f" engine.max_total_tokens={self.engine.max_total_tokens}"
            )
        if self.rollout.group_size < 2:
            raise ValueError(
                "rollout.group_size=1: rewards are compared within a group, which takes 2 episodes"
            )
        return self

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint depends on; names, places, lengths and limits do not count."""
        return self.model_dump(mode="json", exclude=_NOT_IN_A_CHECKPOINT)

    def fingerprint(self) -> str:
        """Return a hash of :meth:`identity`."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:16]


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and lay ``a.b=value`` overrides over it (values are YAML).

    Raises:
        ConfigError: the file is missing or not YAML, or a value does not fit.
        UnknownKeyError: a key does not exist; the message names the nearest one.
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no recipe at {path}", hint="give the path of a YAML file"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {_one_line(error)}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no mapping", hint="a recipe is a mapping of settings")
    for override in overrides:
        _lay_over(data, override)
    return parse_recipe(data, str(path))


def parse_recipe(data: dict[str, Any], where: str) -> Recipe:
    """Validate plain data as a recipe; see :func:`load_recipe` for the errors."""
    try:
        return _spread(Recipe.model_validate(data))
    except ValidationError as error:
        raise _explain(error, where) from None


def _spread(recipe: Recipe) -> Recipe:
    """Hand what the recipe says once to the parts that need it, unless they say it themselves."""
    trainer = _with_default(recipe.trainer, seed=recipe.seed)
    model = recipe.model
    if model.tiny is not None:
        model = model.model_copy(update={"tiny": _with_default(model.tiny, seed=recipe.seed)})
    return recipe.model_copy(
        update={
            "model": model,
            "engine": _with_default(recipe.engine, seed=recipe.seed),
            "trainer": _with_default(trainer, temperature=recipe.rollout.temperature),
        }
    )


def _with_default(settings: S, **values: Any) -> S:
    missing = {key: values[key] for key in values if key not in settings.model_fields_set}
    return settings.model_copy(update=missing)


def dump_recipe(recipe: Recipe) -> str:
    """Return the whole resolved recipe as YAML."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _lay_over(data: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"--set {override} is not of the form key=value", hint="e.g. trainer.lr=1e-4"
        )
    *parents, last = key.split(".")
    node = data
    for name in parents:
        child = node.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override}: {name} is not a group of settings")
        node = child
    try:
        node[last] = _value(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override}: {_one_line(error)}") from None


def _value(text: str) -> Any:
    """Parse a YAML value; YAML 1.1 reads 1e-5 as text, which is a number to everybody else."""
    value = yaml.safe_load(text)
    if isinstance(value, str) and _SCIENTIFIC.fullmatch(value):
        return float(value)
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _explain(error: ValidationError, where: str) -> ConfigError:
    # A key in the wrong place often leaves a gap in the right one: the wrong key says more.
    first, *others = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    place = ".".join(str(item) for item in first["loc"])
    if first["type"] == "extra_forbidden":
        parent = ".".join(str(item) for item in first["loc"][:-1])
        names = _keys_at(first["loc"][:-1])
        near = max(names, key=lambda name: _likeness(str(first["loc"][-1]), name), default=None)
        hint = f"did you mean {'.'.join(filter(None, [parent, near]))}?" if near else None
        return UnknownKeyError(f"{where}: there is no setting {place}", hint=hint)
    also = f" (and {len(others)} more)" if others else ""
    message = first["msg"].removeprefix("Value error, ")
    return ConfigError(f"{where}: {place or 'recipe'}: {message}{also}")


def _likeness(given: str, name: str) -> float:
    """Return how well a known name fits a given one; initials count, as in lr for learning_rate."""
    initials = "".join(word[0] for word in given.split("_") if word)
    ratio = difflib.SequenceMatcher(None, given.lower(), name).ratio()
    return max(ratio, 0.9 if initials == name else 0.0)


def _keys_at(location: Sequence[int | str]) -> list[str]:
    """Return the setting names that exist at a place, walking through unions by their tag."""
    models: list[type[BaseModel]] = [Recipe]
    for name in location:
        found = [
            candidate
            for model in models
            if str(name) in model.model_fields
            for candidate in _models_in(model.model_fields[str(name)].annotation)
        ]
        models = found or models  # a union's tag appears in the location but is no field
    return [field for model in models for field in model.model_fields]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    inner = getattr(annotation, "__args__", ())
    return [model for item in inner for model in _models_in(item)]
