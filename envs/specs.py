"""Descriptions of environments: ids, specs, and specs as JSON.

Ids look as in Gymnasium: ``namespace/Name-v0``. An :class:`EnvSpec` says how an environment is
built: entry point, arguments, wrappers, where it runs. As JSON it rebuilds the same elsewhere, so
everything in it must be plain data and importable by name; what is not is named in the error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from relax_agent.errors import ConfigError

if TYPE_CHECKING:
    from relax_agent.envs.core import Env

EntryPoint: TypeAlias = str | Callable[..., Any]
Isolation: TypeAlias = Literal["process"]

_ID = re.compile(r"(?:(?P<namespace>[\w-]+)/)?(?P<name>[\w.-]+?)(?:-v(?P<version>\d+))?")


def parse_id(env_id: str) -> tuple[str | None, str, int | None]:
    """Split an id into namespace, name and version."""
    match = _ID.fullmatch(env_id) if isinstance(env_id, str) else None
    if match is None:
        raise ConfigError(
            f"{env_id!r} is not an environment id", hint="it looks like namespace/Name-v0"
        )
    version = match["version"]
    return match["namespace"], match["name"], None if version is None else int(version)


def require_full_id(env_id: str) -> None:
    """Raise ConfigError unless the id has a namespace and a version, as registered ids do."""
    namespace, name, version = parse_id(env_id)
    missing = [
        word for word, part in (("namespace", namespace), ("version", version)) if part is None
    ]
    if missing:
        raise ConfigError(
            f"{env_id!r} cannot be registered: it has no {' and no '.join(missing)}",
            hint=f"an id looks like {namespace or 'my'}/{name}-v{version or 0}",
        )


def check_isolation(isolation: object) -> None:
    """Raise ConfigError for an isolation that does not exist."""
    if isolation not in (None, "process"):
        raise ConfigError(
            f"isolation={isolation!r} does not exist",
            hint='isolation="process", or leave it out to run the environment in this process',
        )


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
    isolation: Isolation | None = None
    """``process``: the environment runs in a process of its own, which can be killed."""

    def __post_init__(self) -> None:
        check_isolation(self.isolation)

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
        from relax_agent.envs.registration import make

        return make(self, **kwargs)

    def to_json(self) -> str:
        """Return the spec as JSON, or raise ConfigError naming what is not plain data."""
        for owner, kwargs in (
            (self.id, self.kwargs),
            *((f"{self.id}: {label_of(w.entry_point)}", w.kwargs) for w in self.wrappers),
        ):
            for key, value in kwargs.items():
                _require_plain(owner, key, value)
        return json.dumps(
            {
                "id": self.id,
                "entry_point": reference(self.entry_point),
                "kwargs": dict(self.kwargs),
                "wrappers": [
                    {"entry_point": reference(w.entry_point), "kwargs": dict(w.kwargs)}
                    for w in self.wrappers
                ],
                "isolation": self.isolation,
            }
        )

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


def label_of(entry_point: EntryPoint) -> str:
    """Return ``module:Class`` of an entry point, for people."""
    if isinstance(entry_point, str):
        return entry_point
    module = getattr(entry_point, "__module__", "?")
    return f"{module}:{getattr(entry_point, '__qualname__', repr(entry_point))}"


def reference(entry_point: EntryPoint) -> str:
    """Return ``module:Class``, or raise ConfigError if it cannot be imported again."""
    label = label_of(entry_point)
    if not isinstance(entry_point, str) and ("<" in label or label.startswith("__main__:")):
        raise ConfigError(
            f"{label} cannot be imported elsewhere", hint="define it at the top of a module"
        )
    return label


def _require_plain(owner: str, key: str, value: Any) -> None:
    if key.startswith("*"):
        raise ConfigError(
            f"{owner}: {key} takes arguments without a name", hint="make them keyword arguments"
        )
    try:
        json.dumps(value)
        _require_text_keys(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{owner}: argument {key!r} is not plain data: {error}") from error


def _require_text_keys(value: Any) -> None:
    """Raise TypeError for keys that JSON would turn into text without a word."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not text")
            _require_text_keys(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _require_text_keys(item)
