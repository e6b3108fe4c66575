"""``relax-agent gateway``: a program plays one episode against an engine that runs."""

import asyncio
import signal
import sys

import openai
from media_support import tiny

from relax_agent.run.episodes import read_episodes

PROGRAM = "import sys; from relax_agent.cli import main; sys.argv[0] = 'relax-agent'; main()"


async def run(*arguments):
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, "gateway", *map(str, arguments),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


def test_a_program_plays_one_episode_and_ctrl_c_writes_it(tmp_path):
    from aiohttp.test_utils import TestServer

    from relax_agent.engines.embedded.__main__ import build_server
    from relax_agent.engines.embedded.settings import EmbeddedSettings

    model, out = tiny("qwen3_vl"), tmp_path / "episode.jsonl"
    server = build_server(EmbeddedSettings(model_path=model, random_seed=0))

    async def main():
        async with asyncio.timeout(90), TestServer(server.app()) as http:
            process = await run(
                "--engine", http.make_url(""), "--model", model, "--renderer", "qwen3",
                "--out", out, "--max-tokens-per-turn", 8, "--max-context", 2048,
            )  # fmt: skip
            told = [(await process.stdout.readline()).decode() for _ in range(4)]
            if not told[0]:  # it has ended
                return process.returncode, (await process.stderr.read()).decode()
            exports = dict(line.removeprefix("export ").strip().split("=", 1) for line in told)
            client = openai.AsyncOpenAI(
                base_url=exports["OPENAI_BASE_URL"], api_key=exports["OPENAI_API_KEY"]
            )
            async with client:
                messages = [{"role": "user", "content": "hi"}]
                await client.chat.completions.create(model="policy", messages=messages)
            process.send_signal(signal.SIGINT)
            _, errors = await process.communicate()
            return process.returncode, errors.decode()

    try:
        status, errors = asyncio.run(main())
    finally:
        server.scheduler.stop()
    assert status == 0, errors
    assert "1 answers, 8 sampled tokens" in errors
    (episode,) = read_episodes(out)
    assert len(episode.turns) == 1 and episode.sampled_tokens == 8


def test_a_model_that_is_not_there_is_one_line(tmp_path):
    async def main():
        process = await run("--engine", "http://127.0.0.1:1", "--model", tmp_path)
        _, errors = await process.communicate()
        return process.returncode, errors.decode()

    status, errors = asyncio.run(main())
    assert status != 0 and "there is no model in" in errors and "Traceback" not in errors
