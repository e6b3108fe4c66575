"""Checkpoints of the Megatron trainer: exact, atomic, without pickle, free of the layout.

Weights and both of Adam's moments are stored under Hugging Face names (the moments are laid out
like the weights, so the same table converts them). A checkpoint therefore says nothing about how
the ranks shared the model. Adam's step count is stored once and given to every parameter as a
tensor of its own: shared, it would be advanced once per parameter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from relax_agent.errors import ResumeError, TrainerError
from relax_agent.trainers.hf_folder import atomic_folder
from relax_agent.trainers.megatron import convert

if TYPE_CHECKING:
    from relax_agent.trainers.megatron.model import PolicyModel

KIND: Final = "megatron"
MOMENTS: Final = ("exp_avg", "exp_avg_sq")


def inner_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """Yield the torch optimizers inside a Megatron optimizer (dense and expert parameters)."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is not None:
            yield part.optimizer


def clear_moments(optimizer: Any) -> None:
    """Forget everything Adam has gathered, its step count included."""
    for inner in inner_optimizers(optimizer):
        inner.state.clear()


def main_copy(name: str, parameter: Tensor) -> Tensor:
    """Return the float32 tensor that the optimizer moves for a parameter."""
    main: Tensor = getattr(parameter, "main_param", parameter)
    return main


def save(folder: Path, model: PolicyModel, optimizer: Any, counts: dict[str, int]) -> None:
    """Write a checkpoint.

    Args:
        folder: Becomes the checkpoint, or stays what it was.
        model: The bare model.
        optimizer: Megatron's optimizer over it.
        counts: The trainer's own counters.
    """
    state = _adam_state(optimizer)
    step = _common_step(state.values())
    with atomic_folder(folder) as draft:
        _write(draft / "model.safetensors", convert.hf_weights(model, main_copy))
        for moment in MOMENTS if step else ():
            tensors = convert.hf_weights(model, _moment_of(state, moment))
            _write(draft / f"{moment}.safetensors", tensors)
        _write(draft / "random.safetensors", _random_state().items())
        document = {"kind": KIND, "adam_step": step, **counts}
        (draft / "trainer.json").write_text(json.dumps(document, indent=2))


def restore(folder: Path, model: PolicyModel, optimizer: Any) -> dict[str, Any]:
    """Read a checkpoint into a model and its optimizer, and return the trainer's counters.

    Raises:
        ResumeError: Not a whole checkpoint of this trainer and model; nothing says what the model
            holds then.
    """
    document = _read_document(folder)
    try:
        convert.load_hf(model, _File(folder / "model.safetensors"), main_copy)
        _spread_to_model(model)
        clear_moments(optimizer)
        if document["adam_step"]:
            _restore_adam(folder, model, optimizer, document["adam_step"])
        _set_random_state(_File(folder / "random.safetensors"))
    except (OSError, SafetensorError, TrainerError) as error:
        raise ResumeError(f"{folder} does not fit this model: {error}") from error
    return document


def _restore_adam(folder: Path, model: PolicyModel, optimizer: Any, step: int) -> None:
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                moments = {moment: torch.empty_like(parameter) for moment in MOMENTS}
                inner.state[parameter] = {"step": torch.tensor(float(step)), **moments}
    state = _adam_state(optimizer)
    for moment in MOMENTS:
        tensors = _File(folder / f"{moment}.safetensors")
        convert.load_hf(model, tensors, _moment_of(state, moment))


def _moment_of(state: dict[Tensor, dict[str, Tensor]], moment: str) -> convert.Lookup:
    return lambda name, parameter: state[main_copy(name, parameter)][moment]


def _adam_state(optimizer: Any) -> dict[Tensor, dict[str, Tensor]]:
    return {p: s for inner in inner_optimizers(optimizer) for p, s in inner.state.items()}


def _common_step(states: Iterable[dict[str, Tensor]]) -> int:
    steps = {int(state["step"]) for state in states}
    if len(steps) > 1:
        raise TrainerError(f"Adam's step differs between parameters: {sorted(steps)}")
    return steps.pop() if steps else 0


@torch.no_grad()
def _spread_to_model(model: PolicyModel) -> None:
    for name, parameter in model.named_parameters():
        main = main_copy(name, parameter)
        if main is not parameter:
            parameter.copy_(main)


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: _File) -> None:
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _write(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors}, path)


def _read_document(folder: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads((folder / "trainer.json").read_text())
    except (OSError, ValueError) as error:
        raise ResumeError(f"{folder} is not a whole trainer checkpoint: {error}") from error
    if document.get("kind") != KIND:
        raise ResumeError(
            f"{folder} was written by trainer.kind: {document.get('kind')}, not {KIND}"
        )
    return document


class _File(dict[str, Tensor]):
    """A safetensors file as a mapping that reads a tensor when asked for it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with safe_open(path, "pt") as file:
            super().__init__(dict.fromkeys(file.keys(), torch.empty(0)))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise TrainerError(f"{self._path.name} lacks {name}")
        with safe_open(self._path, "pt") as file:
            return file.get_tensor(name)
