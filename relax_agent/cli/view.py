"""``relax-agent view``: episodes in the terminal, as conversations or token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_agent.errors import ConfigError

if TYPE_CHECKING:
    from relax_agent.episode import Episode

_EPISODES, _MODELS = "episodes.jsonl", ".models"


def view(
    path: Annotated[
        Path,
        typer.Argument(
            help="A run's folder, its episodes.jsonl or eval-….jsonl, or a group (.safetensors).",
            show_default=False,
        ),
    ],
    episode: Annotated[
        str | None,
        typer.Option(help="Which one: its number from 1 (-1 is the last), or how its id begins."),
    ] = None,
    status: Annotated[
        str | None, typer.Option(help="Only episodes that ended so, e.g. completed.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Only episodes that this step trained.")] = None,
    tokens: Annotated[
        bool,
        typer.Option(
            "--tokens",
            help="Show tokens: coloured by mask and likelihood, with log-prob and weight version.",
        ),
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="The model's folder, for --tokens; without one, of the run, else ids are shown.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the episode as a page instead.")
    ] = None,
) -> None:
    """Show episodes of a run.

    Without --episode: a list of all. Examples:

      relax-agent view runs/calculator-moe

      relax-agent view runs/calculator-moe --step 70 --status completed

      relax-agent view runs/calculator-moe --episode -1 --tokens
    """
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=not tokens)
    file = path / _EPISODES if path.is_dir() else path
    found = _chosen(file, status, step)
    if episode is None and (tokens or html is not None):
        episode = "1"
    if episode is None:
        _list(console, found, file)
        return
    number, one = _pick(found, episode, file)
    if html is not None:
        from relax_agent.files import replace_file
        from relax_agent.pages import episode_html

        replace_file(html, episode_html(one).encode())
        console.print(f"episode {number}: {html}")
    elif tokens:
        from relax_agent.monitor.token_view import LEGEND, tokens_text

        console.print(LEGEND)
        console.print(tokens_text(one, _words(tokenizer or _own_model(file))))
    else:
        _show(console, number, one)


def _chosen(file: Path, status: str | None, step: int | None) -> Iterator[tuple[int, Any, Episode]]:
    """Yield number, step and episode of those that were asked for, as they are read."""
    if status is not None:
        from relax_agent.status import EpisodeStatus

        known = [each.value for each in EpisodeStatus]
        if status not in known:
            raise ConfigError(f"there is no status {status}", hint=", ".join(known))
    for number, (trained_in, each) in enumerate(_read(file), 1):
        if status not in (None, each.status.value) or step not in (None, trained_in):
            continue
        yield number, trained_in, each


def _read(file: Path) -> Iterator[tuple[int | None, Episode]]:
    if file.suffix == ".safetensors":
        from relax_agent.queue.payload import load_group

        return ((None, each) for each in load_group(file).episodes)
    from relax_agent.run.episodes import read_steps

    return read_steps(file)


def _pick(found: Iterator[tuple[int, Any, Episode]], which: str, file: Path) -> tuple[int, Episode]:
    """Return the episode that a person named, by its place among those found or by its id."""
    place = int(which) if which.lstrip("-").isdigit() and len(which) < 8 else None
    if place is not None and place > 0:
        chosen = next(islice(found, place - 1, None), None)
    elif place is not None:
        last: list[tuple[int, Any, Episode]] = []
        for each in found:
            last = [*last, each][place:]
        chosen = last[0] if place and len(last) == -place else None
    else:
        chosen = next((each for each in found if each[2].id.startswith(which)), None)
    if chosen is None:
        raise ConfigError(
            f"{file} has no such episode: {which}",
            hint=f"relax-agent view {file} lists those that there are",
        )
    return chosen[0], chosen[2]


def _list(console: Any, found: Iterator[tuple[int, Any, Episode]], file: Path) -> None:
    from rich.table import Table

    from relax_agent.pages import plain

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("no.", "step", "id", "task", "ended", "reward", "turns", "tokens"):
        numeric = name in ("no.", "step", "reward", "turns", "tokens")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True)
    for number, step, each in found:
        ended = each.status.value.replace("_", " ")
        row = [str(number), "" if step is None else str(step), plain(each.id[:8])]
        row += [plain(each.task_id), ended, f"{each.reward:g}"]
        table.add_row(*row, str(len(each.turns)), str(each.sampled_tokens))
    if not table.row_count:
        raise ConfigError(f"{file} has no such episode")
    console.print(table)


def _show(console: Any, number: int, episode: Episode) -> None:
    from rich.text import Text

    from relax_agent.monitor.episodes import conversation
    from relax_agent.pages import episode_facts, plain

    facts = {"task": episode.task_id, "id": episode.id[:8], **episode_facts(episode)}
    console.print(Text(f"episode {number} of {plain(episode.env_id)}", "bold"))
    console.print(Text("   ".join(f"{key}: {plain(value)}" for key, value in facts.items()), "dim"))
    console.print()
    console.print(conversation(episode.messages))
    rewards = [turn.reward for turn in episode.turns]
    if len(rewards) > 1:
        console.print()
        told = ", ".join(f"{each:g}" for each in rewards)
        console.print(Text(f"reward of each turn: {told}", "dim"))
    for segment in episode.segments[1:]:
        words = f"the history was rewritten after {segment.shared} tokens: {plain(segment.reason)}"
        console.print(Text(words, "magenta"))


def _own_model(file: Path) -> Path | None:
    """Return the folder of the model that a run has trained, if it is there."""
    export = file.parent / "export"
    if (export / "tokenizer.json").is_file():
        return export
    recipe = file.parent / "recipe.yaml"
    if not recipe.is_file():
        return None
    from relax_agent.run.recipe import load_recipe

    path = load_recipe(recipe).model.path
    return path if path is not None and (path / "tokenizer.json").is_file() else None


def _words(folder: Path | None) -> Callable[[int], str]:
    from relax_agent.monitor.token_view import ids_alone, words_of

    if folder is None:
        return ids_alone
    from relax_agent.rendering.tokens import load_tokenizer

    return words_of(load_tokenizer(folder).decode)
