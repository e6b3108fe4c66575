"""Ready-made tools as their users have them: in an environment, and served over HTTP."""

import asyncio
import tempfile
from functools import partial

import numpy as np
import pytest

from relax_agent.envs import Task, TaskSet, ToolEnv, play
from relax_agent.envs.checking import check_env
from relax_agent.envs.policies import ScriptedPolicy
from relax_agent.errors import ToolErrorKind
from relax_agent.media import decode_image, encode_mp4, encode_png, encode_wav
from relax_agent.messages import Audio, Image, ToolCall, user
from relax_agent.tools import (
    AUDIO_TOOLS,
    IMAGE_TOOLS,
    VIDEO_TOOLS,
    FileTools,
    MediaShelf,
    RemoteToolset,
    Toolset,
    open_server,
)
from relax_agent.tools.loading import load_toolset

PIXELS = np.zeros((30, 40, 3), np.uint8)
PIXELS[:, 20:] = 255
PICTURE = encode_png(PIXELS)
FILM = encode_mp4(np.stack([np.full((24, 32, 3), 6 * n, np.uint8) for n in range(20)]), 10)


class Watch(ToolEnv):
    """Asks how bright a moment of a film is that the model has not been shown."""

    tools = MediaShelf([*VIDEO_TOOLS, *IMAGE_TOOLS])
    tasks = TaskSet([Task(id="film", prompt="How bright is the film at 1 s?", answer="60")])

    def setup(self, task):
        self.session.put("film", FILM)

    def first_messages(self, task):
        return [user([Image(PICTURE.data), f"{task.prompt} It is called film."])]

    def score(self, task, transcript):
        return float(transcript.answer == task.answer)


def test_a_model_looks_into_a_film_by_its_name_and_on_at_what_it_got():
    script = [
        ToolCall("video_frames", {"video": "film", "times": [1]}, "a"),
        ToolCall("crop_image",
                 {"image": "image-1", "left": 0, "top": 0, "right": 8, "bottom": 8}, "b"),
        ToolCall("image_statistics", {"image": "image-2"}, "c"),
        ToolCall("image_statistics", {"image": "image:1"}, "d"),
        "60",
    ]  # fmt: skip
    record = asyncio.run(play(Watch(), ScriptedPolicy(script)))
    answers = [message.text for message in record.messages if message.role == "tool"]
    assert record.reward == 1.0 and answers[0].endswith("image-1:\n")
    assert '"mean_rgb": [60.0, 60.0, 60.0]' in answers[2] and '"width": 40' in answers[3]


def test_an_environment_with_a_shelf_passes_the_check():
    check_env(Watch())


class Notes(ToolEnv):
    tools = (partial(FileTools, {"notes.md": "The word is owl."}),)
    tasks = TaskSet([Task(id="word", prompt="Which word?", answer="owl")])

    def score(self, task, transcript):
        return float(transcript.answer == task.answer)


def test_an_environment_with_files_leaves_none_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    check_env(Notes())
    calls = [ToolCall("search_files", {"text": "word"}, "a"), "owl"]
    assert asyncio.run(play(Notes(), ScriptedPolicy(calls))).reward == 1.0
    assert list(tmp_path.iterdir()) == []


def over_http(toolset, body):
    async def main():
        async with open_server(toolset) as url:
            remote = await RemoteToolset.connect(url)
            try:
                return await asyncio.wait_for(body(remote), 60)
            finally:
                await remote.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("image", {"rotate_image": {"image": PICTURE, "degrees": 90}}),
        ("audio", {"cut_audio": {"audio": encode_wav(np.zeros(800, np.int16), 8000), "end": 0.05}}),
        ("video", {"video_contact_sheet": {"video": FILM, "frames": 4}}),
        ("files", {"write_file": {"path": "a/b", "text": "x"}, "read_file": {"path": "a/b"}}),
        ("calculator", {"calculator": {"expression": "1/8"}}),
    ],
)
def test_a_served_module_answers_as_the_tools_in_this_process_do(module, arguments):
    local = load_toolset(f"relax_agent.tools.{module}")

    async def ask(tools):
        session = tools.session() if tools.has_sessions else tools
        try:
            calls = [ToolCall(name, values, "c") for name, values in arguments.items()]
            results = [await session.call(call) for call in calls]
            return [(result.error, result.content) for result in results]
        finally:
            await session.close()

    there = over_http(local, ask)
    assert there == asyncio.run(ask(local))
    assert all(error is None for error, _ in there)


def test_a_shelf_stands_in_front_of_a_server_too():
    async def body(remote):
        session = MediaShelf(remote, {"photo": PICTURE}).session()
        turned = await session.call(ToolCall("rotate_image", {"image": "photo", "degrees": 90}))
        again = await session.call(ToolCall("rotate_image", {"image": "image-1", "degrees": -90}))
        wrong = await session.call(ToolCall("rotate_image", {"image": "none", "degrees": -90}))
        await session.close()
        still = await remote.call(ToolCall("resize_image", {"image": PICTURE, "width": 4}))
        return turned, again, wrong, still

    turned, again, wrong, still = over_http(Toolset(IMAGE_TOOLS), body)
    assert turned.ok and wrong.error is ToolErrorKind.NOT_FOUND and still.ok
    assert (np.asarray(decode_image(again.content[-1])) == PIXELS).all()


def test_tools_of_all_media_are_one_toolset_without_two_of_a_name():
    toolset = Toolset([*IMAGE_TOOLS, *AUDIO_TOOLS, *VIDEO_TOOLS])
    asyncio.run(toolset.warm_up())
    assert len(toolset) == 16 and isinstance(encode_wav(np.zeros(9, np.int16), 8000), Audio)
