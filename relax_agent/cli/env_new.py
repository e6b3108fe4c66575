"""``relax-agent envs new``: a working environment to begin with, and a test beside it."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from relax_agent.cli.env_templates import TEMPLATES, code_of_test, environment_code
from relax_agent.errors import ConfigError, StorageError

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_KINDS = ", ".join(f"{kind} ({template.about})" for kind, template in TEMPLATES.items())


def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Of the module, such as my_env: NAME.py.")
    ],
    kind: Annotated[str, typer.Option(help=f"What to begin with: {_KINDS}.")] = "tool",
    folder: Annotated[Path, typer.Option(help="Where to write; made if need be.")] = Path(),
) -> None:
    """Write a new environment that works, and a test that passes, and say what to do next."""
    _check(name, kind)
    class_name = "".join(word.capitalize() for word in name.split("_"))
    env_id = f"{name}/{class_name}-v0"
    files = {
        folder / f"{name}.py": environment_code(kind, name, class_name, env_id),
        folder / f"test_{name}.py": code_of_test(kind, name, class_name, env_id),
    }
    taken = [path for path in files if path.exists() or path.is_symlink()]
    if taken:
        raise ConfigError(f"{taken[0]} exists already", hint="choose another name or --folder")
    _write(folder, files)
    for path in files:
        typer.echo(f"wrote {path}")
    typer.echo(_next(f"{name}:{env_id}", folder, TEMPLATES[kind].extra))


def _check(name: str, kind: str) -> None:
    if kind not in TEMPLATES:
        raise ConfigError(f"there is no kind {kind!r}", hint=f"--kind {' | '.join(TEMPLATES)}")
    if not _NAME.fullmatch(name) or keyword.iskeyword(name) or name.startswith("test_"):
        wanted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", Path(name).stem)
        wanted = re.sub(r"[^a-z0-9]+", "_", wanted.lower()).strip("_")
        good = wanted if _NAME.fullmatch(wanted) and not keyword.iskeyword(wanted) else "my_env"
        raise ConfigError(
            f"{name!r} cannot be a module's name",
            hint=f"small letters, digits and _, beginning with a letter: {good}",
        )
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise ConfigError(
            f"a module called {name} exists already; `import {name}` would find that one",
            hint=f"e.g. {name}_env",
        )


def _write(folder: Path, files: dict[Path, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise StorageError(
            f"cannot write {error.filename or folder}: {error.strerror}",
            hint="choose a folder that you may write to: --folder",
        ) from error


def _next(env: str, folder: Path, extra: str | None) -> str:
    steps = [
        ("pytest -q", "its test"),
        (f"relax-agent envs check {env}", "what is not in order, and what to change"),
        (f"relax-agent play {env}", "you are the model"),
        (f"relax-agent eval {env} --model NAME --base-url URL", "how well a model does"),
        ("relax-agent train RECIPE.yaml", f"with `env: {{id: {env}}}`; see docs/recipes.md"),
    ]
    if folder.resolve() != Path.cwd():
        steps.insert(0, (f"cd {shlex.quote(str(folder))}", ""))
    if extra is not None and importlib.util.find_spec("PIL") is None:
        steps.insert(0, (f"pip install 'relax-agent[{extra}]'", "it makes pictures"))
    width = max(len(command) for command, _ in steps[:-2])
    lines = [f"  {command:{width}}  {f'# {why}' if why else ''}".rstrip() for command, why in steps]
    return "\n".join(["", "Change it to your task, and then:", *lines])
