"""Making Gymnasium's environments, with errors that say what to do; and what they render."""

from __future__ import annotations

import io
from typing import Any

from relax_agent.envs.adapters.common import require, unknown
from relax_agent.errors import ConfigError, EnvError, MissingExtraError
from relax_agent.importing import import_named
from relax_agent.messages import Image


def open_gymnasium(env_id: Any, env_args: dict[str, Any], render_mode: str | None) -> Any:
    """Return the Gymnasium environment of an id, or one that is given.

    Args:
        env_id: Gymnasium's id, or an environment.
        env_args: Arguments for ``gymnasium.make``.
        render_mode: What it must render as; None if it need not.

    Raises:
        UnknownEnv: There is no such id; names the nearest.
        ConfigError: It cannot be made or rendered like this.
        MissingExtraError: Gymnasium is not installed.
    """
    gymnasium = require("gymnasium", "gymnasium", extra="envs")
    if isinstance(env_id, gymnasium.Env):
        if env_args:
            raise ConfigError("env_args are for an id; this environment is made already")
        _require_mode(env_id, env_id.render_mode, render_mode)
        return env_id
    if not isinstance(env_id, str):
        raise ConfigError(f"{env_id!r} is neither an id nor a gymnasium.Env")
    _require_registered(gymnasium, env_id)
    if render_mode is not None:
        env_args.setdefault("render_mode", render_mode)
    try:
        env = gymnasium.make(env_id, **env_args)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(f"{env_id} needs another package: {error}") from error
    _require_mode(env, env.render_mode, render_mode)
    return env


def _require_registered(gymnasium: Any, env_id: str) -> None:
    module, _, name = env_id.rpartition(":")
    if module:
        import_named(module)
    try:
        gymnasium.spec(name)
    except gymnasium.error.UnregisteredEnv as error:
        raise unknown("Gymnasium environment", name, gymnasium.registry) from error
    except gymnasium.error.Error as error:
        raise ConfigError(f"{env_id!r} is not an id of Gymnasium", hint=str(error)) from error


def _require_mode(env: Any, mode: str | None, wanted: str | None) -> None:
    """Raise ConfigError if the environment does not render what shall be shown."""
    offered = env.metadata.get("render_modes") or []
    if wanted is None or (mode == wanted and wanted in offered):
        return
    if wanted in offered:
        raise ConfigError(
            f"the environment was made with render_mode={mode!r}", hint=f"make it with {wanted!r}"
        )
    raise ConfigError(
        f"the environment does not render as {wanted}, only as {', '.join(offered) or 'nothing'}",
        hint='observation="text"',
    )


def to_png(pixels: Any) -> Image:
    """Return an array of pixels, ``[height, width, 3]``, as a PNG."""
    try:
        import PIL.Image
    except ModuleNotFoundError as error:
        raise MissingExtraError("pillow", "media") from error
    if pixels is None:
        raise EnvError("the environment rendered nothing", hint='render_mode="rgb_array"')
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    return Image(buffer.getvalue())
