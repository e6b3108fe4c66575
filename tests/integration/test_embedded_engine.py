"""The embedded engine as a process: its command line, its HTTP, its end."""

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import aiohttp
import numpy as np
import psutil
import pytest
from embedded_support import LAYERS, TOP_K, Reference, moe_config, prompt, save_model
from safetensors.torch import load_file, save

START_S = 90
QUICK_S = 5


class Server:
    """One engine process."""

    def __init__(self, folder, work, *flags, env=None):
        self.port_file = work / f"port-{time.monotonic_ns()}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "relax_agent.engines.embedded", "--model-path", str(folder),
             "--port", "0", "--port-file", str(self.port_file), *flags],
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        end = time.monotonic() + START_S
        while not self.port_file.exists():
            assert self.process.poll() is None, self.process.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.05)
        self.url = f"http://127.0.0.1:{self.port_file.read_text()}"

    def run(self, scenario, headers=None):
        """Run ``scenario(call)`` where ``call(path, body)`` gives status and answer."""

        async def main():
            async with aiohttp.ClientSession(headers=headers) as session:

                async def call(path, body=None, **options):
                    options = {"json": body} if body is not None else options
                    method = "POST" if options else "GET"
                    async with session.request(method, self.url + path, **options) as answer:
                        raw = await answer.read()
                        is_json = answer.content_type == "application/json"
                        return answer.status, json.loads(raw) if is_json else raw.decode()

                async with asyncio.timeout(60):
                    return await scenario(call)

        return asyncio.run(main())

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(QUICK_S)
        finally:
            self.process.kill()
            self.process.stderr.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [save_model(root / str(seed), moe_config(), seed) for seed in range(2)]


@pytest.fixture(scope="module")
def reference(folders):
    return Reference(folders[0])


@pytest.fixture(scope="module")
def server(folders, tmp_path_factory):
    server = Server(folders[0], tmp_path_factory.mktemp("server"))
    yield server
    server.end()


def request(ids, rid=None, new=8, **params):
    body = {"input_ids": ids, "return_logprob": True, "return_routed_experts": True}
    body["sampling_params"] = {"max_new_tokens": new, "sampling_seed": 1, "ignore_eos": True}
    body["sampling_params"] |= params
    return body | ({"rid": rid} if rid else {})


async def until(call, **wanted):
    """Wait until ``/server_info`` says what is wanted."""
    while True:
        _, info = await call("/server_info")
        if all(info[key] == value for key, value in wanted.items()):
            return info
        await asyncio.sleep(0.01)


async def in_flight(call, body, least=3):
    """Send a long request; return its task once it has made some steps."""
    _, before = await call("/server_info")
    task = asyncio.create_task(call("/generate", body))
    while True:
        _, info = await call("/server_info")
        if info["counters"]["steps"] >= before["counters"]["steps"] + least:
            return task
        await asyncio.sleep(0)


async def send_weights(call, folder, version):
    tensors = list(load_file(folder / "model.safetensors").items())
    answers = [await call("/begin_weight_update", {})]
    for part in range(2):
        answers.append(
            await call(
                f"/update_weights_from_tensor?weight_version={version}",
                data=save(dict(tensors[part::2])),
                headers={"content-type": "application/octet-stream"},
            )
        )
    answers.append(await call("/end_weight_update", {}))
    return [(status, answer["success"]) for status, answer in answers]


def test_concurrent_answers_carry_exact_logprobs_and_routes(server, reference):
    prompts = [prompt(n, n) for n in (1, 7, 30, 31, 120)]

    async def scenario(call):
        return await asyncio.gather(*(call("/generate", request(ids)) for ids in prompts))

    for ids, (status, answer) in zip(prompts, server.run(scenario), strict=True):
        assert status == 200
        meta, output = answer["meta_info"], answer["output_ids"]
        assert meta["finish_reason"] == {"type": "length", "length": 8}
        assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 8}]
        assert [entry[1] for entry in meta["output_token_logprobs"]] == output
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        assert logprobs == pytest.approx(reference.logprobs(ids + output, len(ids)), abs=1e-5)
        routes = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype="<i4")
        routes = routes.reshape(len(ids) + 8 - 1, LAYERS, TOP_K)
        assert np.array_equal(routes, reference.routes((ids + output)[:-1]))


