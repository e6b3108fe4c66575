"""The token log: what appending a turn costs, and what a token takes in memory."""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc

from benchmarks.envs import Result
from relax_agent.episode import Episode

TURN, LONG = 500, 100_000
_IDS = [number % 151_643 for number in range(TURN)]
_LOGPROBS = [-0.001 * number for number in range(TURN)]


def measure(quick: bool) -> Result:
    """Measure both; of appending, the first and the last tenth of a long episode apart."""
    rounds = [_append_ms() for _ in range(3 if quick else 15)]
    early, late = ([each[part] for each in rounds] for part in (0, 1))
    print(f"  {'append a turn of 500 tokens, early':34} {statistics.median(early):>14,.4f} ms")
    print(f"  {'and after 90,000 tokens':34} {statistics.median(late):>14,.4f} ms")
    size = bytes_per_token()
    print(f"  {'memory of 100,000 tokens':34} {size:>14,.1f} bytes a token")
    return {"append_500_ms": round(statistics.median(late), 4), "bytes_per_token": round(size, 1)}


def _fill(tokens: int) -> tuple[Episode, list[float]]:
    """Return an episode of prompts and answers in turn, and the seconds of each append."""
    episode, times = Episode("env", "task", "group", 0), []
    versions = [3] * TURN
    for number in range(tokens // TURN):
        start = time.perf_counter()
        if number % 2:
            episode.add_sampled(_IDS, _LOGPROBS, versions, "stop")
        else:
            episode.add_prompt(_IDS)
        times.append(time.perf_counter() - start)
    return episode, times


def _append_ms() -> tuple[float, float]:
    _, times = _fill(LONG)
    tenth = len(times) // 10
    return statistics.median(times[:tenth]) * 1e3, statistics.median(times[-tenth:]) * 1e3


def bytes_per_token() -> float:
    """Return what an episode of 100,000 tokens takes, without media and routes."""
    gc.collect()
    tracemalloc.start()
    try:
        episode, _ = _fill(LONG)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / len(episode)
    finally:
        tracemalloc.stop()
