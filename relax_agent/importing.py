"""Importing a module that a person named: in a recipe, a command line or an environment id.

Programs installed as scripts do not look for modules in the current folder; a person who just wrote
``shop.py`` there expects it. The folder is put at the end of the path, where it shadows nothing.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from relax_agent.errors import ConfigError, RelaxError


def import_named(name: str) -> ModuleType:
    """Import a module, or raise ConfigError that says why it cannot be."""
    if name.endswith(".py") or "/" in name:
        stem = Path(name).stem
        raise ConfigError(
            f"{name} is a file, not a module", hint=f"name it as `import` does: {stem}"
        )
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except RelaxError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"cannot import {name}: {error.msg}", hint="is it on the path or in this folder?"
        ) from error
    except Exception as error:
        raise ConfigError(f"cannot import {name}: {type(error).__name__}: {error}") from error
