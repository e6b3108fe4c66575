"""Where Megatron meets the machine: process groups, the CPU layer, version-specific repairs.

Megatron-core assumes CUDA: it asks ``torch.cuda.current_device()`` where tensors should live, keeps
a CUDA random state, passes ``device="cuda"`` to factories. Without a GPU none of that works. The
**CPU layer** gives the modules of ``megatron.core`` (and nobody else) their own view of ``torch``:
a copy of its namespace in which ``cuda`` is a small stand-in and factories put "cuda" tensors on
the CPU. Nothing in ``torch`` itself changes, so transformers, tests and users see what they always
saw, and :func:`remove_cpu_layer` puts everything back.

Three repairs go with it, each a fault of a released version:

* 0.16.1 reads ``te_general_gemm`` without Transformer Engine, where the name does not exist;
* both versions move the dispatcher's split sizes to the host only if they are CUDA tensors, and
  gloo then refuses tensors as sizes;
* ``_apply_expert_bias`` is a ``torch.compile`` function that does nothing in our models, yet costs
  a compilation and a guard check per call.

The layer is for the CPU only. With a GPU in sight it refuses: a stand-in beside the real device
would put tensors on the wrong one without an error.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any, Final

import torch

from relax_agent.errors import MissingExtraError, TrainerError
from relax_agent.trainers.settings import ParallelSettings

TESTED: Final = ("0.16", "0.17")
"""Versions of megatron-core that this package's tests have passed with."""

_FACTORIES: Final = ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "eye")
_MODULES: Final = (
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.tensor_parallel.random",
    "megatron.core.transformer.moe.token_dispatcher",
)
_GROUP_TIMEOUT = timedelta(minutes=10)

_undo: list[Callable[[], None]] = []
"""How to take the CPU layer off, last first; empty while it is not on."""


class _Stream:
    """A stream on which everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Return at once: the CPU runs everything in order."""

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def record_event(self, event: Any = None) -> Any:
        """Return an event that has happened."""
        return event or _Event()

    def synchronize(self) -> None:
        """Return at once."""


class _Event:
    """An event that has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Return at once."""

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


class _CpuCuda(ModuleType):
    """What ``torch.cuda`` looks like to Megatron: one device, the CPU, and no streams.

    The random generator is its own. Nothing draws from it: models are built without dropout, and
    their weights are loaded, not drawn; so Megatron's forks never touch the process's generator.
    """

    Stream = _Stream
    Event = _Event

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self._generator = torch.Generator()
        self._stream = _Stream()
        self.random = self

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        """Return the CPU."""
        return torch.device("cpu")

    def current_stream(self, device: Any = None) -> _Stream:
        """Return the only stream."""
        return self._stream

    default_stream = current_stream

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """Do nothing around the block."""
        yield

    def synchronize(self, device: Any = None) -> None:
        """Return at once."""

    def empty_cache(self) -> None:
        """Return at once."""

    def manual_seed(self, seed: int) -> None:
        """Seed the stand-in's generator."""
        self._generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return the state of the stand-in's generator."""
        return self._generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Set the state of the stand-in's generator."""
        self._generator.set_state(state)


