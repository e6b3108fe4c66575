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

import asyncio
import contextlib
import difflib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from typing import Any, TypeAlias, TypeVar, overload

from relax_agent.envs.core import Env, SyncEnv, Wrapper, plain_calls
from relax_agent.envs.guard import Guard
from relax_agent.envs.specs import (
    EntryPoint,
    EnvSpec,
    Isolation,
    WrapperSpec,
    check_isolation,
    label_of,
    parse_id,
    require_full_id,
)
from relax_agent.envs.threaded import START_TIMEOUT_S, ThreadedEnv
from relax_agent.errors import ConfigError, EnvError, RelaxError, UnknownEnv, at_line, one_line
from relax_agent.importing import import_named
from relax_agent.limits import STOPS
from relax_agent.threads import THREADS

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "relax_agent.envs"
WrapperLike: TypeAlias = WrapperSpec | EntryPoint | tuple[EntryPoint, Mapping[str, Any]]
"""A wrapper as people write it: a class, or a pair of a class and its arguments."""
C = TypeVar("C", bound=Callable[..., Any])


registry: dict[str, EnvSpec] = {}
"""Every registered environment by id."""
watchers: list[Callable[[EnvSpec], object]] = []
"""Called with each spec that is registered from then on."""
_loaded_plugins = False


@overload
def register(
    id: str,
    entry_point: None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[WrapperLike] = (),
    isolation: Isolation | None = None,
) -> Callable[[C], C]: ...
@overload
def register(
    id: str,
    entry_point: EntryPoint,
    *,
    kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[WrapperLike] = (),
    isolation: Isolation | None = None,
) -> EnvSpec: ...
def register(
    id: str,
    entry_point: EntryPoint | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[WrapperLike] = (),
    isolation: Isolation | None = None,
) -> Any:
    """Register an environment; without an entry point, a decorator for its class.

    The same class may be registered again (a notebook cell that runs twice); another one under
    the same id is refused.

    Args:
        id: ``namespace/Name-v0``.
        entry_point: ``module:Class``, or anything that returns an environment when called.
        kwargs: Arguments of the constructor; ``make`` may override them.
        wrappers: Put around the environment, the first innermost: classes, or pairs of a class and
            its arguments, ``(TimeLimit, {"max_turns": 3})``.
        isolation: ``"process"`` runs each environment in a process of its own, for code that may
            hang or crash.
    """
    require_full_id(id)
    check_isolation(isolation)
    if entry_point is None:

        def decorate(target: C) -> C:
            register(id, target, kwargs=kwargs, wrappers=wrappers, isolation=isolation)
            return target

        return decorate
    around = tuple(_wrapper_spec(id, item) for item in wrappers)
    spec = EnvSpec(id, entry_point, dict(kwargs or {}), around, isolation)
    known = registry.get(id)
    if known is not None and label_of(known.entry_point) != label_of(entry_point):
        raise ConfigError(
            f"{id} is registered already, as {label_of(known.entry_point)}",
            hint="choose another name or version",
        )
    registry[id] = spec
    for watch in watchers:
        watch(spec)
    return spec


def _wrapper_spec(owner: str, item: object) -> WrapperSpec:
    if isinstance(item, WrapperSpec):
        return item
    entry, kwargs = item if isinstance(item, (tuple, list)) and len(item) == 2 else (item, {})
    if not (isinstance(entry, str) or callable(entry)) or not isinstance(kwargs, Mapping):
        raise ConfigError(
            f"{owner}: {item!r:.80} is no wrapper",
            hint='wrappers=[(TimeLimit, {"max_turns": 3})]',
        )
    return WrapperSpec(entry, dict(kwargs))


def _resolve(
    env: str | EnvSpec | type, isolation: Isolation | None, kwargs: Mapping[str, Any]
) -> EnvSpec:
    """Return the spec of what is to be built, all its arguments included."""
    check_isolation(isolation)
    chosen = _spec_of(env)
    return replace(
        chosen,
        kwargs={**chosen.kwargs, **kwargs},
        isolation=isolation if isolation is not None else chosen.isolation,
    )


