"""Weight updates that happen as a whole or not at all.

A **session** collects named tensors and checks each against the names and shapes of the
checkpoint that the engine was started from. At its end nothing may be missing. The tensors then
go through transformers' own loading (which knows how a checkpoint's names map to the model's)
into a second model, and only when that has worked are its parameters copied into the one that
serves. Until that copy, which cannot fail, the old weights are untouched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relax_agent.errors import EngineRejected

Shapes = Mapping[str, tuple[int, ...]]
_LISTED = 5


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder, as its index names them.

    Raises:
        EngineRejected: if there are none.
    """
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [folder / name for name in names]
        else:
            files = sorted(folder.glob("*.safetensors"))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise EngineRejected(f"cannot read {index}: {error}") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        what = f"{', '.join(missing)} missing" if missing else "no safetensors file"
        raise EngineRejected(f"no weights in {folder}: {what}")
    return files


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Read names and shapes of all tensors of a model folder, without the tensors."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in checkpoint_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return shapes


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Load all tensors of a model folder."""
    tensors: dict[str, Tensor] = {}
    for file in checkpoint_files(folder):
        try:
            # Read, not mapped: whoever writes the folder may write it again while we hold it.
            tensors |= read_bucket(file.read_bytes())
        except (EngineRejected, OSError) as error:
            raise EngineRejected(f"cannot read {file}: {error}") from error
    return tensors


def read_bucket(bucket: bytes) -> dict[str, Tensor]:
    """Load the tensors of one safetensors file held in memory."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(bucket)
    except SafetensorError as error:
        raise EngineRejected(f"the body is not a safetensors file: {error}") from error


class WeightSession:
    """Collects one set of weights."""

    def __init__(self, model: Any, shapes: Shapes) -> None:
        """Open a session for ``model``, whose checkpoint has tensors of these ``shapes``."""
        self._model = model
        self._shapes = shapes
        self._tied = _tied_names(model)
        self._tensors: dict[str, Tensor] = {}
        self.version: str | None = None

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Take some tensors.

        Raises:
            EngineRejected: naming tensors that are unknown, came twice or do not fit; then none
                of them is taken.
        """
        known = self._shapes.keys() | self._tied.keys()
        _refuse("unknown to the model", sorted(tensors.keys() - known))
        _refuse("given twice", sorted(tensors.keys() & self._tensors.keys()))
        wrong = [
            f"{name} {tuple(tensor.shape)} instead of {self._shapes[name]}"
            for name, tensor in tensors.items()
            if name in self._shapes and tuple(tensor.shape) != self._shapes[name]
        ]
        _refuse("of the wrong shape", wrong)
        bad = [name for name, tensor in tensors.items() if not tensor.is_floating_point()]
        _refuse("not floating point", bad)
        self._tensors.update(tensors)

    def commit(self) -> None:
        """Put the collected weights in force.

        Raises:
            EngineRejected: naming what is missing; the old weights stay in force.
        """
        missing = self._shapes.keys() - self._tensors.keys() - self._tied.keys()
        _refuse("missing", sorted(missing))
        differ = [
            name
            for name, source in self._tied.items()
            if name in self._tensors
            and source in self._tensors
            and not torch.equal(self._tensors[name], self._tensors[source])
        ]
        _refuse("tied to another tensor in this model but differ from it", differ)
        _swap(self._model, self._stage())

    def _stage(self) -> Any:
        """Build a second model out of the collected tensors."""
        model = self._model
        try:
            staged, info = type(model).from_pretrained(
                None,
                config=model.config,
                state_dict=dict(self._tensors),
                dtype=model.dtype,
                output_loading_info=True,
            )
        except (RuntimeError, ValueError, KeyError) as error:
            raise EngineRejected(f"the weights cannot be loaded: {error}") from error
        _refuse("missing", sorted(info["missing_keys"]))
        _refuse("unknown to the model", sorted(info["unexpected_keys"]))
        return staged


@torch.no_grad()
def _swap(model: Any, staged: Any) -> None:
    new = dict(staged.named_parameters()) | dict(staged.named_buffers())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.copy_(new[name])


def _tied_names(model: Any) -> dict[str, str]:
    """Return names that a checkpoint may leave out, each with the tensor that it equals."""
    if not model.config.get_text_config().tie_word_embeddings:
        return {}
    return dict(getattr(model, "_tied_weights_keys", None) or {})


def _refuse(what: str, names: Iterable[str]) -> None:
    names = list(names)
    if names:
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        listed = ", ".join(names[:_LISTED])
        raise EngineRejected(f"{len(names)} tensors are {what}: {listed}{more}")
