"""``isolation="process"``: an environment in a process of its own, which can be killed.

For environments that may hang or crash: a simulator with a segmentation fault, a game that never
returns, code that leaks. :class:`ProcessEnv` builds the environment from its spec in a child
process (:mod:`relax_agent.links`) and speaks to it over a socket pair.

* A call that is cancelled, as the loop that drives the environment does past its time limit, kills
  the child with all that it started. The next ``reset`` starts another one.
* A child that ends by itself (``os._exit``, a crash, ``kill -9``) is an EnvError that names its
  exit code and the last line it printed.
* What the environment prints goes to this process's standard error.

The child imports the class by name, with this process's ``sys.path`` and working folder. A class
of ``__main__`` or inside a function cannot be imported again and is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from dataclasses import replace
from typing import Any

from relax_agent.envs.core import Info
from relax_agent.envs.serving import wire
from relax_agent.envs.serving.proxies import ProxyEnv
from relax_agent.envs.serving.session import EnvSession, describe_env
from relax_agent.envs.serving.wire import Blobs, Json
from relax_agent.envs.specs import EnvSpec
from relax_agent.errors import ChildDied, ConfigError, EnvError, ResetNeeded
from relax_agent.links import LinkedProcess, serve_link
from relax_agent.messages import Observation

_GRACE_S = 5.0
"""Seconds that closing may take before the child is killed."""


class ProcessEnv(ProxyEnv):
    """An environment in a process of its own; see the module's promises."""

    def __init__(self, spec: EnvSpec, *, start_timeout_s: float = 300.0) -> None:
        """Start the child and build the environment in it; blocks meanwhile.

        Args:
            spec: What to build, wrappers included.
            start_timeout_s: Seconds that start and constructor may take together.

        Raises:
            ConfigError: The environment cannot be imported or described elsewhere.
            EnvError: It was not built in time, its constructor raised, or the child died.
        """
        self.spec = replace(spec, isolation="process")
        self._birth = _birth(spec)
        self._start_timeout_s = start_timeout_s
        self._closed = False
        with _told(spec.id), self._child_arguments() as arguments:
            self._link = LinkedProcess.start(**arguments)
        self._introduce(wire.read_manifest(self._link.hello))

    @contextlib.contextmanager
    def _child_arguments(self) -> Any:
        """Yield what LinkedProcess.start takes; the birth lies in a file that nobody else sees."""
        with tempfile.TemporaryFile() as file:
            file.write(self._birth)
            file.seek(0)
            assert self.spec is not None
            yield {
                "name": self.spec.id,
                "argv": [sys.executable, "-m", __name__, str(file.fileno())],
                "start_timeout_s": self._start_timeout_s,
                "pass_fds": [file.fileno()],
                "failure": EnvError,
                "on_output": _print,
            }

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode; in a new child, if the last one was killed or has died."""
        if self._closed:
            raise ResetNeeded(f"{self._name} is closed", hint="make() another one")
        if not self._link.alive:
            await self._restart()
        return await super().reset(seed=seed, options=options)

    async def _restart(self) -> None:
        with _told(self._name), self._child_arguments() as arguments:
            await self._link.close()
            self._link = await LinkedProcess.start_async(**arguments)

    @property
    def _name(self) -> str:
        assert self.spec is not None
        return self.spec.id

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._link.pid

    async def close(self) -> None:
        """Close the environment and end its process; kills what does not end within seconds."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._link.alive:
                with _told(self._name):
                    await self._link.request({"op": "close"}, timeout_s=_GRACE_S)
        finally:
            await self._link.close(_GRACE_S)

    async def _ask(self, request: Json, blobs: Blobs) -> tuple[Json, Blobs]:
        with _told(self._name):
            return await self._link.request(request, blobs)


def _birth(spec: EnvSpec) -> bytes:
    """Return all that the child has to know, as JSON."""
    try:
        text = replace(spec, isolation=None).to_json()
    except ConfigError as error:
        raise ConfigError(
            f"{error.message}, and so not in a process of its own", hint=error.hint
        ) from None
    return json.dumps({"spec": text, "path": sys.path}).encode()


@contextlib.contextmanager
def _told(name: str) -> Any:
    """Tell the death of a child as the environment's failure."""
    try:
        yield
    except ChildDied as error:
        how = error.message.removeprefix(f"{name} ")
        raise EnvError(f"{name}: its process {how}", hint=error.hint) from error


def _print(data: bytes) -> None:
    """Pass on what the environment prints; unbuffered, as this thread may end at any moment."""
    out = sys.stderr
    try:
        direct = out.fileno() == 2
    except (AttributeError, OSError, ValueError):  # a notebook's, or none
        direct = False
    if direct:
        os.write(2, data)
    elif out is not None:
        out.write(data.decode("utf-8", "replace"))


class _Life:
    """The child's side: one environment, from setup to teardown."""

    def __init__(self, spec: EnvSpec) -> None:
        self._spec = spec
        self._session: EnvSession | None = None

    def setup(self) -> Json:
        from relax_agent.envs.registration import make

        env = make(self._spec)
        manifest = describe_env(env, self._spec.id)
        self._session = EnvSession(env, manifest["tools"])
        return manifest

    async def answer(self, request: Json, blobs: Blobs) -> tuple[Json, Blobs]:
        assert self._session is not None
        return await self._session.answer(request, blobs)

    async def teardown(self) -> None:
        if self._session is not None:
            await self._session.env.close()


def main() -> None:
    """Build the environment that the parent describes and serve it until the link closes."""
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        birth = json.load(file)
    sys.path[:] = birth["path"]
    life = _Life(EnvSpec.from_json(birth["spec"]))
    serve_link(life.answer, setup=life.setup, teardown=life.teardown)


if __name__ == "__main__":
    main()