def _spec_of(env: str | EnvSpec | type) -> EnvSpec:
    """Return the spec of what ``make`` was given, which may be a class that has no id."""
    if isinstance(env, str):
        return spec(env)
    if isinstance(env, EnvSpec):
        return env
    if isinstance(env, type) and issubclass(env, (Env, SyncEnv)):
        return EnvSpec(env.__name__, env)
    words = "an environment already" if isinstance(env, (Env, SyncEnv)) else "no environment"
    raise ConfigError(
        f"make() got {env!r:.80}, which is {words}",
        hint="it takes an id, a spec, an address or a class",
    )


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


def make(
    env: str | EnvSpec | type[Env] | type[SyncEnv],
    /,
    *,
    isolation: Isolation | None = None,
    start_timeout_s: float | None = None,
    **kwargs: Any,
) -> Env:
    """Build an environment from its id, its spec, its class, or the address it is served at.

    Args:
        env: ``namespace/Name-v0``, a spec, a class, or ``ws://host:port`` of ``relax-agent envs
            serve`` (``http://…`` for networks that let no WebSocket through).
        isolation: ``"process"`` runs it in a process of its own; None does what its spec says.
        start_timeout_s: Seconds that the constructor of a plain environment or the start of a
            process may take (by default 300), or a server to answer (by default 30).
        **kwargs: Arguments of the constructor, over those of the spec. For an address, those of
            the connection, e.g. ``token=…``.
    """
    return _plan(env, isolation, start_timeout_s, kwargs)[1]()


async def make_async(
    env: str | EnvSpec | type[Env] | type[SyncEnv],
    /,
    *,
    isolation: Isolation | None = None,
    start_timeout_s: float | None = None,
    **kwargs: Any,
) -> Env:
    """Build an environment as :func:`make` does, without blocking the event loop meanwhile.

    The constructor of a plain environment (``def reset``) may boot a sandbox or a browser; it runs
    in the environment's own thread anyway. That of an async one runs here, where it may use the
    loop; what takes long belongs into its ``reset``.
    """
    blocks, build = _plan(env, isolation, start_timeout_s, kwargs)
    if not blocks:
        return build()
    job = THREADS.submit(build)
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        job.add_done_callback(_close_late)
        raise


_late: set[asyncio.Task[None]] = set()


def _close_late(job: asyncio.Future[Env]) -> None:
    """Close an environment that was built after its caller had gone."""
    if not job.cancelled() and job.exception() is None:
        task = asyncio.ensure_future(job.result().close())
        _late.add(task)
        task.add_done_callback(_late.discard)


def planned(
    env: str | EnvSpec, isolation: Isolation | None, kwargs: dict[str, Any]
) -> EnvSpec | None:
    """Check what ``make`` would be given; return the spec, or None for an address."""
    _plan(env, isolation, None, kwargs)
    return None if _is_address(env) else _resolve(env, isolation, kwargs)


def _is_address(env: object) -> bool:
    return isinstance(env, str) and env.startswith(("ws://", "wss://", "http://", "https://"))


def _plan(
    env: str | EnvSpec | type,
    isolation: Isolation | None,
    start_timeout_s: float | None,
    kwargs: dict[str, Any],
) -> tuple[bool, Callable[[], Env]]:
    """Return what builds the environment, and whether it may block for long."""
    if _is_address(env):
        return True, partial(_connect, str(env), isolation, start_timeout_s, kwargs)
    chosen = _resolve(env, isolation, kwargs)
    seconds = START_TIMEOUT_S if start_timeout_s is None else start_timeout_s
    if chosen.isolation == "process":
        return True, partial(_isolated, chosen, seconds)
    factory = _load(chosen.entry_point, chosen.id)
    _check_arguments(chosen.id, factory, chosen.kwargs)
    return _is_plain(factory), partial(_here, factory, chosen, seconds)


def _connect(
    url: str, isolation: Isolation | None, start_timeout_s: float | None, kwargs: dict[str, Any]
) -> Env:
    from relax_agent.envs.serving.remote import connect_env

    if isolation is not None:
        raise ConfigError(
            f"{url} runs elsewhere already", hint="leave isolation out, the server decides"
        )
    if start_timeout_s is not None:
        kwargs = {"start_timeout_s": start_timeout_s, **kwargs}
    _check_arguments(url, partial(connect_env, url), kwargs)
    return Guard(connect_env(url, **kwargs))


