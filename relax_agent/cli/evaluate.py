"""``relax-agent eval``: how well a model, or another policy, does on an environment."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from relax_agent.cli.options import EnvArguments, EnvId, Modules, import_modules, read_arguments
from relax_agent.cli.policies import named_policy
from relax_agent.envs import Env, PlayLimits, Policy, make_async
from relax_agent.envs.evaluation import EvalJob, EvalReport, evaluate, plan
from relax_agent.envs.evaluation_log import EvaluationLog, free_folder
from relax_agent.errors import ConfigError
from relax_agent.monitor.evaluation import EvalDisplay, report_table
from relax_agent.rendering.parsers import tool_parser as parser_named

_MODEL, _EPISODES, _RESULT = "Who", "Episodes", "Result"


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


Model = Annotated[str | None, _option(_MODEL, "The model's name at the endpoint.")]
BaseUrl = Annotated[
    str | None,
    _option(_MODEL, "An OpenAI-compatible endpoint: http://127.0.0.1:30000/v1. Default: OpenAI's."),
]
KeyEnv = Annotated[str, _option(_MODEL, "The variable that holds the key.")]
ToolParserName = Annotated[
    str | None,
    _option(
        _MODEL,
        "For an endpoint that returns tool calls as text: hermes, qwen3_coder, llama3, mistral, "
        "pythonic or fenced.",
    ),
]
PolicyOption = Annotated[
    str | None, _option(_MODEL, "Instead of a model: expert, random or module:factory.")
]
Temperature = Annotated[float | None, _option(_MODEL, "Default: the endpoint's.", min=0)]
MaxTokens = Annotated[int | None, _option(_MODEL, "Most tokens of one answer.", min=1)]
AnswerTimeout = Annotated[float, _option(_MODEL, "Seconds for one answer.")]
Retries = Annotated[
    int, _option(_MODEL, "Requests after the first, where the endpoint is busy or away.", min=0)
]
SplitOption = Annotated[str, _option(_EPISODES, "Which tasks: train or eval.")]
TaskCount = Annotated[int | None, _option(_EPISODES, "How many of them; all by default.", min=1)]
TaskNames = Annotated[list[str] | None, _option(_EPISODES, "Just this task; may be repeated.")]
Samples = Annotated[int, _option(_EPISODES, "Episodes a task.", "--samples", "-k", min=1)]
Seed = Annotated[int, _option(_EPISODES, "Chooses the tasks; the environment's seed.")]
Concurrency = Annotated[int, _option(_EPISODES, "Episodes at the same time.", min=1)]
MaxTurns = Annotated[int, _option(_EPISODES, "Messages after which one is cut off.", min=1)]
EpisodeTimeout = Annotated[float, _option(_EPISODES, "Seconds after which one is cut off.")]
StepTimeout = Annotated[float, _option(_EPISODES, "Seconds for one step of the environment.")]
Out = Annotated[
    Path | None,
    _option(_RESULT, "Its folder; goes on with what is there. Default: runs/eval/…"),
]
Fresh = Annotated[
    bool, _option(_RESULT, "Play everything again, in a new folder.", "--fresh", is_flag=True)
]
Html = Annotated[bool, _option(_RESULT, "Write pages for people too.")]
AsJson = Annotated[bool, _option(_RESULT, "Print the report as JSON.", "--json")]


@dataclass(frozen=True, slots=True)
class _Who:
    """Who is evaluated."""

    model: str | None
    base_url: str | None
    api_key_env: str
    policy: str | None
    sampling: dict[str, Any]
    timeout_s: float
    retries: int
    tool_parser: str | None

    def check(self) -> None:
        if self.model is None and self.policy is None:
            raise ConfigError(
                "nobody is to be evaluated", hint="--model NAME --base-url URL, or --policy expert"
            )
        if self.model is not None and self.policy is not None:
            raise ConfigError("--model and --policy exclude each other")
        if self.tool_parser is not None:
            if self.model is None:
                raise ConfigError("--tool-parser is for a --model")
            parser_named(self.tool_parser)

    @property
    def label(self) -> str:
        return self.model or f"policy {self.policy}"

    def about(self) -> dict[str, Any]:
        if self.policy is not None:
            return {"policy": self.policy}
        parser = {"tool_parser": self.tool_parser} if self.tool_parser else {}
        return {"model": self.model, "base_url": self.base_url, "sampling": self.sampling} | parser

    async def factory(
        self, env: Env, seed: int, stack: contextlib.AsyncExitStack
    ) -> Callable[[], Policy]:
        """Return what makes a policy; a model's serves all episodes and is closed by ``stack``."""
        if self.policy is not None:
            return named_policy(self.policy, env, seed)
        from relax_agent.envs.openai_policy import OpenAIPolicy

        assert self.model is not None
        model = await stack.enter_async_context(
            OpenAIPolicy(
                self.model,
                base_url=self.base_url,
                api_key_env=self.api_key_env,
                timeout_s=self.timeout_s,
                max_retries=self.retries,
                read_text=parser_named(self.tool_parser).parse if self.tool_parser else None,
                **self.sampling,
            )
        )
        return lambda: model


