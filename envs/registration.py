"""The registry: an id stands for an environment, and ``make`` builds it.

Ids look as in Gymnasium: ``namespace/Name-v0``. Without a version the newest one is meant.
``module:namespace/Name-v0`` imports ``module`` first, so that its ``register`` calls have run.
Packages add environments by an entry point of the group ``relax_agent.envs`` that names a module
(importing it registers) or a function (calling it does); they are loaded when an id is not found
or when the registry is listed.

``make`` returns the environment behind a guard that checks the order of calls, and gives plain
``def`` environments their own thread. ``env.spec`` goes to JSON and rebuilds the environment.
"""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import entry_points
from typing import Any, TypeVar, overload

from relax_agent.envs.core import Env, SyncEnv, Wrapper
from relax_agent.envs.guard import Guard
from relax_agent.envs.threaded import ThreadedEnv
from relax_agent.errors import ConfigError, EnvError, RelaxError, UnknownEnv
from relax_agent.importing import import_named
from relax_agent.threads import THREADS

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "relax_agent.envs"
_ID = re.compile(r"(?:(?P<namespace>[\w-]+)/)?(?P<name>[\w.-]+?)(?:-v(?P<version>\d+))?")
C = TypeVar("C", bound=Callable[..., Any])
EntryPoint = str | Callable[..., Any]


@dataclass(frozen=True)
class WrapperSpec:
    """A wrapper and its arguments, as a spec names them."""

    entry_point: EntryPoint
    """``module:Class``, or the class itself."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EnvSpec:
    """The registered description of an environment. It rebuilds it: ``make(spec)``."""

    id: str
    """``namespace/Name-v0``."""
    entry_point: EntryPoint
    """``module:Class``, or the class itself."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the constructor."""
    wrappers: tuple[WrapperSpec, ...] = ()
    """Put around the environment, the first innermost."""

    @property
    def namespace(self) -> str | None:
        """What stands before the slash."""
        return parse_id(self.id)[0]

    @property
    def name(self) -> str:
        """The id without namespace and version."""
        return parse_id(self.id)[1]

    @property
    def version(self) -> int | None:
        """The number after ``-v``."""
        return parse_id(self.id)[2]

    def make(self, **kwargs: Any) -> Env:
        """Build the environment."""
        return make(self, **kwargs)

    def to_json(self) -> str:
        """Return the spec as JSON, or raise ConfigError naming what is not plain data."""
        data: dict[str, Any] = {
            "id": self.id,
            "entry_point": _reference(self.entry_point),
            "kwargs": dict(self.kwargs),
            "wrappers": [
                {"entry_point": _reference(w.entry_point), "kwargs": dict(w.kwargs)}
                for w in self.wrappers
            ],
        }
        for part in (data, *data["wrappers"]):
            for key, value in part["kwargs"].items():
                _require_plain(self.id, key, value)
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> EnvSpec:
        """Rebuild a spec from :meth:`to_json`."""
        try:
            data = json.loads(text)
            wrappers = tuple(WrapperSpec(**item) for item in data.pop("wrappers", ()))
            spec = cls(**data, wrappers=wrappers)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"this is not an environment spec: {error}") from error
        parse_id(spec.id)
        return spec


registry: dict[str, EnvSpec] = {}
"""Every registered environment by id."""
_loaded_plugins = False


def parse_id(env_id: str) -> tuple[str | None, str, int | None]:
    """Split an id into namespace, name and version."""
    match = _ID.fullmatch(env_id)
    if match is None:
        raise ConfigError(
            f"{env_id!r} is not an environment id", hint="it looks like namespace/Name-v0"
        )
    version = match["version"]
    return match["namespace"], match["name"], None if version is None else int(version)


