"""Wrappers that any environment can wear."""

from relax_agent.envs.wrappers.limits import TimeLimit

__all__ = ["TimeLimit"]
