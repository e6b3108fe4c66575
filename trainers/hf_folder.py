"""Model folders in Hugging Face's layout, as both trainers publish and export them.

``config.json``, tokenizer and generation settings are copied from the model's source folder, so an
engine reads back exactly the architecture it was started with; only weights are new. Weights go
into shards of bounded size with an index. A reader sees the whole folder or nothing: it is written
beside its final place and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from relax_agent.errors import StorageError

INDEX = "model.safetensors.index.json"


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder that takes ``target``'s place if the block ends without an error.

    Killed while writing, ``target`` is what it was; a folder that is replaced moves aside first.
    """
    draft = target.with_name(f".{target.name}.{os.getpid()}.draft")
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        yield draft
        if target.exists():
            target.rename(old)
        try:
            draft.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # which is what a full disk is to safetensors
        reason = getattr(error, "strerror", None) or error
        raise StorageError(
            f"cannot write {target}: {reason}", hint="free space or fix the path"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_hf_folder(
    weights: Iterable[tuple[str, Tensor]],
    source: Path,
    target: Path,
    *,
    shard_bytes: int = 1 << 30,
) -> Path:
    """Write a folder that ``from_pretrained`` and SGLang load.

    Args:
        weights: Every weight under its Hugging Face name; taken one by one, so that no more than
            one shard is in memory.
        source: The folder that the model came from; everything but its weights is copied.
        target: The new folder. An existing one is replaced.
        shard_bytes: Most bytes of one shard (a single larger weight gets its own).

    Returns:
        ``target``.
    """
    with atomic_folder(target) as draft:
        for path in sorted(source.iterdir()):
            if path.is_file() and not _holds_weights(path):
                shutil.copy2(path, draft / path.name)
        _write_shards(weights, draft, shard_bytes)
    return target


def _holds_weights(path: Path) -> bool:
    return path.suffix in {".safetensors", ".bin", ".pt", ".pth", ".gguf"} or path.name.endswith(
        (".safetensors.index.json", ".bin.index.json")
    )


def _write_shards(weights: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int) -> None:
    drafts: list[list[str]] = []
    total = 0
    for number, shard in enumerate(_shards(weights, shard_bytes)):
        save_file(shard, folder / _draft_name(number), metadata={"format": "pt"})
        drafts.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
    weight_map = {}
    for number, names in enumerate(drafts):
        final = f"model-{number + 1:05d}-of-{len(drafts):05d}.safetensors"
        (folder / _draft_name(number)).rename(folder / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))


def _draft_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def _shards(weights: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().to("cpu", copy=False).contiguous()
        size += tensor.nbytes
    if shard:
        yield shard