@overload
def register(
    id: str,
    entry_point: None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[WrapperSpec] = (),
) -> Callable[[C], C]: ...
@overload
def register(
    id: str,
    entry_point: EntryPoint,
    *,
    kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[WrapperSpec] = (),
) -> EnvSpec: ...
def register(
    id: str,
    entry_point: EntryPoint | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[WrapperSpec] = (),
) -> Any:
    """Register an environment; without an entry point, a decorator for its class.

    The same class may be registered again (a notebook cell that runs twice); another one under
    the same id is refused.

    Args:
        id: ``namespace/Name-v0``.
        entry_point: ``module:Class``, or anything that returns an environment when called.
        kwargs: Arguments of the constructor; ``make`` may override them.
        wrappers: Put around the environment, the first innermost.
    """
    parse_id(id)
    if entry_point is None:

        def decorate(target: C) -> C:
            register(id, target, kwargs=kwargs, wrappers=wrappers)
            return target

        return decorate
    spec = EnvSpec(id, entry_point, dict(kwargs or {}), tuple(wrappers))
    known = registry.get(id)
    if known is not None and _label(known.entry_point) != _label(entry_point):
        raise ConfigError(
            f"{id} is registered already, as {_label(known.entry_point)}",
            hint="choose another name or version",
        )
    registry[id] = spec
    return spec


def spec(env_id: str) -> EnvSpec:
    """Return the spec of an id, or raise UnknownEnv naming the nearest one."""
    module, _, bare = env_id.rpartition(":")
    if module:
        import_named(module)
    namespace, name, version = parse_id(bare)
    found = _find(namespace, name, version)
    if found is None:
        load_plugins()
        found = _find(namespace, name, version)
    if found is None:
        raise _unknown(bare)
    return found


def make(env: str | EnvSpec, **kwargs: Any) -> Env:
    """Build an environment from its id or spec.

    Args:
        env: ``namespace/Name-v0``, or a spec.
        **kwargs: Arguments of the constructor, over those of the spec.
    """
    factory, chosen = _resolve(env, kwargs)
    return _wrapped(_build(factory, chosen), chosen)


async def make_async(env: str | EnvSpec, **kwargs: Any) -> Env:
    """Build an environment as :func:`make` does, without blocking the event loop meanwhile.

    The constructor of a plain environment (``def reset``) may boot a sandbox or a browser; it runs
    in the environment's own thread anyway. That of an async one runs here, where it may use the
    loop; what takes long belongs into its ``reset``.
    """
    factory, chosen = _resolve(env, kwargs)
    if isinstance(factory, type) and _is_sync(factory):
        built = await THREADS.run(partial(_build, factory, chosen))
    else:
        built = _build(factory, chosen)
    return _wrapped(built, chosen)


def _resolve(env: str | EnvSpec, kwargs: Mapping[str, Any]) -> tuple[Callable[..., Any], EnvSpec]:
    """Return the constructor and the spec with all its arguments."""
    chosen = spec(env) if isinstance(env, str) else env
    chosen = replace(chosen, kwargs={**chosen.kwargs, **kwargs})
    factory = _load(chosen.entry_point, chosen.id)
    _check_arguments(factory, chosen)
    return factory, chosen


def _build(factory: Callable[..., Any], chosen: EnvSpec) -> Env:
    try:
        return _construct(factory, chosen)
    except RelaxError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise EnvError(f"{chosen.id}: its constructor raised {reason}") from error


def _wrapped(built: Env, chosen: EnvSpec) -> Env:
    built.spec = chosen
    for item in chosen.wrappers:
        built = _load(item.entry_point, chosen.id)(built, **item.kwargs)
    return Guard(built)


def _construct(factory: Callable[..., Any], chosen: EnvSpec) -> Env:
    if isinstance(factory, type) and _is_sync(factory):
        return ThreadedEnv(lambda: factory(**chosen.kwargs))
    built = factory(**chosen.kwargs)
    if _is_sync(type(built)):
        return ThreadedEnv(lambda: built)
    if not isinstance(built, Env):
        raise ConfigError(
            f"{chosen.id}: {_label(chosen.entry_point)} gave {type(built).__name__}, not an Env",
            hint="derive the class from relax_agent.Env, SyncEnv or ToolEnv",
        )
    return built