def _isolated(chosen: EnvSpec, start_timeout_s: float) -> Env:
    """Build the environment, its wrappers included, in a process of its own."""
    from relax_agent.envs.serving.process import ProcessEnv

    return Guard(ProcessEnv(chosen, start_timeout_s=start_timeout_s))


def _here(factory: Callable[..., Any], chosen: EnvSpec, start_timeout_s: float) -> Env:
    with _blamed(f"{chosen.id}: its constructor"):
        built = _construct(factory, chosen, start_timeout_s)
    built.spec = replace(chosen, wrappers=())
    for item in chosen.wrappers:
        built = _wrapped(built, item, chosen.id)
    return Guard(built)


def _wrapped(built: Env, item: WrapperSpec, env_id: str) -> Env:
    owner = f"{env_id}: {label_of(item.entry_point)}"
    wrap = partial(_load(item.entry_point, env_id), built)
    _check_arguments(owner, wrap, item.kwargs)
    with _blamed(owner):
        wrapped = wrap(**item.kwargs)
    if not isinstance(wrapped, Env):
        raise ConfigError(
            f"{owner} gave {type(wrapped).__name__}, not an Env",
            hint="derive the class from relax_agent.Wrapper",
        )
    wrapped.require_built()
    return wrapped


@contextlib.contextmanager
def _blamed(what: str) -> Iterator[None]:
    """Name whose code raised, in an EnvError."""
    try:
        yield
    except (RelaxError, *STOPS):
        raise
    except BaseException as error:
        raise EnvError(f"{what} raised {one_line(error)}{at_line(error)}") from error


def _construct(factory: Callable[..., Any], chosen: EnvSpec, start_timeout_s: float) -> Env:
    if _is_plain(factory):
        threaded = ThreadedEnv(lambda: factory(**chosen.kwargs), start_timeout_s=start_timeout_s)
        threaded.inner.require_built()
        return threaded
    built = factory(**chosen.kwargs)
    if not isinstance(built, (Env, SyncEnv)):
        raise ConfigError(
            f"{chosen.id}: {label_of(chosen.entry_point)} gave {type(built).__name__}, not an Env",
            hint="derive the class from relax_agent.Env, SyncEnv or ToolEnv",
        )
    built.require_built()
    if isinstance(built, Env) and not plain_calls(type(built)):
        return built
    return ThreadedEnv(lambda: built)


def _is_plain(factory: object) -> bool:
    """Whether this is the class of an environment that lives in a thread, constructor included."""
    return (
        isinstance(factory, type)
        and issubclass(factory, (Env, SyncEnv))
        and not plain_calls(factory).isdisjoint(("reset", "step"))
    )


def load_plugins() -> None:
    """Load the environments of installed packages, once. A broken one is reported, not fatal."""
    global _loaded_plugins
    if _loaded_plugins:
        return
    _loaded_plugins = True
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            target = point.load()
            if callable(target) and not isinstance(target, type):
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
        hint=(f"did you mean {known}, or" if known else "see relax-agent envs list, or name")
        + " one of your own with its module: my_module:me/Name-v0",
    )


def load_entry_point(chosen: EnvSpec) -> Callable[..., Any]:
    """Import what a spec names, usually the environment's class."""
    return _load(chosen.entry_point, chosen.id)


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


def _check_arguments(owner: str, factory: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError, naming what the arguments are, if the given ones do not fit."""
    try:  # kept for classes only: a partial holds an environment
        known = _signature if isinstance(factory, type) else inspect.signature
        signature = known(factory)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        names = ", ".join(signature.parameters) or "none"
        raise ConfigError(f"{owner}: {error}", hint=f"arguments: {names}") from error


_signature = functools.lru_cache(maxsize=256)(inspect.signature)


__all__ = [
    "EnvSpec",
    "Wrapper",
    "WrapperSpec",
    "load_plugins",
    "make",
    "make_async",
    "parse_id",
    "register",
    "registry",
    "spec",
]
