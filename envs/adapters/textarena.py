"""``relax/TextArena-v0``: TextArena's games, for one player or several.

    env = from_textarena("GuessTheNumber-v0", tasks=1000)
    env = from_textarena("TicTacToe-v0")                       # two roles: player_0, player_1

What the game says to a player becomes user messages; the text of an assistant message is the
player's action, in whatever form the game's own instructions ask for. A player's own action is not
repeated to it.

In a game of several players each is a *role* (``info["role"]`` says whose turn it is) with a view
of its own; when the turn passes, the observation is a ``Rewrite`` to the next player's view. So
``play(env, {"player_0": one, "player_1": other})`` lets two policies play, and a single policy
plays all roles. ``info["rewards"]`` has everybody's reward at the end; the step's own reward is
that of ``reward_of``.

TextArena seeds the process's global generators. Each environment has its own state of them
(:class:`~relax_agent.envs.adapters.common.PrivateRandomness`). Tested with textarena 0.7.4.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from relax_agent.envs.adapters.common import (
    PrivateRandomness,
    choose,
    require,
    seed_tasks,
    unknown,
)
from relax_agent.envs.core import Env, Info, StepResult, SyncEnv
from relax_agent.envs.registration import make
from relax_agent.errors import ConfigError, EnvError
from relax_agent.messages import (
    AssistantMessage,
    Message,
    Observation,
    Rewrite,
    system,
    user,
)

_INSTALL = "textarena==0.7.4"
_MOST_PLAYERS = 16


class TextArenaEnv(SyncEnv):
    """A game of TextArena. See the module's docstring."""

    def __init__(
        self,
        env_id: str,
        *,
        env_args: Mapping[str, Any] | None = None,
        players: int | None = None,
        reward_of: int = 0,
        system_prompt: str = "",
        tasks: int | Sequence[int] | None = None,
        eval_tasks: int | Sequence[int] = 100,
        max_turns: int = 200,
    ) -> None:
        """Make the environment.

        Args:
            env_id: TextArena's id, e.g. ``Wordle-v0``.
            env_args: Arguments for ``textarena.make``, over those of the id.
            players: How many play; by default the fewest that the game takes.
            reward_of: The player whose reward is the step's own.
            system_prompt: What to say before the game's own instructions.
            tasks: How many seeds to train on, or which; None leaves the seed to ``reset``.
            eval_tasks: How many other seeds to hold out, or which; only used with ``tasks``.
            max_turns: Messages of all players after which a game is truncated.
        """
        if max_turns < 1:
            raise ConfigError(f"max_turns must be ≥ 1, not {max_turns}")
        self.max_turns, self._system_prompt = max_turns, system_prompt
        self._randomness = PrivateRandomness(0)
        with self._randomness.swapped_in():
            # Some games keep things from one reset to the next: each episode gets a fresh copy.
            self._fresh = _open(env_id, dict(env_args or {}))
            self.players = players or self._fewest_players(env_id)
        self.game: Any = None
        if not 0 <= reward_of < self.players:
            raise ConfigError(f"reward_of={reward_of} is none of {self.players} players")
        self._reward_of = reward_of
        self._player, self._turns = 0, 0
        self._views: dict[int, list[Message]] = {}
        self._task_id: str | None = None
        if tasks is not None:
            self.tasks = seed_tasks(tasks, eval_tasks)

    def _fewest_players(self, env_id: str) -> int:
        """Find how many players the game takes: it only says so when it is begun."""
        reasons = []
        for count in range(1, _MOST_PLAYERS + 1):
            try:
                game = copy.deepcopy(self._fresh)
                game.reset(num_players=count, seed=0)
                game.get_observation()
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            return count
        raise EnvError(f"{env_id} cannot be begun with 1 to {_MOST_PLAYERS} players: {reasons[0]}")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin a game.

        Args:
            seed: The game's seed; with tasks, what chooses a task if none is given.
            options: ``task`` and ``split``.
        """
        super().reset(seed=seed)
        given = dict(options or {})
        task = choose(self, given)
        if given:
            raise EnvError(f"unknown reset option {next(iter(given))!r}", hint="task or split")
        self._task_id = None if task is None else task.id
        game_seed = seed if task is None else int(task.data["seed"])
        self._turns = 0
        opening = [system(self._system_prompt)] if self._system_prompt else []
        self._views = {player: list(opening) for player in range(self.players)}
        if game_seed is not None:
            self._randomness.seed(game_seed)
        with self._randomness.swapped_in():
            self.game = copy.deepcopy(self._fresh)
            self.game.reset(num_players=self.players, seed=game_seed)
            self._player, said = self.game.get_observation()
        self._views[self._player].extend(self._heard(said))
        return list(self._views[self._player]), self._info()

    def step(self, action: AssistantMessage) -> StepResult:
        """Hand the message's text to the game, as the move of whose turn it is."""
        self._turns += 1
        mover = self._player
        self._views[mover].append(action)
        with self._randomness.swapped_in():
            done, _ = self.game.step(action.text)
            if done:
                rewards, facts = self.game.close()
                return [], self._reward(rewards), True, False, self._account(rewards, facts)
            self._player, said = self.game.get_observation()
        heard = self._heard(said)
        self._views[self._player].extend(heard)
        truncated = self._turns >= self.max_turns
        info = self._account(None, {}) if truncated else self._info()
        if self._player == mover:
            return heard, 0.0, False, truncated, info
        view = Rewrite(tuple(self._views[self._player]), f"role: player_{self._player}")
        return view, 0.0, False, truncated, info

    def _heard(self, said: Any) -> list[Message]:
        """Return what the game tells a player, without the player's own moves."""
        if isinstance(said, str):
            return [user(said.strip("\n"))]
        lines = [
            # A few games hand over speaker and text the wrong way round.
            (text if isinstance(text, str) else str(speaker)).strip("\n")
            for speaker, text, kind in said
            if not (speaker == self._player and kind.name == "PLAYER_ACTION")
        ]
        text = "\n".join(line for line in lines if line)
        return [user(text)] if text else []

    def _info(self) -> Info:
        info: Info = {} if self._task_id is None else {"task": self._task_id}
        if self.players > 1:
            info["role"] = f"player_{self._player}"
        return info

    def _reward(self, rewards: Mapping[int, float] | None) -> float:
        return float((rewards or {}).get(self._reward_of, 0.0))

    def _account(
        self, rewards: Mapping[int, float] | None, facts: Mapping[int, Mapping[str, Any]]
    ) -> Info:
        """Say how the game ended for everybody."""
        info = {} if self._task_id is None else {"task": self._task_id}
        own = facts.get(self._reward_of, {})
        return info | {
            "rewards": {f"player_{p}": float(r) for p, r in (rewards or {}).items()},
            "reason": str(own.get("reason", "")),
            "metrics": {
                "success": float(self._reward(rewards) >= 1),
                "turns": float(self._turns),
                "invalid_move": float(bool(own.get("invalid_move", False))),
            },
        }


def _open(env_id: str, env_args: dict[str, Any]) -> Any:
    """Make the game without the wrappers that repeat the whole history in each observation."""
    textarena = require("textarena", "textarena", install=_INSTALL)
    registered = textarena.envs.registration.ENV_REGISTRY
    if env_id not in registered:
        raise unknown("game of TextArena", env_id, registered, where=" ids in TextArena")
    try:
        game = textarena.make(env_id, **env_args)
    except LookupError as error:
        if "nltk" not in str(error).lower():
            raise
        raise ConfigError(
            f"{env_id} needs a list of words of nltk", hint="python -m nltk.downloader words"
        ) from error
    except SyntaxError as error:
        raise EnvError(f"{env_id} needs a newer Python: {error.msg} in {error.filename}") from error
    while isinstance(game, textarena.Wrapper):
        game = game.env
    return game


def from_textarena(env_id: str, **options: Any) -> Env:
    """Make a game of TextArena an environment for agents.

    Args:
        env_id: TextArena's id, e.g. ``Mastermind-v0``.
        **options: As of :class:`TextArenaEnv`, e.g. ``tasks=1000``.
    """
    return make("relax/TextArena-v0", env_id=env_id, **options)