def _is_sync(kind: type) -> bool:
    """Whether ``reset`` and ``step`` are plain functions; a mixture is refused."""
    if not issubclass(kind, (Env, SyncEnv)):
        return False
    plain = [not inspect.iscoroutinefunction(getattr(kind, name)) for name in ("reset", "step")]
    if plain[0] != plain[1]:
        raise ConfigError(
            f"{kind.__name__} mixes async and plain functions",
            hint="write both reset and step as `async def`, or both as `def`",
        )
    return plain[0]


def pprint_registry() -> str:
    """Print every registered id, by namespace, and return what was printed."""
    load_plugins()
    spaces: dict[str, list[str]] = {}
    for item in sorted(registry.values(), key=lambda item: (item.namespace or "", item.id)):
        spaces.setdefault(item.namespace or "(none)", []).append(item.id)
    text = "\n".join(
        f"{space}\n" + "\n".join(f"  {env_id}" for env_id in ids) for space, ids in spaces.items()
    )
    sys.stdout.write(text + "\n")
    return text


def load_plugins() -> None:
    """Load the environments of installed packages, once. A broken one is reported, not fatal."""
    global _loaded_plugins
    if _loaded_plugins:
        return
    _loaded_plugins = True
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            target = point.load()
            if callable(target):
                target()
        except Exception as error:
            logger.warning("environment plugin %s (%s) failed: %r", point.name, point.value, error)


def _find(namespace: str | None, name: str, version: int | None) -> EnvSpec | None:
    same = [s for s in registry.values() if (s.namespace, s.name) == (namespace, name)]
    if version is not None:
        return next((s for s in same if s.version == version), None)
    return max(same, key=lambda s: -1 if s.version is None else s.version, default=None)


def _unknown(env_id: str) -> UnknownEnv:
    namespace, name, _ = parse_id(env_id)
    same = [s.id for s in registry.values() if (s.namespace, s.name) == (namespace, name)]
    if same:
        return UnknownEnv(f"{env_id} has no such version", hint=f"there is {', '.join(same)}")
    near = difflib.get_close_matches(env_id, registry, n=1, cutoff=0.5)
    known = near[0] if near else None
    return UnknownEnv(
        f"no environment is registered as {env_id!r}",
        hint=f"did you mean {known}?" if known else "relax-agent envs list",
    )


def _load(entry_point: EntryPoint, env_id: str) -> Callable[..., Any]:
    if not isinstance(entry_point, str):
        return entry_point
    module, _, attribute = entry_point.partition(":")
    target: Any = import_named(module)
    for step in attribute.split("."):
        if not hasattr(target, step):
            raise ConfigError(f"{env_id}: {module} has no {attribute!r}")
        target = getattr(target, step)
    if not callable(target):
        raise ConfigError(f"{env_id}: {entry_point} cannot be called")
    return target


def _check_arguments(factory: Callable[..., Any], chosen: EnvSpec) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**chosen.kwargs)
    except TypeError as error:
        names = ", ".join(signature.parameters) or "none"
        raise ConfigError(f"{chosen.id}: {error}", hint=f"arguments: {names}") from error


def _label(entry_point: EntryPoint) -> str:
    if isinstance(entry_point, str):
        return entry_point
    module = getattr(entry_point, "__module__", "?")
    return f"{module}:{getattr(entry_point, '__qualname__', repr(entry_point))}"


def _reference(entry_point: EntryPoint) -> str:
    """Return ``module:Class``, or raise ConfigError if it cannot be imported again."""
    label = _label(entry_point)
    if not isinstance(entry_point, str) and ("<" in label or label.startswith("__main__:")):
        raise ConfigError(
            f"{label} cannot be imported elsewhere", hint="define it at the top of a module"
        )
    return label


def _require_plain(env_id: str, key: str, value: Any) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{env_id}: argument {key!r} is not plain data: {error}") from error


__all__ = [
    "EnvSpec",
    "Wrapper",
    "WrapperSpec",
    "load_plugins",
    "make",
    "make_async",
    "parse_id",
    "pprint_registry",
    "register",
    "registry",
    "spec",
]
