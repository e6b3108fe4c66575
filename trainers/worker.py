"""One rank of a trainer as a process: ``python -m relax_agent.trainers.worker --fd N --rank R``.

It inherits one end of a socket pair and answers one command after another (see ``wire``): init,
step, sft, publish, save, restore, close. Whatever goes wrong in a command is answered as a typed
error; the process lives on. A thread of its own reads the socket, so that the end of the parent is
noticed in the middle of a step too: then this process ends at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from relax_agent.episode import Group
from relax_agent.errors import TrainerError
from relax_agent.trainers import wire
from relax_agent.trainers.algorithms.settings import AlgorithmSettings
from relax_agent.trainers.protocol import Trainer
from relax_agent.trainers.settings import TrainerSettings

ORPHANED = 3
"""Exit code of a worker whose parent went away."""


def load_trainer(
    settings: TrainerSettings,
    algorithm: AlgorithmSettings,
    model_path: Path,
    *,
    rank: int = 0,
    init_method: str | None = None,
) -> Trainer:
    """Return the trainer that ``settings.kind`` names.

    Args:
        settings: What to build.
        algorithm: What it optimises.
        model_path: The model's folder.
        rank: This process among ``settings.ranks``.
        init_method: Where the ranks meet, e.g. ``file:///tmp/x``; not needed for one rank.
    """
    if settings.kind == "torch":
        from relax_agent.trainers.torch_trainer import TorchTrainer

        return TorchTrainer(settings, algorithm, model_path)
    from relax_agent.trainers.megatron.trainer import MegatronTrainer

    return MegatronTrainer(settings, algorithm, model_path, rank=rank, init_method=init_method)


class Worker:
    """The commands, over one trainer. Free of sockets, so that it can be driven in-process."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.trainer: Trainer | None = None
        self.model_path = Path()
        self._commands: dict[str, Callable[..., dict[str, Any]]] = {
            "init": self.init,
            "step": self.step,
            "sft": self.sft,
            "publish": self.publish,
            "save": self.save,
            "restore": self.restore,
            "close": self.close,
        }

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do one command and return its reply; an error is a reply too."""
        arguments = {k: v for k, v in request.items() if k not in ("id", "command")}
        try:
            command = self._commands.get(request["command"])
            if command is None:
                raise TrainerError(f"there is no command {request['command']!r}")
            return {"id": request["id"], "result": command(**arguments)}
        except Exception as error:
            with contextlib.suppress(OSError):  # the disk with the log may be what is full
                traceback.print_exc()
            return {"id": request["id"], "error": wire.error_to_json(error)}

    def init(
        self,
        settings: dict[str, Any],
        algorithm: dict[str, Any],
        model_path: str,
        init_method: str | None = None,
    ) -> dict[str, Any]:
        """Build the trainer. Until this has succeeded no other command works."""
        parsed = TypeAdapter(AlgorithmSettings).validate_python(algorithm)
        self.model_path = Path(model_path)
        self.trainer = load_trainer(
            TrainerSettings.model_validate(settings),
            parsed,
            self.model_path,
            rank=self.rank,
            init_method=init_method,
        )
        self.seed = int(settings.get("seed", 0))
        self.algorithm = parsed
        return {}

    def step(
        self, groups: list[str], version: int, mask_older_than: int | None = None
    ) -> dict[str, Any]:
        """Do one step on the groups whose payloads lie at these paths."""
        from relax_agent.trainers.building import build_batch

        trainer = self._ready()
        loaded = self._load(groups)
        with trainer.timeline.part("batch"):
            batch = build_batch(
                loaded,
                self.algorithm,
                trainer.layout,
                version=version,
                seed=self.seed,
                mask_older_than=mask_older_than,
            )
        return trainer.step(batch).to_json()

    def sft(self, groups: list[str]) -> dict[str, Any]:
        """Do one supervised step on the groups whose payloads lie at these paths."""
        from relax_agent.trainers.building import build_sft_batch

        trainer = self._ready()
        loaded = self._load(groups)
        with trainer.timeline.part("batch"):
            batch = build_sft_batch(loaded, trainer.layout)
        return trainer.sft_step(batch).to_json()

    def publish(self, folder: str) -> dict[str, Any]:
        """Write the weights as a model folder; only rank 0 writes, all ranks take part."""
        from relax_agent.trainers.hf_folder import write_hf_folder

        trainer = self._ready()
        with trainer.timeline.part("publish"):
            weights = trainer.weights()
            try:
                if self.rank == 0:
                    write_hf_folder(weights, self.model_path, Path(folder))
            finally:
                for _ in weights:  # the other ranks wait inside the gathering: never leave them
                    pass
        return {}

    def save(self, folder: str) -> dict[str, Any]:
        """Write a checkpoint."""
        trainer = self._ready()
        with trainer.timeline.part("checkpoint"):
            trainer.save(Path(folder))
        return {}

    def restore(self, folder: str) -> dict[str, Any]:
        """Go back to a checkpoint."""
        trainer = self._ready()
        with trainer.timeline.part("checkpoint"):
            trainer.restore(Path(folder))
        return {}

    def close(self) -> dict[str, Any]:
        """Release the trainer."""
        if self.trainer is not None:
            self.trainer.close()
            self.trainer = None
        return {}

    def _ready(self) -> Trainer:
        if self.trainer is None:
            raise TrainerError("the trainer has not been built, or is closed")
        return self.trainer

    def _load(self, paths: list[str]) -> list[Group]:
        from relax_agent.queue.payload import load_group

        with self._ready().timeline.part("load"):
            return [load_group(Path(path)) for path in paths]


def serve(sock: socket.socket, rank: int) -> None:
    """Answer commands until ``close``, or until the other end is gone."""
    inbox: queue.Queue[bytes] = queue.Queue()
    closing = threading.Event()
    reader = threading.Thread(target=_read, args=(sock, inbox, closing), daemon=True)
    reader.start()
    worker = Worker(rank)
    while not closing.is_set():
        request = wire.decode(_next(inbox, worker))
        if request["command"] == "close":
            closing.set()
        reply = worker.answer(request)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        sock.sendall(wire.encode(reply))


def _next(inbox: queue.Queue[bytes], worker: Worker) -> bytes:
    if worker.trainer is None:
        return inbox.get()
    with worker.trainer.timeline.part("wait"):
        return inbox.get()


def _read(sock: socket.socket, inbox: queue.Queue[bytes], closing: threading.Event) -> None:
    with contextlib.suppress(OSError), sock.makefile("rb") as lines:
        for line in lines:
            inbox.put(line)
    if not closing.is_set():
        # Nobody is left to hear of a step's end, and files are written atomically.
        os._exit(ORPHANED)


def main() -> None:
    """Run as a child process."""
    parser = argparse.ArgumentParser(description="One rank of a trainer; started by its parent.")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket")
    parser.add_argument("--rank", type=int, default=0, help="number of this rank")
    arguments = parser.parse_args()
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"trainer rank {arguments.rank}, process {os.getpid()}, {started}", flush=True)
    with socket.socket(fileno=arguments.fd) as sock:
        serve(sock, arguments.rank)


if __name__ == "__main__":
    main()
