"""The handle of a trainer that runs in processes of its own, one per rank.

Every command goes to all ranks (they run the same program on the same data) and is answered by
all; rank 0's answer counts. A rank that dies is :class:`~relax_agent.errors.ChildDied` with its
exit code and last words, one that fails is its own typed error, one that says nothing for too long
is a :class:`~relax_agent.errors.TrainerError`: no wait is without an end.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_agent.errors import ChildDied, RelaxError, TrainerError
from relax_agent.processes import ChildProcess, Supervisor
from relax_agent.trainers import wire
from relax_agent.trainers.algorithms.settings import AlgorithmSettings
from relax_agent.trainers.protocol import StepReport
from relax_agent.trainers.settings import TrainerSettings

START_LIMIT_S = 300.0
"""Longest that importing, loading the model and meeting the other ranks may take."""
EXIT_LIMIT_S = 10.0
"""Longest that a rank may take to end after it was told to, or after its socket closed."""
LAGGARD_LIMIT_S = 5.0
"""How long the other ranks are waited for once one has failed; they may hang in a collective."""


class _Rank:
    """One worker process and this end of its socket."""

    def __init__(
        self, child: ChildProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.child, self._reader, self._writer = child, reader, writer

    @classmethod
    async def start(cls, children: Supervisor, rank: int, threads: int) -> _Rank:
        ours, theirs = socket.socketpair()
        try:
            argv = [sys.executable, "-m", "relax_agent.trainers.worker"]
            child = await children.start(
                f"trainer-{rank}",
                [*argv, "--fd", str(theirs.fileno()), "--rank", str(rank)],
                env={"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"},
                pass_fds=[theirs.fileno()],
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours, limit=wire.LINE_BYTES)
        return cls(child, reader, writer)

    async def call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(wire.encode(request))
                await self._writer.drain()
                reply = await self._reply_to(request["id"])
        except TimeoutError:
            raise TrainerError(
                f"{self.child.name} did not finish {request['command']} within {timeout_s:g} s",
                hint=f"raise trainer.timeout_s; its log is {self.child.log}",
            ) from None
        except ConnectionError:
            raise await self._death() from None
        if "error" in reply:
            raise wire.error_from_json(reply["error"], self.child.name)
        return reply["result"]

    async def _reply_to(self, number: int) -> dict[str, Any]:
        while True:
            line = await self._reader.readline()
            if not line.endswith(b"\n"):
                raise await self._death()
            reply = wire.decode(line)
            if reply["id"] == number:  # else: a late answer to a command that was cancelled
                return reply

    async def _death(self) -> RelaxError:
        try:
            async with asyncio.timeout(EXIT_LIMIT_S):
                await self.child.wait()
        except TimeoutError:
            return TrainerError(
                f"{self.child.name} closed its socket but runs on", hint=f"see {self.child.log}"
            )
        return self.child.death()

    def hang_up(self) -> None:
        self._writer.close()


class TrainerProcess:
    """All ranks of one trainer, as one. Made by :meth:`start`, ended by :meth:`close`."""

    def __init__(
        self, children: Supervisor, ranks: list[_Rank], meeting: Path | None, timeout_s: float
    ) -> None:
        self._children, self._ranks = children, ranks
        self._meeting = meeting
        self._timeout_s = timeout_s
        self._one_at_a_time = asyncio.Lock()
        self._number = 0
        self._broken: str | None = None

    @classmethod
    async def start(
        cls,
        children: Supervisor,
        settings: TrainerSettings,
        algorithm: AlgorithmSettings,
        model_path: Path,
    ) -> TrainerProcess:
        """Start the ranks under ``children`` and build the trainer in them.

        Raises:
            ConfigError: The model or the settings cannot be used.
            ChildDied: A rank ended.
            TrainerError: A rank was not ready in time.
        """
        meeting = None
        if settings.ranks > 1:
            meeting = Path(tempfile.mkdtemp(prefix="relax-agent-ranks-"))
        trainer = cls(children, [], meeting, settings.timeout_s)
        try:
            for rank in range(settings.ranks):
                trainer._ranks.append(await _Rank.start(children, rank, settings.threads))
            await trainer._call(
                "init",
                timeout_s=START_LIMIT_S,
                settings=settings.model_dump(mode="json"),
                algorithm=algorithm.model_dump(mode="json"),
                model_path=str(model_path),
                init_method=None if meeting is None else (meeting / "store").as_uri(),
            )
        except BaseException:
            await trainer._end()
            raise
        return trainer

    async def step(
        self, groups: Sequence[Path], *, version: int, mask_older_than: int | None = None
    ) -> StepReport:
        """Do one optimizer step on the groups at these payload paths.

        Args:
            groups: Payload files.
            version: The weight version that the trainer stands at.
            mask_older_than: Tokens staler than this leave the loss.

        Raises:
            BatchError: The data is malformed; no weight was changed.
            RouteError: The routes do not fit; no weight was changed.
        """
        paths = [str(path) for path in groups]
        reply = await self._call(
            "step", groups=paths, version=version, mask_older_than=mask_older_than
        )
        return StepReport.from_json(reply)

    async def sft_step(self, groups: Sequence[Path]) -> StepReport:
        """Do one supervised step on the groups at these payload paths."""
        return StepReport.from_json(await self._call("sft", groups=[str(p) for p in groups]))

    async def publish(self, folder: Path) -> None:
        """Write the weights as a folder that ``from_pretrained`` and SGLang load."""
        await self._call("publish", folder=str(folder))

    async def save(self, folder: Path) -> None:
        """Write a checkpoint of model, optimizer, step and random state."""
        await self._call("save", folder=str(folder))

    async def restore(self, folder: Path) -> None:
        """Go back to a checkpoint."""
        await self._call("restore", folder=str(folder))

    async def abandon(self) -> None:
        """End all ranks at once, whatever they are doing. Idempotent."""
        await self._end()

    async def close(self) -> None:
        """End all ranks: politely first, then for sure. Idempotent."""
        if not self._ranks:
            return
        for rank in self._ranks:
            self._children.expect_exit(rank.child)
        try:
            if self._broken is None:
                await self._call("close", timeout_s=EXIT_LIMIT_S)
                async with asyncio.timeout(EXIT_LIMIT_S):
                    await asyncio.gather(*(rank.child.wait() for rank in self._ranks))
        except (RelaxError, TimeoutError):
            pass  # whatever it was, the processes are ended below
        finally:
            await self._end()

    async def _end(self) -> None:
        ranks, self._ranks = self._ranks, []
        if self._meeting is not None:
            shutil.rmtree(self._meeting, ignore_errors=True)
        for rank in ranks:
            self._children.expect_exit(rank.child)
            rank.hang_up()
        async with asyncio.TaskGroup() as group:
            for rank in ranks:
                group.create_task(self._children.stop(rank.child))

    async def _call(
        self, command: str, *, timeout_s: float | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Send a command to all ranks, wait for all, return rank 0's result."""
        async with self._one_at_a_time:
            if not self._ranks or self._broken:
                raise TrainerError(f"the trainer cannot {command}: {self._broken or 'closed'}")
            self._number += 1
            request = {"id": self._number, "command": command, **arguments}
            limit = timeout_s or self._timeout_s
            tasks = [asyncio.create_task(rank.call(request, limit)) for rank in self._ranks]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                _, late = await asyncio.wait(tasks, timeout=LAGGARD_LIMIT_S)
                if late:
                    self._broken = f"one rank failed and another hung in {command}"
            finally:
                for task in tasks:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
            return self._joined(results)

    def _joined(self, results: list[dict[str, Any] | BaseException]) -> dict[str, Any]:
        failures = [each for each in results if isinstance(each, Exception)]
        if failures and len(failures) < len(results):
            self._broken = self._broken or "its ranks went apart when one of them failed"
        # A death is the cause of what the other ranks complain about.
        failures.sort(key=lambda error: not isinstance(error, ChildDied))
        for failure in failures:
            raise failure
        result = results[0]
        assert not isinstance(result, BaseException)
        return result