class _CpuTorch(ModuleType):
    """Megatron's view of ``torch`` on a machine without CUDA."""

    def __init__(self) -> None:
        super().__init__("torch")
        vars(self).update({k: v for k, v in vars(torch).items() if not k.startswith("__")})
        self.cuda = _CpuCuda()
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)  # what torch loads lazily


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def create(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device") or "").startswith("cuda"):
            kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def import_megatron() -> str:
    """Import the parts of megatron-core that are used here and return its version.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # one warning per optional kernel library that is absent
            for name in _MODULES:
                importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "megatron":
            raise
        raise MissingExtraError("megatron-core", "train") from error
    return str(sys.modules["megatron.core"].__version__)


def install_cpu_layer() -> None:
    """Let megatron-core run on the CPU. A second call only covers modules imported since.

    Raises:
        TrainerError: This machine has a GPU.
    """
    if torch.cuda.is_available():
        raise TrainerError(
            "device: cpu on a machine with a GPU: Megatron would mix the two",
            hint="set trainer.device: cuda, or hide the GPU with CUDA_VISIBLE_DEVICES=''",
        )
    version = import_megatron()
    if not version.startswith(TESTED):
        warnings.warn(f"megatron-core {version} is untested on the CPU", stacklevel=2)
    first = not _undo
    view = _CpuTorch() if first else vars(sys.modules["megatron.core.utils"])["torch"]
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and vars(module).get("torch") is torch:
            _replace(module, "torch", view)
    if first:
        _repair(view)


def _repair(view: ModuleType) -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.moe.router import TopKRouter

    def set_state(state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        view.cuda.set_rng_state(state)

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    _replace(random, "_set_cuda_rng_state", set_state)
    for module in (moe_utils, token_dispatcher):
        _replace(module, "maybe_move_tensor_to_cpu", to_host)
    if not hasattr(moe_utils, "te_general_gemm"):
        _replace(moe_utils, "te_general_gemm", None)
    compiled = TopKRouter._apply_expert_bias
    plain = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    _replace(TopKRouter, "_apply_expert_bias", plain)


def _replace(owner: Any, name: str, value: Any) -> None:
    if name in vars(owner):
        before = vars(owner)[name]
        _undo.append(lambda: setattr(owner, name, before))
    else:
        _undo.append(lambda: delattr(owner, name))
    setattr(owner, name, value)


def remove_cpu_layer() -> None:
    """Give Megatron the real ``torch`` back. Does nothing if the layer is not on."""
    while _undo:
        _undo.pop()()


def cpu_layer_installed() -> bool:
    """Tell whether the CPU layer is on."""
    return bool(_undo)


def start(
    device: str,
    *,
    rank: int = 0,
    ranks: int = 1,
    parallel: ParallelSettings | None = None,
    init_method: str | None = None,
    seed: int = 0,
) -> bool:
    """Join the process group and lay out Megatron's parallel groups.

    A second call with the same layout does nothing, so that several models of one process share
    the groups. On CUDA (NCCL, one device per rank; **unverified**: no GPU was at hand) nothing of
    megatron-core is replaced.

    Args:
        device: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL).
        rank: This process, from 0.
        ranks: How many processes.
        parallel: How the ranks share the model; the rest is data parallel.
        init_method: Where ranks meet, e.g. ``tcp://127.0.0.1:PORT`` or ``file:///PATH``. One rank
            needs none.
        seed: Seeds Megatron's model-parallel generators.

    Returns:
        Whether this call started the groups; whoever did must call :func:`stop`.
    """
    if device == "cpu":
        install_cpu_layer()
    else:
        import_megatron()
        torch.cuda.set_device(rank % torch.cuda.device_count())
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        _check_same_layout(ranks, parallel or ParallelSettings())
        return False
    if ranks > 1 and init_method is None:
        raise TrainerError(f"{ranks} ranks need an address to meet at")
    _join(device, rank, ranks, init_method)
    layout = parallel or ParallelSettings()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
    )
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(seed)
    return True


def _join(device: str, rank: int, ranks: int, init_method: str | None) -> None:
    if torch.distributed.is_initialized():
        return
    # A single rank meets nobody: a store in memory needs neither a port nor a file.
    alone = torch.distributed.HashStore() if init_method is None else None  # type: ignore[attr-defined]
    torch.distributed.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=init_method,
        store=alone,
        rank=rank,
        world_size=ranks,
        timeout=_GROUP_TIMEOUT,
    )


def _check_same_layout(ranks: int, wanted: ParallelSettings) -> None:
    from megatron.core import parallel_state as state

    present = ParallelSettings(
        tensor=state.get_tensor_model_parallel_world_size(),
        pipeline=state.get_pipeline_model_parallel_world_size(),
        expert=state.get_expert_model_parallel_world_size(),
    )
    if (present, torch.distributed.get_world_size()) != (wanted, ranks):
        raise TrainerError(
            f"this process already holds Megatron groups of another layout: {present}",
            hint="one process trains models of one layout",
        )


def stop() -> None:
    """Leave the process group and take the CPU layer off. Idempotent."""
    if "megatron.core" in sys.modules:
        from megatron.core import parallel_state

        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    remove_cpu_layer()
