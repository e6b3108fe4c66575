"""SkyRL-Gym's environments (``skyrl-gym``) as agent environments.

SkyRL-Gym has an environment for each row of a data set: the row's ``prompt`` opens the episode,
everything else of it (the gold answer too) goes to the environment's constructor. Here the rows
are the tasks, one environment serves all of them, and the rows stay on the environment's side.

    make("relax/SkyRLGym-v0", env_id="gsm8k", train="train.parquet", eval="test.parquet")

Actions are text: these environments look for tags such as ``<search>`` in it themselves. Their one
``done`` becomes ``terminated``. They have no seed; what is random in them is not repeatable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_agent.envs.adapters.common import choose, require, unknown
from relax_agent.envs.core import Env, Info, StepResult, SyncEnv
from relax_agent.envs.tasks import Task, TaskSet
from relax_agent.errors import ConfigError, EnvError
from relax_agent.messages import (
    AssistantMessage,
    Message,
    Observation,
    from_openai,
    to_openai,
    user,
)

PACKAGE = "skyrl-gym"
_NO_TOOLS = (
    "There are no tools to call here. Write what you want to do as text, with the tags that the"
    " task asks for."
)

Row = Mapping[str, Any]


class SkyRLGymEnv(SyncEnv):
    """One of SkyRL-Gym's environments over rows of its data."""

    def __init__(
        self,
        env_id: str,
        *,
        train: str | Path | Sequence[Row],
        eval: str | Path | Sequence[Row] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the environment.

        Args:
            env_id: SkyRL-Gym's id, e.g. ``gsm8k``.
            train: The rows to train on, or a JSONL or Parquet file of them. A row has ``prompt``
                and what the environment asks for, such as ``reward_spec``.
            eval: The rows to hold out.
            config: The environment's own settings (``env_config``), e.g. ``{"search_url": …}``.

        Raises:
            MissingExtraError: SkyRL-Gym is not installed.
            UnknownEnv: It has no such environment.
            ConfigError: A row is not one.
        """
        self._library = require("skyrl_gym", PACKAGE, install=PACKAGE)
        known = self._library.registry
        if env_id not in known:
            raise unknown("SkyRL-Gym environment", env_id, known)
        self._env_id = env_id
        self._config = self._settings(config or {})
        self.tasks = TaskSet(_tasks(train, "train"), _tasks(eval, "eval"))
        self._env: Any = None
        self._task: Task | None = None

    def _settings(self, config: Mapping[str, Any]) -> Any:
        omegaconf = require("omegaconf", "omegaconf", install="omegaconf")
        return omegaconf.OmegaConf.create(dict(config))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin the episode of ``options["task"]``, or of a row that the seed chooses."""
        self.seed_rng(seed)
        self._end()
        given = dict(options or {})
        self._task = task = self._choose(given)
        if given:
            raise EnvError(f"unknown reset option {next(iter(given))!r}", hint="task or split")
        self._env = self._library.make(
            self._env_id, env_config=self._config, extras=dict(task.data)
        )
        prompt = [to_openai(message) for message in task.to_messages()]
        messages, _ = self._env.init(prompt)
        return _messages(messages), {"task": task.id}

    def _choose(self, given: dict[str, Any]) -> Task:
        assert self.tasks is not None
        split = given.get("split", "train")
        if given.get("task") is None and not self.tasks.ids(split):
            raise EnvError(f"{self._env_id} has no rows in its {split} split")
        task = choose(self, given)
        assert task is not None
        return task

    def step(self, action: AssistantMessage) -> StepResult:
        """Hand the message's text to the environment."""
        assert self._task is not None
        info: Info = {"task": self._task.id}
        if action.tool_calls and not action.text.strip():
            return [user(_NO_TOOLS)], 0.0, False, False, info
        output = self._env.step(action.text)
        reward, done = float(output["reward"]), bool(output["done"])
        if done:
            info["metrics"] = {"success": float(reward >= 1), **_numbers(self._env.get_metrics())}
        return _messages(output["observations"]), reward, done, False, info

    def close(self) -> None:
        """Close the environment of the running episode."""
        self._end()

    def _end(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()


def from_skyrl_gym(
    env_id: str,
    *,
    train: str | Path | Sequence[Row],
    eval: str | Path | Sequence[Row] = (),
    config: Mapping[str, Any] | None = None,
) -> Env:
    """Return one of SkyRL-Gym's environments; see :class:`SkyRLGymEnv`."""
    from relax_agent.envs.registration import make

    return make("relax/SkyRLGym-v0", env_id=env_id, train=train, eval=eval, config=config)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {str(k): float(v) for k, v in metrics.items() if isinstance(v, (int, float))}


def _messages(chat: Iterable[Mapping[str, Any]] | str) -> list[Message]:
    if isinstance(chat, str):
        return [user(chat)]
    return [from_openai(dict(item)) for item in chat]


def _tasks(rows: str | Path | Sequence[Row], split: str) -> list[Task]:
    if isinstance(rows, (str, Path)):
        rows = _read(Path(rows))
    return [_task(row, f"{split}-{number}") for number, row in enumerate(rows)]


def _read(path: Path) -> list[Row]:
    if path.suffix == ".parquet":
        parquet = require("pyarrow.parquet", "pyarrow", extra="envs")
        rows: list[Row] = parquet.read_table(path).to_pylist()
        return rows
    import json

    try:
        return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"cannot read rows from {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSONL: {error}") from error


def _task(row: Row, default_id: str) -> Task:
    if not isinstance(row, Mapping) or not row.get("prompt"):
        raise ConfigError(f"row {default_id} has no prompt", hint='{"prompt": [{"role": …}], …}')
    try:
        opening = tuple(_messages(row["prompt"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"row {default_id}: its prompt is not a chat: {error!r}") from error
    extras = {name: value for name, value in row.items() if name != "prompt"}
    spec = row.get("reward_spec") or row.get("reward_model") or {}
    answer = spec.get("ground_truth") if isinstance(spec, Mapping) else None
    last = next((message for message in reversed(opening) if message.role == "user"), opening[-1])
    task_id = str(row.get("id") or row.get("uid") or default_id)
    return Task(task_id, last.content, answer, extras, opening)
