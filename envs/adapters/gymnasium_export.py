"""An environment for agents as a Gymnasium environment.

    env = as_gymnasium("relax/Calculator-v0")
    observation, info = env.reset(seed=7)
    decode_observation(observation)                      # the messages
    env.step(encode_action(assistant("42")))             # or just env.step("42")

Observations and actions are texts (:mod:`relax_agent.envs.adapters.gymnasium_codec`), so the result
passes Gymnasium's own ``check_env`` and goes into its vector environments.

Gymnasium blocks and this project awaits: the environments made here run in an event loop that has
a thread of its own. A call therefore works whether or not the caller's thread has a loop that runs.
What is made *inside* such an environment gets another loop, and so does a process after a fork.
Every wait has a limit.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from relax_agent.envs.adapters.common import guarded, require
from relax_agent.envs.adapters.gymnasium_codec import (
    ALPHABET,
    decode_action,
    encode_observation,
)
from relax_agent.envs.adapters.gymnasium_space import message_space_class
from relax_agent.envs.core import Env, SyncEnv
from relax_agent.envs.registration import make_async
from relax_agent.envs.specs import EnvSpec
from relax_agent.errors import ConfigError, EnvError, InvalidAction
from relax_agent.messages import AssistantMessage, Message, Observation, Rewrite
from relax_agent.pages import conversation_text

if TYPE_CHECKING:
    import gymnasium

    _Gym = gymnasium.Env[str, str]
else:
    _Gym = object  # Gymnasium is a base only when somebody asks for the class

T = TypeVar("T")

ENTRY_POINT = "relax_agent.gymnasium:make_agent_env"
"""Where Gymnasium finds what makes an environment of this project."""
_MAX_CHARS = 1 << 20
_MAX_ACTION_CHARS = 1 << 16


class _Loop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._left: set[concurrent.futures.Future[Any]] = set()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="relax-gymnasium", daemon=True
        )
        self._thread.start()

    @property
    def here(self) -> bool:
        """Whether the thread is this process's: a fork takes the object along, not the thread."""
        return self._pid == os.getpid()

    @property
    def calls(self) -> bool:
        """Whether it is this loop itself that is running the caller."""
        return self._thread is threading.current_thread()

    def run(self, call: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Block until the call has ended; whatever ends the wait ends the call too."""
        if self.calls or not self.here:
            call.close()
            where = "from inside its own event loop" if self.here else "in another process"
            raise EnvError(
                f"this environment is called {where}", hint="make one there, or call it elsewhere"
            )
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise  # the call's own
            raise EnvError(f"no answer within {timeout_s:g} s", hint="timeout_s=…") from None
        finally:
            future.cancel()

    def leave(self, call: Coroutine[Any, Any, object]) -> None:
        """Run a call that nobody waits for; it never blocks, so a finaliser may ask for it."""
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        self._left.add(future)
        future.add_done_callback(self._left.discard)


_loops: list[_Loop] = []
_lock = threading.Lock()


def _free_loop() -> _Loop:
    """Return a loop of this process that is not the one that calls."""
    with _lock:
        for loop in _loops:
            if not loop.calls:
                return loop
        _loops.append(_Loop())
        return _loops[-1]


def _begin_anew() -> None:
    """Forget the loops whose threads a fork has left behind."""
    global _lock
    _loops.clear()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


class _AgentEnv(_Gym):
    """All of :class:`relax_agent.gymnasium.AgentEnv` but its base class."""

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012

    def __init__(
        self,
        env: Env | SyncEnv | EnvSpec | str,
        *,
        render_mode: str | None = None,
        max_chars: int = _MAX_CHARS,
        timeout_s: float = 300.0,
        **kwargs: Any,
    ) -> None:
        """Make the environment.

        Args:
            env: An environment for agents, its spec or its id.
            render_mode: ``ansi``: ``render()`` returns the conversation so far as text.
            max_chars: The longest observation that is inside the observation space.
            timeout_s: Seconds that one call may take.
            **kwargs: For an id or a spec: arguments of its constructor.
        """
        gymnasium = require("gymnasium", "gymnasium", extra="envs")
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ConfigError(f"render_mode={render_mode!r} is not known", hint="ansi, or None")
        self.observation_space = message_space_class()(max_chars, min_length=0, charset=ALPHABET)
        self.action_space = gymnasium.spaces.Text(_MAX_ACTION_CHARS, min_length=0, charset=ALPHABET)
        self.render_mode = render_mode
        self._timeout_s = timeout_s
        self._messages: list[Message] = []
        self._closed = False
        self._loop = _free_loop()
        self.agent_env: Env = self._build(env, kwargs)
        self.spec = _gym_spec(gymnasium, self.agent_env)

    def _build(self, env: Env | SyncEnv | EnvSpec | str, kwargs: dict[str, Any]) -> Env:
        if isinstance(env, (str, EnvSpec)):
            return self._run(make_async(env, **kwargs))
        if kwargs:
            raise ConfigError(f"{next(iter(kwargs))}=… is for an id; this environment is made")
        if not isinstance(env, (Env, SyncEnv)):
            raise ConfigError(
                f"{type(env).__name__} is not an environment for agents",
                hint='an id such as "relax/Calculator-v0", or what make() returned',
            )
        return guarded(env)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode; without a seed, one drawn from this environment's generator."""
        super().reset(seed=seed)
        inner = int(self.np_random.integers(1 << 31)) if seed is None else int(seed)
        observation, info = self._run(self.agent_env.reset(seed=inner, options=options))
        self._messages = []
        return self._hear(observation), dict(info)

    def step(self, action: str | AssistantMessage) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one assistant message, as a string of the action space or as it is."""
        if isinstance(action, str):
            action = decode_action(action)
        if not isinstance(action, AssistantMessage):
            raise InvalidAction(
                f"an action is a string, not {type(action).__name__}",
                hint="relax_agent.gymnasium.encode_action makes one",
            )
        result = self._run(self.agent_env.step(action))
        observation, reward, terminated, truncated, info = result
        self._messages.append(action)
        return self._hear(observation), float(reward), terminated, truncated, dict(info)

    def _hear(self, observation: Observation) -> str:
        if isinstance(observation, Rewrite):
            self._messages = list(observation.messages)
        else:
            self._messages.extend(observation)
        return encode_observation(observation)

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(call, self._timeout_s)

    def render(self) -> Any:
        """Return the conversation so far."""
        return conversation_text(self._messages) if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Close the environment. May be called twice."""
        if not self._closed:
            self._closed = True
            self._run(self.agent_env.close())

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and hasattr(self, "agent_env"):
            self._closed = True
            if self._loop.here:
                self._loop.leave(self.agent_env.close())


@functools.cache
def agent_env_class() -> type[gymnasium.Env[str, str]]:
    """Return :class:`relax_agent.gymnasium.AgentEnv`, a true ``gymnasium.Env``."""
    gymnasium = require("gymnasium", "gymnasium", extra="envs")
    body = {"__doc__": as_gymnasium.__doc__, "__module__": "relax_agent.gymnasium"}
    made: Any = type("AgentEnv", (_AgentEnv, gymnasium.Env), body)
    return made  # type: ignore[no-any-return]


def as_gymnasium(env: Env | SyncEnv | EnvSpec | str, **options: Any) -> gymnasium.Env[str, str]:
    """Make an environment for agents a Gymnasium environment.

    Args:
        env: An environment, its spec or its id.
        **options: ``render_mode="ansi"``, ``max_chars``, ``timeout_s``; for an id or a spec also
            the arguments of its constructor.
    """
    made: Any = agent_env_class()
    return made(env, **options)


def _gym_spec(gymnasium: Any, env: Env) -> Any:
    """Return a Gymnasium spec that rebuilds the environment; None if nothing can."""
    if env.spec is None:
        return None
    try:
        text = env.spec.to_json()
    except ConfigError:
        return None
    kwargs = {"relax_spec": text}
    return gymnasium.envs.registration.EnvSpec(env.spec.id, ENTRY_POINT, kwargs=kwargs)
