"""Options that several commands share: which environment, with which arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
import yaml

from relax_agent.errors import ConfigError
from relax_agent.importing import import_named

EnvId = Annotated[
    str,
    typer.Argument(metavar="ENV", help="namespace/Name-v0, module:namespace/Name-v0 or ws://…"),
]
EnvArguments = Annotated[
    list[str] | None,
    typer.Option(
        "--arg", metavar="KEY=VALUE", help="An argument of the environment's constructor."
    ),
]
Modules = Annotated[
    list[str] | None,
    typer.Option("--module", metavar="MODULE", help="Import this first; it may register more."),
]


def read_arguments(items: Sequence[str] | None) -> dict[str, Any]:
    """Turn ``KEY=VALUE`` texts into arguments; values are read as YAML, so ``3`` is a number.

    Raises:
        ConfigError: An item has no ``=``, a key comes twice or a value is not YAML.
    """
    arguments: dict[str, Any] = {}
    for item in items or ():
        key, equals, text = item.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"{item!r} is not an argument", hint="write --arg name=value")
        if key in arguments:
            raise ConfigError(f"--arg {key} is given twice")
        try:
            arguments[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"--arg {key}: {text!r} is not YAML: {reason}") from error
    return arguments


def import_modules(names: Sequence[str] | None) -> None:
    """Import modules that a person named, so that they register their environments."""
    for name in names or ():
        import_named(name)
