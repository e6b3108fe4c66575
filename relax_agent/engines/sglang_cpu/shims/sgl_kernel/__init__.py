"""Stands in for ``sgl_kernel``, whose wheels exist for CUDA only.

SGLang imports names from this package on every platform, but on a CPU without AMX it computes
with plain torch and calls none of them. So every name, in every submodule, can be imported and
looks like a constant or a function; calling one says clearly what is missing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

__version__ = "0.4.10"
__path__ = []  # this module is a package whose submodules are all made up


class _Absent:
    """A kernel, a type or a constant that is not there. Can be named and compared, not used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> _Absent:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Absent(f"{self._name}.{attribute}")

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{self._name} is not available without CUDA")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Absent) and other._name == self._name

    def __hash__(self) -> int:
        return hash(self._name)

    def __or__(
        self, _other: object
    ) -> _Absent:  # appears in annotations such as `ScalarType | None`
        return self

    __ror__ = __or__


def __getattr__(name: str) -> _Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(name)


class _AbsentSubmodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes ``import sgl_kernel.anything`` work."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("sgl_kernel."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__dict__["__getattr__"] = __getattr__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module empty: its names are made up when they are asked for."""


sys.meta_path.append(_AbsentSubmodules())
