r"""A reward that compares mathematical expressions, in processes that can be killed.

Whether ``\frac{2}{4}`` is one half, and ``(x+1)^2`` the same as ``x^2+2x+1``, is decided by
math-verify (https://github.com/huggingface/Math-Verify), which reads LaTeX and plain notation into
sympy. Sympy can hang on what a model writes (``9^{9^{9^9}}``) or fill the memory with it. So it
runs in worker processes with a limit on both; see :mod:`relax_agent.envs.rewards.workers`.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, ClassVar

from relax_agent.envs.rewards.answers import AnswerReward, boxed, golds_of
from relax_agent.envs.rewards.workers import WorkerPool
from relax_agent.envs.tasks import Task
from relax_agent.envs.transcript import Transcript
from relax_agent.errors import ConfigError, MissingExtraError

_MEMORY_BYTES = 2 << 30
_WORKERS = WorkerPool("relax_agent.envs.rewards.math_worker:math_equal", memory_bytes=_MEMORY_BYTES)


@dataclass(frozen=True)
class MathEqual(AnswerReward):
    r"""1 if the answer is mathematically equal to the right one, else 0.

    The answer is what the last ``\boxed{…}`` holds, or else the last expression of the text. Needs
    the ``envs`` extra. An answer that cannot be judged in time is a failure, with the value that
    the rubric states for it.
    """

    timeout_s: float = 5.0
    """Seconds for one comparison, from the moment that a worker has it."""
    float_rounding: int = 6
    """Decimal places that count where a side is no exact number."""
    keeps_time: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < float("inf"):
            raise ConfigError(f"timeout_s must be positive and finite, not {self.timeout_s}")

    @staticmethod
    def prepare() -> None:
        """Raise MissingExtraError unless math-verify is installed."""
        if importlib.util.find_spec("math_verify") is None:
            raise MissingExtraError("math-verify", "envs")

    async def __call__(self, task: Task, transcript: Transcript) -> float:  # type: ignore[override]
        """Return 1.0 or 0.0."""
        answer, golds = self.answer(transcript), golds_of(task)
        return 0.0 if answer is None else await self.equal(answer, *golds)

    async def equal(self, answer: str, *golds: Any) -> float:
        """Return 1.0 if ``answer`` equals one of ``golds``, else 0.0.

        Raises:
            WorkerFailed: The comparison took too long, or sympy failed on it.
            ChildDied: It crashed the process.
        """
        texts = [str(gold).strip() for gold in golds]
        inner = boxed(answer)
        if (answer if inner is None else inner).strip() in texts:
            return 1.0
        self.prepare()
        arguments = {"answer": answer, "golds": texts, "float_rounding": self.float_rounding}
        return float(await _WORKERS.call(arguments, self.timeout_s))


math_equal = MathEqual()
