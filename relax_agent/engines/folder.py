"""What a model's folder in Hugging Face layout says about the model, without loading it.

Only ``config.json`` and the headers of the safetensors files are read, so this needs no torch and
takes milliseconds. The :data:`Manifest` guards weight updates: SGLang silently keeps the old
values of tensors that are missing, ignores names that it does not know, and dies of a wrong
shape. So whoever sends weights compares names and shapes before anything is sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from relax_agent.engines.wire import RouteShape
from relax_agent.errors import ConfigError, StorageError

Manifest = Mapping[str, tuple[int, ...]]
"""The shape of each tensor by its name."""

_HEADER_LIMIT = 100 * 2**20


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a client must know of a model to send it well-formed requests."""

    vocab_size: int
    """Token ids lie below."""
    context_length: int
    """Most tokens of a prompt and its answer together."""
    routes: RouteShape | None
    """Shape of routed experts; None for a dense model."""


def read_model_facts(folder: str | Path) -> ModelFacts:
    """Read a model's config.json.

    Raises:
        ConfigError: if it cannot be read or lacks what every language model has.
    """
    file = Path(folder) / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text())
        config = config.get("text_config", config)
        return ModelFacts(
            config["vocab_size"], config["max_position_embeddings"], _route_shape(config)
        )
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{file} does not describe a language model: {error!r}") from error


def _route_shape(config: Mapping[str, Any]) -> RouteShape | None:
    keys = ("num_experts", "n_routed_experts", "num_local_experts")
    experts = next((config[key] for key in keys if config.get(key)), None)
    if experts is None:
        return None
    return RouteShape(config["num_hidden_layers"], config["num_experts_per_tok"], experts)


def weight_files(folder: str | Path) -> list[Path]:
    """List the safetensors files of a model in a fixed order.

    Raises:
        StorageError: if there are none.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise StorageError(f"{folder} holds no .safetensors file")
    return files


def read_manifest(folder: str | Path) -> Manifest:
    """Read names and shapes of all tensors of a model.

    Raises:
        StorageError: if a file cannot be read or names a tensor again.
    """
    manifest: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        for name, shape in _read_header(file).items():
            if name in manifest:
                raise StorageError(f"{file} names tensor {name} a second time")
            manifest[name] = shape
    return manifest


def _read_header(file: Path) -> Manifest:
    try:
        with file.open("rb") as stream:
            return read_header(stream)
    except OSError as error:
        raise StorageError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{file} is not a safetensors file: {error}") from error


def read_header(stream: BinaryIO) -> Manifest:
    """Read names and shapes from the start of one safetensors file.

    Raises:
        ValueError: if it is not one.
    """
    size = int.from_bytes(stream.read(8), "little")
    if not 2 <= size <= _HEADER_LIMIT:
        raise ValueError(f"a header of {size} bytes")
    header = json.loads(stream.read(size))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def manifest_difference(new: Manifest, served: Manifest) -> str | None:
    """Say in one line how new weights differ in names or shapes from the served ones."""
    missing, unknown = sorted(served.keys() - new.keys()), sorted(new.keys() - served.keys())
    wrong = sorted(name for name in served.keys() & new.keys() if new[name] != served[name])
    parts = []
    if missing:
        parts.append(f"{len(missing)} missing, first {missing[0]}")
    if unknown:
        parts.append(f"{len(unknown)} unknown, first {unknown[0]}")
    if wrong:
        name = wrong[0]
        parts.append(
            f"{len(wrong)} of wrong shape, first {name}: {list(new[name])} for {list(served[name])}"
        )
    return "; ".join(parts) or None
