"""``relax/GEM-v0``: the text environments of GEM (``gem-llm``).

    env = from_gem("game:GuessTheNumber-v0-easy")
    env = from_gem("game:Minesweeper-v0-easy", env_args={"rows": 4, "cols": 4}, tasks=1000)

What an environment says becomes a user message, with the hint (``suffix``) that GEM keeps apart;
the whole text of an assistant message is the action. With ``tasks=1000`` the seed is the task.

GEM seeds the process's global generators and draws from them. Each environment therefore has its
own state of them, which is swapped in for the time of a call
(:class:`~relax_agent.envs.adapters.common.PrivateRandomness`): equal seeds give equal episodes,
however many run, and nobody else's draws change. Tested with gem-llm 0.1.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relax_agent.envs.adapters.common import (
    PrivateRandomness,
    choose,
    require,
    require_no_more,
    seed_tasks,
    unknown,
)
from relax_agent.envs.core import Env, Info, StepResult, SyncEnv
from relax_agent.envs.registration import make
from relax_agent.errors import ConfigError, EnvError, MissingExtraError
from relax_agent.messages import AssistantMessage, Message, Observation, system, user

_INSTALL = "gem-llm==0.1.0"
_NUMPY_SEEDS = 1 << 32


class GemEnv(SyncEnv):
    """An environment of GEM. See the module's docstring."""

    def __init__(
        self,
        env_id: str,
        *,
        env_args: Mapping[str, Any] | None = None,
        system_prompt: str = "",
        tasks: int | Sequence[int] | None = None,
        eval_tasks: int | Sequence[int] = 100,
        max_turns: int = 100,
    ) -> None:
        """Make the environment.

        Args:
            env_id: GEM's id, e.g. ``game:Mastermind-v0-easy``.
            env_args: Arguments for ``gem.make``, over those of the id.
            system_prompt: What to say before the environment's own instructions.
            tasks: How many seeds to train on, or which; None leaves the seed to ``reset``.
            eval_tasks: How many other seeds to hold out, or which; only used with ``tasks``.
            max_turns: Messages after which an episode is truncated, beside GEM's own limit.
        """
        if max_turns < 1:
            raise ConfigError(f"max_turns must be ≥ 1, not {max_turns}")
        self.max_turns, self._system_prompt = max_turns, system_prompt
        self._randomness = PrivateRandomness()
        with self._randomness.swapped_in():
            self.gem = _open(env_id, dict(env_args or {}))
        self._turns = 0
        self._task_id: str | None = None
        if tasks is not None:
            self.tasks = seed_tasks(tasks, eval_tasks)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode.

        Args:
            seed: GEM's seed; with tasks, what chooses a task if none is given.
            options: ``task`` and ``split``.
        """
        super().reset(seed=seed)
        given = dict(options or {})
        task = choose(self, given)
        require_no_more(given)
        self._task_id = None if task is None else task.id
        seed = seed if task is None else int(task.data["seed"])
        self._turns = 0
        observation, info = self._begin(seed)
        messages = [system(self._system_prompt)] if self._system_prompt else []
        return [*messages, *_messages(observation, info)], self._info(info)

    def _begin(self, seed: int | None) -> tuple[Any, dict[str, Any]]:
        if hasattr(self.gem, "idx"):
            self.gem.idx = 0  # GEM counts resets and changes its data set after some hundred
        # Without a seed some environments ask the system for one, and could not be repeated.
        seed = self.rng.getrandbits(32) if seed is None else seed % _NUMPY_SEEDS
        self._randomness.seed(seed)
        with self._randomness.swapped_in():
            return self.gem.reset(seed=seed)

    def step(self, action: AssistantMessage) -> StepResult:
        """Hand the message's text to GEM."""
        self._turns += 1
        with self._randomness.swapped_in():
            observation, reward, terminated, truncated, info = self.gem.step(action.text)
        ended = bool(terminated)
        cut = not ended and (bool(truncated) or self._turns >= self.max_turns)
        out = self._info(info)
        if ended or cut:
            out["metrics"] = {"success": float(reward >= 1), "turns": float(self._turns)}
        messages = _messages(observation, {} if ended else info)
        return messages, float(reward), ended, cut, out

    def _info(self, info: Mapping[str, Any]) -> Info:
        plain = {k: v for k, v in info.items() if isinstance(v, (str, int, float, bool))}
        out: Info = {"gem": plain}
        if self._task_id is not None:
            out["task"] = self._task_id
        return out

    def close(self) -> None:
        """End what some of GEM's environments start for scoring."""
        pool = getattr(self.gem, "mp_pool", None)
        if pool is not None:
            pool.terminate()


def _messages(observation: Any, info: Mapping[str, Any]) -> list[Message]:
    if not isinstance(observation, str):
        raise EnvError(
            f"GEM's environment says a {type(observation).__name__}, not a text",
            hint="only text environments can be adapted",
        )
    said = "" if "TERMINAL_STATE" in observation else observation
    pieces = [info.get("prefix", ""), said, info.get("suffix", "")]
    text = "\n".join(piece.strip("\n") for piece in pieces if piece)
    return [user(text)] if text else []


def _open(env_id: str, env_args: dict[str, Any]) -> Any:
    """Make GEM's environment, with errors that say what to do."""
    gem = require("gem", "gem-llm", install=_INSTALL)
    require("gem.envs", "gem-llm", install=_INSTALL)  # registers the ids
    registered = require("gem.envs.registration", "gem-llm", install=_INSTALL).ENV_REGISTRY
    if env_id not in registered:
        raise unknown("GEM environment", env_id, registered, where=" ids in GEM")
    try:
        return gem.make(env_id, **env_args)
    except ImportError as error:
        missing = getattr(error.__context__, "name", None)
        if missing is None:
            raise
        raise MissingExtraError(f"{missing}, which {env_id} needs,", "", install=missing) from error
    except LookupError as error:
        if "nltk" not in str(error).lower():
            raise
        raise ConfigError(
            f"{env_id} needs a list of words of nltk", hint="python -m nltk.downloader words"
        ) from error


def from_gem(env_id: str, **options: Any) -> Env:
    """Make an environment of GEM an environment for agents.

    Args:
        env_id: GEM's id, e.g. ``game:Mastermind-v0-easy``.
        **options: As of :class:`GemEnv`, e.g. ``tasks=1000``.
    """
    return make("relax/GEM-v0", env_id=env_id, **options)
