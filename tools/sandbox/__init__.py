"""A sandbox for code that a model wrote.

:class:`Sandbox` says how well code is held (:class:`Level`) and makes sessions;
:class:`SandboxSession` runs code in an interpreter whose variables stay. :func:`probe` tells what
this machine can do. What protects against what is written down in ``docs/sandbox.md``.
"""

from relax_agent.tools.sandbox.limits import Level, Limits
from relax_agent.tools.sandbox.pool import SandboxPool
from relax_agent.tools.sandbox.result import ExecutionError, ExecutionResult
from relax_agent.tools.sandbox.sandbox import Probe, Sandbox, probe
from relax_agent.tools.sandbox.session import SandboxSession

__all__ = [
    "ExecutionError",
    "ExecutionResult",
    "Level",
    "Limits",
    "Probe",
    "Sandbox",
    "SandboxPool",
    "SandboxSession",
    "probe",
]
