"""Runs at the start of every Python process that has this folder on its path.

SGLang imports torchvision. The wheel of torchvision on PyPI is built for CUDA: beside a CPU build
of torch its C++ part does not load, so the operators ``nms`` and ``qnms`` are not registered, and
torchvision fails while it describes them to the compiler. Their schemas alone are enough, because
no language model calls them.

SGLang's recorder of routed experts pins its host buffer through the CUDA runtime. Without CUDA
there is nothing to pin: the three functions that it calls report success and do nothing.

Both repairs are made when torchvision is about to be imported, so that a process which never
imports it pays nothing, and only where torch has no CUDA.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _NoCudaRuntime:
    """Stands in for ``torch.cuda.cudart()``."""

    def cudaHostRegister(self, *_buffer: Any) -> int:
        return 0

    def cudaHostUnregister(self, *_buffer: Any) -> int:
        return 0

    def cudaGetErrorString(self, *_code: Any) -> str:
        return "no error"


def _repair(torch: Any) -> Any:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.cuda.cudart = _NoCudaRuntime
    return library  # its definitions live as long as it does


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; only notices the first import of torchvision."""

    library: Any = None

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if not torch.cuda.is_available():
                _BeforeTorchvision.library = _repair(torch)


sys.meta_path.insert(0, _BeforeTorchvision())