def test_wrong_requests_are_400_with_words(server):
    async def scenario(call):
        for body, words in [
            ({"input_ids": [1], "sampling_params": {"foo": 1}}, "unknown field `foo`"),
            ({"input_ids": [1], "stream": True}, "stream is not supported"),
            ({"input_ids": [5] * 2000}, "The input (2000 tokens) is longer"),
            ({"text": "hello"}, "send input_ids"),
        ]:
            status, answer = await call("/generate", body)
            assert status == 400
            assert words in answer["error"]["message"]
        status, answer = await call("/generate", data=b"{nonsense")
        assert (status, "not JSON" in answer["error"]["message"]) == (400, True)
        assert (await call("/pause_generation", {"mode": "sideways"}))[0] == 400
        assert (await call("/nowhere"))[0] == 404
        status, answer = await call("/update_weights_from_disk", {"model_path": "/nowhere"})
        assert (status, answer["success"]) == (400, False)

    server.run(scenario)


def test_a_client_that_hangs_up_frees_its_row(server):
    async def scenario(call):
        for _ in range(5):
            task = await in_flight(call, request(prompt(9), new=900))
            task.cancel()
            await until(call, running_requests=0, waiting_requests=0)

    server.run(scenario)


def test_an_abort_by_id_returns_the_partial_answer(server, reference):
    ids = prompt(9)

    async def scenario(call):
        task = await in_flight(call, request(ids, "long", new=900))
        assert (await call("/abort_request", {"rid": "lon"}))[0] == 200  # exact ids only
        assert not task.done()
        await call("/abort_request", {"rid": "long"})
        return await task

    status, answer = server.run(scenario)
    output = answer["output_ids"]
    assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")
    assert 0 < len(output) < 900
    logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert logprobs == pytest.approx(reference.logprobs(ids + output, len(ids)), abs=1e-5)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_new_weights_in_mid_answer_over_http(server, folders, mode):
    async def scenario(call):
        _, start = await call("/model_info")
        task = await in_flight(call, request(prompt(9), new=300))
        assert (await call("/pause_generation", {"mode": mode}))[0] == 200
        assert await send_weights(call, folders[1], 7) == [(200, True)] * 4
        status, _ = await call("/flush_cache", {})
        assert status == (200 if mode == "retract" else 400)
        assert (await call("/health_generate"))[0] == 200
        assert not task.done()
        await call("/continue_generation", {})
        _, answer = await task
        spans = answer["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == [start["weight_version"], "7"]
        assert spans[0]["end"] == spans[1]["start"]
        assert (spans[0]["start"], spans[1]["end"]) == (0, 300)
        assert answer["meta_info"]["num_retractions"] == (mode == "retract")
        body = {"model_path": str(folders[0]), "weight_version": "0"}
        assert (await call("/update_weights_from_disk", body))[0] == 200
        assert (await call("/model_info"))[1]["weight_version"] == "0"

    server.run(scenario)


def test_weights_are_never_taken_as_json_or_pickle(server):
    async def scenario(call):
        assert (await call("/begin_weight_update", {}))[0] == 200
        status, answer = await call(
            "/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]}
        )
        assert (status, "no pickle" in answer["message"]) == (400, True)
        status, answer = await call("/end_weight_update", {})
        assert (status, "missing" in answer["message"]) == (400, True)
        assert (await call("/generate", request(prompt(5))))[0] == 200

    server.run(scenario)


def test_the_server_answers_while_it_generates(server):
    async def scenario(call):
        work = [asyncio.create_task(call("/generate", request(prompt(800, s), new=100)))
                for s in range(6)]  # fmt: skip
        answered = 0
        while not all(task.done() for task in work):
            assert (await call("/health"))[0] == 200
            answered += 1
        return answered

    assert server.run(scenario) >= 10


def test_memory_and_rows_stay_flat_over_many_requests(server):
    process = psutil.Process(server.process.pid)

    async def burst(call, rounds):
        for turn in range(rounds):
            ids = [prompt(60, turn * 16 + n) for n in range(16)]
            await asyncio.gather(*(call("/generate", request(one, new=4)) for one in ids))

    async def scenario(call):
        await burst(call, 15)
        before = process.memory_info().rss, process.num_fds(), process.num_threads()
        await burst(call, 40)
        after = process.memory_info().rss, process.num_fds(), process.num_threads()
        await until(call, running_requests=0, waiting_requests=0)
        return before, after

    before, after = server.run(scenario)
    # Cached prefixes fill their fixed pool on the way: 640 x 64 tokens, 0.8 KB each.
    assert after[0] - before[0] < 64e6
    assert after[1:] == before[1:]


def test_metrics_name_load_and_counters(server):
    async def scenario(call):
        return await call("/metrics")

    status, text = server.run(scenario)
    assert status == 200
    values = dict(line.split() for line in text.splitlines())
    assert values["sglang:num_running_reqs"] == "0"
    assert int(values["sglang:generated_tokens_total"]) > 0


def test_a_token_is_asked_for_everywhere_but_at_health(folders, tmp_path):
    server = Server(folders[0], tmp_path, "--token-env", "SECRET", env={"SECRET": "s3cret"})

    async def scenario(call):
        status, _ = await call("/generate", request(prompt(3)))
        return status, (await call("/health"))[0], (await call("/model_info"))[0]

    try:
        assert server.run(scenario) == (401, 200, 401)
        assert server.run(scenario, {"Authorization": "Bearer wrong"}) == (401, 200, 401)
        assert server.run(scenario, {"Authorization": "Bearer s3cret"}) == (200, 200, 200)
    finally:
        server.end()


def test_sigterm_ends_it_at_once_even_with_open_requests(folders, tmp_path):
    server = Server(folders[0], tmp_path)

    async def scenario(call):
        task = await in_flight(call, request(prompt(9), new=1000))
        started = time.monotonic()
        status = await asyncio.to_thread(server.end)
        with contextlib.suppress(aiohttp.ClientError):
            assert (await task)[0] == 503
        return status, time.monotonic() - started

    status, took = server.run(scenario)
    assert status == 0
    assert took < QUICK_S


def test_it_ends_with_its_parent(folders, tmp_path):
    code = (
        "import subprocess, sys, os, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'relax_agent.engines.embedded',"
        " '--model-path', sys.argv[1], '--port', '0', '--port-file', sys.argv[2],"
        " '--parent-pid', str(os.getpid())])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    port_file = tmp_path / "port"
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(folders[0]), str(port_file)],
        stdout=subprocess.PIPE,
        text=True,
    )
    child = psutil.Process(int(parent.stdout.readline()))
    end = time.monotonic() + START_S
    while not port_file.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert child.is_running()
    parent.kill()
    parent.wait()
    gone, _ = psutil.wait_procs([child], timeout=QUICK_S)
    assert gone
    parent.stdout.close()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "{taken}"], "cannot bind 127.0.0.1:{taken}: Address already in use"),
        (["--port", "0", "--dtype", "int8"], "--dtype"),
        (["--port", "0", "--token-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE is not set"),
    ],
)
def test_what_is_wrong_at_the_start_is_one_line_and_status_2(folders, flags, words):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = subprocess.run(
            [sys.executable, "-m", "relax_agent.engines.embedded", "--model-path", folders[0],
             *(flag.format(taken=port) for flag in flags)],
            capture_output=True, text=True, timeout=START_S, check=False,
        )  # fmt: skip
    assert ended.returncode == 2
    lines = ended.stderr.strip().splitlines()
    assert len(lines) == 1
    assert words.format(taken=port) in lines[0]


def test_a_missing_model_is_status_2(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "relax_agent.engines.embedded", "--model-path", tmp_path / "no",
         "--port", "0"],
        capture_output=True, text=True, timeout=START_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert len(ended.stderr.strip().splitlines()) == 1