@dataclass(frozen=True, slots=True)
class _What:
    """What is played."""

    env_id: str
    arguments: dict[str, Any]
    split: str
    count: int | None
    names: list[str]
    samples: int
    seed: int
    concurrency: int
    limits: PlayLimits

    def jobs(self, env: Env) -> list[EvalJob]:
        """Return the episodes."""
        return plan(
            env.tasks,
            split="train" if self.split == "train" else "eval",
            count=self.count,
            names=self.names,
            samples=self.samples,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True)
class _Where:
    """Where the result goes."""

    out: Path | None
    fresh: bool
    html: bool

    def open(self, about: dict[str, Any], title: str) -> EvaluationLog:
        """Go on in the folder of the same evaluation, or begin another one."""
        folder = self.out or Path("runs/eval") / _slug(title)
        if self.out is None or self.fresh:
            folder = free_folder(folder, about, fresh=self.fresh)
        return EvaluationLog(folder, about, html=self.html)


def eval_(
    env_id: EnvId,
    model: Model = None,
    base_url: BaseUrl = None,
    api_key_env: KeyEnv = "OPENAI_API_KEY",
    tool_parser: ToolParserName = None,
    policy: PolicyOption = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    answer_timeout: AnswerTimeout = 120.0,
    retries: Retries = 4,
    split: SplitOption = "eval",
    tasks: TaskCount = None,
    task: TaskNames = None,
    samples: Samples = 1,
    seed: Seed = 0,
    concurrency: Concurrency = 16,
    max_turns: MaxTurns = 100,
    episode_timeout: EpisodeTimeout = 1800.0,
    step_timeout: StepTimeout = 300.0,
    out: Out = None,
    fresh: Fresh = False,
    html: Html = True,
    as_json: AsJson = False,
    arg: EnvArguments = None,
    module: Modules = None,
) -> int:
    """Evaluate a model, or another policy, on an environment.

    Every episode is kept. The same command again goes on where it was
    interrupted and adds more tasks or samples; after a change of the
    environment, the policy or the options it begins another folder.
    """
    given = {"temperature": temperature, "max_tokens": max_tokens}
    sampling = {name: value for name, value in given.items() if value is not None}
    who = _Who(model, base_url, api_key_env, policy, sampling, answer_timeout, retries, tool_parser)
    who.check()
    import_modules(module)
    # The SDK asks again by itself; the policy's limit is for all of that and the pauses together.
    patience = (retries + 2) * answer_timeout
    limits = PlayLimits(max_turns, episode_timeout, step_timeout, patience)
    what = _What(
        env_id, read_arguments(arg), split, tasks, task or [], samples, seed, concurrency, limits
    )
    report = asyncio.run(_evaluate(what, who, _Where(out, fresh, html), quiet=as_json))
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    return 0 if report.episodes else 1


async def _evaluate(what: _What, who: _Who, where: _Where, *, quiet: bool) -> EvalReport:
    title = f"{what.env_id} · {who.label}"
    async with contextlib.AsyncExitStack() as stack:
        async with await make_async(what.env_id, **what.arguments) as env:
            jobs = what.jobs(env)
            factory = await who.factory(env, what.seed, stack)
            log = where.open(_about(what, who, env, factory()), title)
        stack.callback(log.close)
        known = sum(1 for _ in log.plays(jobs))
        if known and not quiet:
            told = f"{known} of {len(jobs)} episodes were played before, in {log.folder}"
            typer.echo(f"{told} (--fresh plays them again)", err=True)
        with EvalDisplay(title, len(jobs), quiet=quiet) as display:
            report = await evaluate(
                what.env_id,
                factory,
                jobs,
                concurrency=what.concurrency,
                limits=what.limits,
                log=log,
                on_play=display.add,
                **what.arguments,
            )
    log.finish(report)
    if not quiet:
        report_table(report, title=title, folder=log.folder)
    return report


def _about(what: _What, who: _Who, env: Env, policy: Policy) -> dict[str, Any]:
    """Say what an evaluation is of; one that differs in it is another one."""
    code = [env.unwrapped, policy] if who.model is None else [env.unwrapped]
    return {
        "env": what.env_id,
        "arguments": what.arguments,
        "tasks": None if env.tasks is None else env.tasks.fingerprint(),
        "max_turns": what.limits.max_turns,
        "code": source_hash(code),
        **who.about(),
    }


def source_hash(objects: Iterable[object]) -> str:
    """Return a hash of the files in which the objects' classes are written."""
    digest = hashlib.sha256()
    for each in objects:
        with contextlib.suppress(OSError, TypeError):  # made by hand, or built in
            digest.update(Path(inspect.getfile(type(each))).read_bytes())
    return digest.hexdigest()[:16]


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-").lower()
