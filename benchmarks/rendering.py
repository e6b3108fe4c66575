"""What it costs to turn messages into tokens, and to keep them.

    python -m benchmarks.rendering [--quick] [--only turns log loop]

turns   a 64-turn, 32k-token episode with tool calls: appending each turn, beside rendering the
        whole history with ``apply_chat_template`` each turn
log     appending 500 tokens to a token log, and what 100k tokens take in memory
loop    the episode loop's own cost with a scripted engine and a trivial environment

What is compared runs in turns, in one run; medians and their spread are printed. The last line is
JSON.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from benchmarks import rendering_log, rendering_loop, rendering_turns
from benchmarks.envs import Result, in_turns, ratio, run_parts, show

PACKAGE, TEMPLATE = "ours, format of renderers", "ours, chat template"
RERENDER = "apply_chat_template each turn"


def turns(quick: bool) -> Result:
    """Measure an episode, and its last turn beside its second."""
    episode = rendering_turns.episode()
    print(f"  {episode.tokens:,} tokens, {rendering_turns.TURNS} turns")
    package, template = episode.renderer("qwen3"), episode.renderer("template")
    values = in_turns(
        {
            PACKAGE: lambda: rendering_turns.appending_ms(package, episode),
            TEMPLATE: lambda: rendering_turns.appending_ms(template, episode),
            RERENDER: lambda: rendering_turns.rerendering_ms(episode),
        },
        2 if quick else 7,
    )
    show(values, "ms")
    count = 20 if quick else 100
    ratios = [rendering_turns.last_and_second(package, episode, count) for _ in range(5)]
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    print(f"  {'the last turn, beside the second':34} {middle:>14,.3f} ({low:,.3f} to {high:,.3f})")
    return {
        "vs_rerender": ratio(values[RERENDER], values[PACKAGE]),
        "vs_rerender_template": ratio(values[RERENDER], values[TEMPLATE]),
        "last_vs_second": round(middle, 3),
    }


PARTS: dict[str, Callable[[bool], Result]] = {
    "turns": turns,
    "log": rendering_log.measure,
    "loop": rendering_loop.measure,
}


if __name__ == "__main__":
    run_parts(__doc__, PARTS)
