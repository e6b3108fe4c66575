"""Checking environments: ``check_env`` and its parts, for authors and for other people's tests.

from relax_agent.envs import check_env

def test_my_environment():
    check_env("my/Name-v0")
"""

from relax_agent.envs.checking.benchmark import Benchmark, benchmark_env
from relax_agent.envs.checking.checks import (
    check_cancellation,
    check_env,
    check_isolation,
    check_seeding,
    check_tools,
)
from relax_agent.envs.checking.report import Report, Row
from relax_agent.envs.checking.subject import Checkable

__all__ = [
    "Benchmark",
    "Checkable",
    "Report",
    "Row",
    "benchmark_env",
    "check_cancellation",
    "check_env",
    "check_isolation",
    "check_seeding",
    "check_tools",
]
