"""Tasks from data: columns, prompts in the forms of the wild, media, splits, and bad rows."""

import asyncio
import base64
import csv
import gzip
import json
import pickle
import re
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_agent.envs import Task, TaskSet
from relax_agent.errors import ConfigError, MediaError, RelaxError
from relax_agent.media import encode_mp4, encode_png, encode_wav
from relax_agent.messages import Image, Message, Text, assistant, system, to_openai, user


def picture(shade, size=(4, 4)):
    return encode_png(np.full((*size, 3), shade, np.uint8))


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(count):
    return [{"question": f"{n}+1?", "gold": n + 1, "level": n % 3} for n in range(count)]


NAMES = {"prompt": "question", "answer": "gold"}


def from_jsonl(tmp_path, rows, **options):
    return TaskSet.from_jsonl(write_jsonl(tmp_path / "t.jsonl", rows), **options)


def from_csv(tmp_path, rows, **options):
    with (tmp_path / "t.csv").open("w", newline="") as file:
        out = csv.DictWriter(file, rows[0])
        out.writeheader()
        out.writerows(rows)
    return TaskSet.from_csv(tmp_path / "t.csv", **options)


def from_parquet(tmp_path, rows, **options):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet", row_group_size=4)
    return TaskSet.from_parquet(tmp_path / "t.parquet", **options)


def from_dataset(tmp_path, rows, **options):
    datasets = pytest.importorskip("datasets")
    return TaskSet.from_dataset(datasets.Dataset.from_list(rows), **options)


def from_generator(tmp_path, rows, **options):
    return TaskSet.from_generator(lambda: iter(rows), **options)


SOURCES = [from_jsonl, from_parquet, from_dataset, from_generator]
EVERY = pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.__name__[5:])


# -- columns ----------------------------------------------------------------------------------


@EVERY
def test_every_source_gives_the_same_tasks_and_the_same_fingerprint(source, tmp_path):
    tasks = source(tmp_path, rows_of(10), **NAMES)
    assert tasks.ids() == tuple(f"train-{n}" for n in range(1, 11))
    assert tasks["train-3"] == Task("train-3", "2+1?", 3, {"level": 2})
    assert tasks["train-3"] in list(tasks)
    expected = TaskSet(
        Task(f"train-{n + 1}", f"{n}+1?", n + 1, {"level": n % 3}) for n in range(10)
    )
    assert tasks.fingerprint() == expected.fingerprint()


def test_csv_gives_text(tmp_path):
    tasks = from_csv(tmp_path, rows_of(3), **NAMES)
    assert tasks["train-3"] == Task("train-3", "2+1?", "3", {"level": "2"})


@EVERY
def test_columns_by_name_by_way_and_by_function(source, tmp_path):
    """The nested form is verl's; the function is GSM8K's answer."""
    rows = [
        {
            "prompt": [{"role": "user", "content": "2+2?"}],
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "solution": "two and two #### 4",
            "index": 17,
        }
    ]
    tasks = source(tmp_path, rows, answer="reward_model.ground_truth", id="index", data=[])
    assert tasks["17"] == Task("17", "2+2?", "4")
    last = source(tmp_path, rows, answer=lambda row: row["solution"].split("####")[1].strip())
    assert last["train-1"].answer == "4"
    assert set(last["train-1"].data) == {"reward_model", "solution", "index"}


@EVERY
def test_a_column_that_is_missing_is_named_with_its_row_and_the_nearest(source, tmp_path):
    with pytest.raises(ConfigError, match=r"(line|row) 1: there is no column 'prompt'.*'question'"):
        source(tmp_path, rows_of(2), answer="gold")
    with pytest.raises(ConfigError, match="no column 'qestion' → did you mean 'question'"):
        source(tmp_path, rows_of(2), prompt="qestion")
    with pytest.raises(ConfigError, match="no column 'golden' → did you mean 'gold'"):
        source(tmp_path, rows_of(2), prompt="question", answer="golden")
    with pytest.raises(ConfigError, match="no column 'levels' → did you mean 'level'"):
        source(tmp_path, rows_of(2), **NAMES, data=["levels"])
    with pytest.raises(ConfigError, match="no column 'picture'"):
        source(tmp_path, rows_of(2), **NAMES, images="picture")
    with pytest.raises(ConfigError, match="no option 'anwser' → did you mean 'answer'"):
        source(tmp_path, rows_of(2), prompt="question", anwser="gold")
    with pytest.raises(ConfigError, match="answer=3 is not a column's name"):
        source(tmp_path, rows_of(2), prompt="question", answer=3)
    with pytest.raises(ConfigError, match=r"data='level' is not a list"):
        source(tmp_path, rows_of(2), **NAMES, data="level")


def test_a_row_that_lacks_what_others_have_is_named(tmp_path):
    rows = [*rows_of(2), {"question": "?"}]
    with pytest.raises(ConfigError, match="line 3: there is no column 'gold'"):
        from_jsonl(tmp_path, rows, **NAMES)
    unsure = from_jsonl(tmp_path, [{"prompt": "a", "answer": 1}, {"prompt": "b"}])
    assert [task.answer for task in unsure] == [1, None]


def test_a_function_that_fails_is_named_with_its_row(tmp_path):
    def gold(row):
        return row["solution"]

    with pytest.raises(ConfigError, match=r"line 1: the function gold failed.*KeyError"):
        from_jsonl(tmp_path, rows_of(1), prompt="question", answer=gold)


@EVERY
def test_ids_are_text_or_whole_numbers_each_once(source, tmp_path):
    tasks = source(tmp_path, [{"id": 7, "prompt": "a"}, {"id": 8, "prompt": "b"}])
    assert tasks.ids() == ("7", "8")
    with pytest.raises(ConfigError, match=r"the id 'x': .*(line|row) 1 and .*(line|row) 3"):
        source(tmp_path, [{"id": i, "prompt": i} for i in ("x", "y", "x")])
    for wrong in (None, 1.5, True, "", " ", float("nan"), [1]):
        with pytest.raises(ConfigError, match=r"(line|row) 1: the id is"):
            source(tmp_path, [{"id": wrong, "prompt": "a"}])


def test_the_number_one_and_the_text_one_are_the_same_id(tmp_path):
    with pytest.raises(ConfigError, match="two tasks have the id '1'"):
        from_jsonl(tmp_path, [{"id": 1, "prompt": "a"}, {"id": "1", "prompt": "b"}])


def test_an_id_that_no_file_could_hold_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="line 1: the id is"):
        from_jsonl(tmp_path, [{"id": "\ud800", "prompt": "a"}])


def test_a_data_column_with_objects_is_spread_out(tmp_path):
    assert from_jsonl(tmp_path, [{"prompt": "a", "data": {"k": 1}, "m": 2}])["train-1"].data == {
        "k": 1,
        "m": 2,
    }
    assert from_jsonl(tmp_path, [{"prompt": "a", "data": [1]}])["train-1"].data == {"data": [1]}
    assert from_jsonl(tmp_path, [{"prompt": "a", "data": None}])["train-1"].data == {}
    with pytest.raises(ConfigError, match="line 1: 'm' is a column, and also"):
        from_jsonl(tmp_path, [{"prompt": "a", "data": {"m": 1}, "m": 2}])


@EVERY
def test_what_an_episode_does_to_its_task_stays_in_that_episode(source, tmp_path):
    tasks = source(tmp_path, [{"prompt": "a", "answer": [1], "board": [[0, 0], [0, 0]]}])
    one = tasks["train-1"]
    one.data["board"][0][0] = 9
    one.answer.append(2)
    other = tasks["train-1"]
    assert (other.answer, other.data["board"]) == ([1], [[0, 0], [0, 0]])


def test_a_nan_answer_is_told_and_a_nan_beside_it_is_not(tmp_path):
    tasks = from_jsonl(tmp_path, [{"prompt": "a", "answer": None, "score": float("nan")}])
    assert tasks["train-1"].answer is None
    assert tasks.fingerprint() == tasks.fingerprint()
    with pytest.raises(ConfigError, match="line 1: the answer is nan"):
        from_jsonl(tmp_path, [{"prompt": "a", "answer": float("nan")}])


# -- prompts ----------------------------------------------------------------------------------

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "2+2?"},
]


@EVERY
def test_a_conversation_keeps_its_roles(source, tmp_path):
    task = source(tmp_path, [{"prompt": CHAT, "answer": 4}])["train-1"]
    assert task.to_messages() == [
        system("Be brief."), user("Hi"), assistant("Hello"), user("2+2?"),
    ]  # fmt: skip
    assert task.prompt == "2+2?"


@EVERY
def test_one_user_message_is_the_same_as_its_text(source, tmp_path):
    task = source(tmp_path, [{"prompt": [{"role": "user", "content": "2+2?"}]}])["train-1"]
    assert task == Task("train-1", "2+2?")


def test_other_spellings_of_conversations(tmp_path):
    rows = [
        {"prompt": [{"from": "system", "value": "S"}, {"from": "human", "value": "Q"}]},
        {"prompt": [{"role": "developer", "content": "S"}, {"role": "user", "content": ["Q"]}]},
    ]
    for task in from_jsonl(tmp_path, rows):
        assert task.to_messages() == [system("S"), user("Q")]


def test_tool_calls_in_a_conversation_are_kept(tmp_path):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    chat = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "name": "f", "content": "3"},
    ]
    messages = from_jsonl(tmp_path, [{"prompt": chat}])["train-1"].to_messages()
    assert messages[1].tool_calls[0].arguments == {"x": 1}
    assert (messages[2].role, messages[2].tool_call_id, messages[2].text) == ("tool", "c", "3")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (None, "the prompt is missing"),
        (float("nan"), "the prompt is missing"),
        ("", "the prompt is empty"),
        (" \n", "the prompt is empty"),
        ([], "the prompt is an empty list"),
        (5, "the prompt is a value of type int"),
        ({"role": "user"}, "the prompt is a value of type dict"),
        ([{"role": "user", "content": ""}], "the prompt is empty"),
        ([{"role": "bot", "content": "x"}], "message 1 of the prompt has the role 'bot'"),
        ([{"role": "user", "content": 5}], "message 1 of the prompt has a value of type int"),
        ([{"role": "user", "content": "a"}, "b"], "message 2 of the prompt is a value of type str"),
        ([{"role": "system", "content": "a"}], "no user message"),
        (CHAT[:3], "ends with an assistant message"),
        ([{"type": "thing"}], "a content part of type 'thing'"),
        ([{"type": "text", "text": 5}], "the text of a content part is a value of type int"),
        ([5], "a content part is a value of type int"),
        ([{"role": "user", "content": "a", "tool_calls": 5}, 7], "message 2 of the prompt"),
        ([{"type": "image"}], "1 place for images and the row has 0 → name the column"),
        ([{"type": "image", "image": "none.png"}], "there is no file .*none.png"),
        ([{"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}], "on the network"),
    ],
)
def test_a_prompt_that_is_none_is_told_with_its_row(tmp_path, prompt, words):
    with pytest.raises(ConfigError, match=f"t.jsonl, line 2: .*{words}"):
        from_jsonl(tmp_path, [{"prompt": "fine"}, {"prompt": prompt}])


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"prompt": "a\\ud800b", "answer": "\\ud800"}\n')
    tasks = TaskSet.from_jsonl(tmp_path / "t.jsonl")
    assert tasks["train-1"].prompt == "a?b"
    assert len(tasks.fingerprint()) == 16


# -- media ------------------------------------------------------------------------------------


def media_row(tmp_path, form):
    """One picture in one of the forms that data sets have."""
    data = picture(200).data
    (tmp_path / "pics").mkdir(exist_ok=True)
    (tmp_path / "pics" / "a.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {
        "path": "pics/a.png",
        "absolute": str(tmp_path / "pics" / "a.png"),
        "file url": (tmp_path / "pics" / "a.png").as_uri(),
        "bytes": data,
        "data url": url,
        "hf bytes": {"bytes": data, "path": "gone.png"},
        "hf path": {"bytes": None, "path": str(tmp_path / "pics" / "a.png")},
        "list": ["pics/a.png"],
    }[form]


@pytest.mark.parametrize(
    "form", ["path", "absolute", "file url", "bytes", "data url", "hf bytes", "hf path", "list"]
)
@EVERY
def test_a_picture_in_every_form_from_every_source(source, form, tmp_path):
    if source is from_jsonl and "bytes" in form:
        pytest.skip("JSON has no bytes")
    rows = [{"prompt": "What is it?", "image": media_row(tmp_path, form)}]
    tasks = source(tmp_path, rows, images="image", media_folder=tmp_path)
    expected = Task("train-1", (picture(200), Text("What is it?")))
    assert tasks["train-1"] == expected
    assert tasks.fingerprint() == TaskSet([expected]).fingerprint()


def test_relative_paths_start_at_the_data_file(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    (tmp_path / "a.png").write_bytes(picture(1).data)
    tasks = from_jsonl(tmp_path, [{"prompt": "?", "image": "a.png"}], images="image")
    assert tasks["train-1"].prompt[0] == picture(1)


def test_sound_and_video_columns(tmp_path):
    wav = encode_wav(np.zeros(160, np.float32), 16000)
    mp4 = encode_mp4(np.zeros((2, 16, 16, 3), np.uint8), 5)
    (tmp_path / "a.mp4").write_bytes(mp4.data)
    rows = [{
        "prompt": "<video> and <audio>?",
        "sound": {"array": np.zeros(160, np.float32), "sampling_rate": 16000},
        "clip": tmp_path / "a.mp4",
    }]  # fmt: skip
    tasks = TaskSet.from_generator(rows, audios="sound", videos="clip")
    assert tasks["train-1"].prompt == (mp4, Text(" and "), wav, Text("?"))


def test_markers_are_replaced_in_order_over_all_messages(tmp_path):
    chat = [
        {"role": "user", "content": "<image>\nfirst"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "then <image> and <image>."},
    ]
    rows = [{"prompt": chat, "images": [picture(n) for n in (1, 2, 3)]}]
    first, _, last = TaskSet.from_generator(rows, images="images")["train-1"].to_messages()
    assert first == user([picture(1), "\nfirst"])
    assert last == user(["then ", picture(2), " and ", picture(3), "."])


def test_placeholders_of_hugging_face_and_openai_parts():
    url = picture(9).data_url()
    content = [
        {"type": "image", "text": None, "image": None},
        {"type": "text", "text": "or", "image": None},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "input_image", "image_url": url},
        {"type": "image", "source": {"type": "base64", "data": url.partition(",")[2]}},
    ]
    rows = [{"prompt": [{"role": "user", "content": content}], "pics": [picture(3)]}]
    task = TaskSet.from_generator(rows, images="pics")["train-1"]
    assert task.prompt == (picture(3), Text("or"), picture(9), picture(9), picture(9))


def test_openai_sound_and_what_this_project_writes_itself():
    wav = encode_wav(np.zeros(160, np.float32), 16000)
    part = {"data": base64.b64encode(wav.data).decode(), "format": "wav"}
    video = encode_mp4(np.zeros((1, 16, 16, 3), np.uint8), 5)
    rows = [
        {"prompt": [{"type": "input_audio", "input_audio": part}]},
        {"prompt": [to_openai(user(["?", wav, video, picture(1)]))]},
        {"prompt": [user(["?", wav, video, picture(1)])]},
        {"prompt": ["?", wav, video, picture(1)]},
    ]
    first, *others = TaskSet.from_generator(rows)
    assert first.prompt == (wav,)
    assert {task.prompt for task in others} == {(Text("?"), wav, video, picture(1))}


@pytest.mark.parametrize(
    ("prompt", "images", "words"),
    [
        ("<image> and <image>", [1], "2 places for images and the row has 1"),
        ("<image>", [1, 2], "1 place for images and the row has 2"),
        ("<image>", [], "1 place for images and the row has 0"),
        ("<image>", None, "1 place for images and the row has 0"),
    ],
)
def test_places_and_media_that_do_not_match_are_told_with_the_row(prompt, images, words):
    rows = [{"prompt": prompt, "images": images and [picture(n) for n in images]}]
    with pytest.raises(ConfigError, match=f"row 1: .*{words}"):
        TaskSet.from_generator(rows, images="images")


def test_a_marker_of_a_kind_without_a_column_is_text():
    rows = [{"prompt": "what does <video> do in HTML?", "image": None}]
    tasks = TaskSet.from_generator(rows, images="image")
    assert tasks["train-1"].prompt == "what does <video> do in HTML?"


def test_media_without_a_place_come_before_the_question():
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    rows = [{"prompt": chat, "a": picture(1), "b": [picture(2), None]}]
    task = TaskSet.from_generator(rows, images=["a", "b"])["train-1"]
    assert task.to_messages() == [system("S"), user([picture(1), picture(2), "Q"])]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("gone.png", "there is no file .*gone.png"),
        ("folder", "is a folder, not a file"),
        ("http://x.org/a.png", "is on the network → download"),
        ("pipe", "is not a regular file"),
        ("a\0b", "is not a path"),
        ("data:image/png;base64", "a data URL without data"),
        (["fine.png", "gone.png"], "there is no file .*gone.png"),
    ],
)
def test_media_that_are_not_there_are_told_when_the_set_is_made(tmp_path, value, words):
    import os

    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "fine.png").write_bytes(picture(1).data)
    rows = [{"prompt": "?", "image": "fine.png"}, {"prompt": "?", "image": value}]
    with pytest.raises(ConfigError, match=f"t.jsonl, line 2: .*{words}"):
        from_jsonl(tmp_path, rows, images="image")


def test_a_file_that_is_no_picture_is_told_with_its_row_when_it_is_read(tmp_path):
    (tmp_path / "a.png").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    tasks = from_jsonl(tmp_path, [{"prompt": "?", "image": "a.png"}], images="image")
    with pytest.raises(MediaError, match=r"t\.jsonl, line 1: .*pointer of Git LFS"):
        tasks["train-1"]
    with pytest.raises(MediaError, match=r"t\.jsonl, line 1"):
        tasks.fingerprint()


@EVERY
def test_bytes_that_are_no_picture_are_told_when_the_set_is_made(source, tmp_path):
    if source is from_jsonl:
        pytest.skip("JSON has no bytes")
    rows = [{"prompt": "?", "image": {"bytes": b"<html>" * 99, "path": None}}]
    with pytest.raises(ConfigError, match=r"row 1: this is not an image.*markup"):
        source(tmp_path, rows, images="image")


def test_a_set_over_files_reads_none_of_them_until_a_task_is_looked_up(tmp_path):
    """Memory stays flat: 400 files of 256 KiB are 100 MiB."""
    noise = picture(0).data + bytes(256 * 1024)
    for number in range(400):
        (tmp_path / f"{number}.png").write_bytes(noise)
    rows = [{"prompt": "?", "image": f"{n}.png"} for n in range(400)]
    path = write_jsonl(tmp_path / "t.jsonl", rows)
    tracemalloc.start()
    tasks = TaskSet.from_jsonl(path, images="image")
    _, load_peak = tracemalloc.get_traced_memory()
    tasks.fingerprint()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert load_peak < 2 * 2**20
    assert peak < 4 * 2**20
    assert len(tasks["train-7"].prompt[0].data) == len(noise)


@pytest.mark.parametrize("source", [from_parquet, from_dataset])
def test_pictures_inside_a_table_stay_on_disk(source, tmp_path):
    rows = [
        {"prompt": "?", "image": {"bytes": picture(n).data + bytes(300_000), "path": None}}
        for n in range(40)
    ]
    tasks = source(tmp_path, rows, images="image")
    copy = pickle.dumps(tasks)
    if source is from_parquet:
        assert len(copy) < 300_000
    assert pickle.loads(copy)["train-9"] == tasks["train-9"]
    assert tasks["train-9"].prompt[0].data.startswith(picture(8).data)


def test_media_are_read_in_a_thread_where_there_is_an_event_loop(tmp_path, monkeypatch):
    """T86: whatever reads a task in an event loop does not block it."""
    (tmp_path / "a.png").write_bytes(picture(1).data)
    tasks = from_jsonl(tmp_path, [{"prompt": "?", "image": "a.png"}], images="image")
    seen = []
    row = tasks._tasks["train-1"]
    real = type(row).load
    monkeypatch.setattr(
        type(row), "load", lambda self: (seen.append(threading.current_thread()), real(self))[1]
    )
    assert asyncio.run(tasks.fetch("train-1")) == tasks["train-1"]
    assert seen[0] is not threading.main_thread()
    assert seen[1] is threading.main_thread()


# -- splits -----------------------------------------------------------------------------------


@EVERY
def test_a_share_is_held_out_by_id_and_stays_so(source, tmp_path):
    def rows(count):
        return [{"id": f"t{n}", "prompt": "?"} for n in range(count)]

    few, many = (
        source(tmp_path, rows(60), eval_share=0.3),
        source(tmp_path, rows(120), eval_share=0.3),
    )
    assert set(few.ids("eval")) == set(many.ids("eval")) & {f"t{n}" for n in range(60)}
    assert 5 < len(few.ids("eval")) < 35
    assert few.ids("eval") == TaskSet.split(list(few), eval_share=0.3).ids("eval")


@EVERY
def test_ids_and_a_column_hold_out_too(source, tmp_path):
    rows = [{"id": f"t{n}", "prompt": "?", "part": "test" if n > 2 else "train"} for n in range(5)]
    named = source(tmp_path, rows, eval_ids=["t1"])
    assert (named.ids("eval"), len(named.ids())) == (("t1",), 4)
    column = source(tmp_path, rows, split="part")
    assert column.ids("eval") == ("t3", "t4")
    assert column["t3"].data == {}
    with pytest.raises(ConfigError, match=r"tasks that do not exist, e.g. 'nope'"):
        source(tmp_path, rows, eval_ids=["t1", "nope"])
    with pytest.raises(ConfigError, match="eval_share and split both say"):
        source(tmp_path, rows, split="part", eval_share=0.5)
    with pytest.raises(ConfigError, match="no column 'prat'"):
        source(tmp_path, rows, split="prat")
    with pytest.raises(ConfigError, match="has no split 'train' → it has '\\?'"):
        source(tmp_path, rows, split="prompt")
    for wrong in (0, 1, -1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="not between 0 and 1"):
            source(tmp_path, rows, eval_share=wrong)
    with pytest.raises(ConfigError, match="eval_ids is a string"):
        source(tmp_path, rows, eval_ids="t1")


def test_splits_by_file_and_of_several_files(tmp_path):
    for name in "abc":
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{n}"} for n in range(2)])
    a, b, c = (tmp_path / f"{name}.jsonl" for name in "abc")
    tasks = TaskSet.from_jsonl([a, b], str(c))
    assert [tasks[i].prompt for i in tasks.ids()] == ["a0", "a1", "b0", "b1"]
    assert tasks.ids("eval") == ("eval-1", "eval-2")
    write_jsonl(b, [{"prompt": "fine"}, {"question": "?"}])
    with pytest.raises(ConfigError, match=r"b\.jsonl, line 2"):
        TaskSet.from_jsonl([a, b])
    write_jsonl(b, [{"id": "train-1", "prompt": "?"}])
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 1 and .*b\.jsonl, line 1"):
        TaskSet.from_jsonl([a, b])
    with pytest.raises(ConfigError, match="eval and eval_share both"):
        TaskSet.from_jsonl(a, c, eval_share=0.5)
    with pytest.raises(ConfigError, match="a list of files is empty"):
        TaskSet.from_jsonl([])


# -- bad files --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no tasks: it is empty"),
        (b"\n \n", "has no tasks: it is empty"),
        (b'{"prompt": "a"}\n{"prompt": ', "line 2 is not JSON"),
        (b'{"prompt": "a"}\n["a"]', "line 2 is a list, not an object"),
        (b'[\n{"prompt": "a"}]', r"line 1 is not JSON.*from_generator\(json.load"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}', "line 2 is not UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16"), "line 1 is not UTF-8"),
        (gzip.compress(b'{"prompt": "a"}'), "line 1 is not UTF-8.*unpack it first"),
        (b"[" * 100_000, "line 1 is not JSON"),
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "line 1 is not JSON"),
        (b"PAR1", "line 1 is not JSON"),
    ],
    ids=range(11),
)
def test_a_bad_jsonl_file_is_told_with_its_line(tmp_path, content, words):
    (tmp_path / "t.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=f"t.jsonl.*{words}") as told:
        TaskSet.from_jsonl(tmp_path / "t.jsonl")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "content",
    [
        b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n',
        b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n',
        b'\n{"prompt": "a"}\n\n\n{"prompt": "b"}',
    ],
    ids=["byte order mark", "CRLF", "blank lines"],
)
def test_what_editors_do_to_files_does_not_matter(tmp_path, content):
    (tmp_path / "t.jsonl").write_bytes(content)
    tasks = TaskSet.from_jsonl(tmp_path / "t.jsonl")
    assert [(task.id, task.prompt) for task in tasks] == [("train-1", "a"), ("train-2", "b")]


def test_separators_inside_json_strings_do_not_end_a_line(tmp_path):
    text = "a\u2028b\x85c\u2029d"
    (tmp_path / "t.jsonl").write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n")
    assert TaskSet.from_jsonl(tmp_path / "t.jsonl")["train-1"].prompt == text


@pytest.mark.parametrize("make", [TaskSet.from_jsonl, TaskSet.from_parquet, TaskSet.from_csv])
def test_a_file_that_is_none_is_told(tmp_path, make):
    (tmp_path / "part-0.bin").write_bytes(b"\0\xff\xfe garbage")
    with pytest.raises(ConfigError, match=r"cannot read tasks from .*nope: No such file"):
        make(tmp_path / "nope")
    with pytest.raises(ConfigError, match=r"it is a folder → name files in it, e.g. .*part-0.bin"):
        make(tmp_path)
    with pytest.raises(ConfigError, match=r"part-0.bin"):
        make(tmp_path / "part-0.bin")


def test_a_huge_row_is_read(tmp_path):
    text = "x" * 3_000_000
    assert from_jsonl(tmp_path, [{"prompt": text}])["train-1"].prompt == text
    limit = csv.field_size_limit()
    assert from_csv(tmp_path, [{"prompt": text}])["train-1"].prompt == text
    assert csv.field_size_limit() == limit


def test_bad_csv_is_told_with_its_line(tmp_path):
    path = tmp_path / "t.csv"
    for content, words in [
        ("prompt,answer\na,1\nb\n", "line 3 has fewer fields than the 2 of the header"),
        ("prompt,answer\na,1,2\n", "line 2 has more fields"),
        ('prompt,answer\n"a,1\n', "after line 1: unexpected end"),
        ("prompt,answer\n", "is empty"),
        ("prompt,prompt\na,b\n", "two columns have the same name"),
    ]:
        path.write_text(content)
        with pytest.raises(ConfigError, match=words):
            TaskSet.from_csv(path)
    path.with_suffix(".tsv").write_text('prompt\tanswer\n"a\nb"\t1\n')
    assert TaskSet.from_csv(path.with_suffix(".tsv"))["train-1"].prompt == "a\nb"


def test_a_damaged_parquet_file_is_told(tmp_path):
    from_parquet(tmp_path, rows_of(50), **NAMES)
    path = tmp_path / "t.parquet"
    whole = path.read_bytes()
    for content in (b"", whole[:-20], whole[: len(whole) // 2], b"PAR1" + bytes(40) + b"PAR1"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"t\.parquet"):
            TaskSet.from_parquet(path, **NAMES)


def test_an_empty_table_is_told(tmp_path):
    datasets = pytest.importorskip("datasets")
    with pytest.raises(ConfigError, match="has no rows"):
        TaskSet.from_dataset(datasets.Dataset.from_dict({"prompt": []}))
    with pytest.raises(ConfigError, match="has no tasks"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "e.parquet")
        TaskSet.from_parquet(tmp_path / "e.parquet")


# -- Parquet and datasets ---------------------------------------------------------------------


def test_parquet_with_nested_columns_and_the_index_of_pandas(tmp_path):
    import pandas as pd

    frame = pd.DataFrame({
        "prompt": [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]],
        "tests": [[{"in": [1, 2], "out": {"x": 1}}], []],
    }, index=[5, 9])  # fmt: skip
    frame.to_parquet(tmp_path / "t.parquet")
    tasks = TaskSet.from_parquet(tmp_path / "t.parquet")
    assert tasks["train-1"] == Task(
        "train-1", "a", data={"tests": [{"in": [1, 2], "out": {"x": 1}}]}
    )
    records = TaskSet.from_generator(pd.read_parquet(tmp_path / "t.parquet").to_dict("records"))
    assert records["train-2"].prompt == "b"
    for nothing in (pd.NA, pd.NaT, float("nan")):
        with pytest.raises(ConfigError, match="row 1: the prompt is missing"):
            TaskSet.from_generator([{"prompt": nothing}])
        with pytest.raises(ConfigError, match="row 1: the answer is"):
            TaskSet.from_generator([{"prompt": "a", "answer": nothing}])
        assert (
            TaskSet.from_generator([{"prompt": "a", "i": nothing}], images="i")["train-1"].data
            == {}
        )


def test_datasets_with_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    part = datasets.Dataset.from_list(rows_of(3))
    splits = {"train": part, "test": part.select([0]), "validation": part.select([1, 2])}
    data = datasets.DatasetDict(splits)
    tasks = TaskSet.from_dataset(data, **NAMES)
    assert (len(tasks.ids()), tasks.ids("eval")) == (3, ("eval-1", "eval-2"))
    assert tasks["eval-1"].prompt == "1+1?"
    assert len(TaskSet.from_dataset(data, eval="test", **NAMES).ids("eval")) == 1
    assert TaskSet.from_dataset(data, eval=None, **NAMES).ids("eval") == ()
    assert len(TaskSet.from_dataset(data, eval_share=0.5, **NAMES)) == 3
    with pytest.raises(ConfigError, match="no split 'dev' → it has 'train', 'test', 'validation'"):
        TaskSet.from_dataset(data, eval="dev", **NAMES)
    with pytest.raises(ConfigError, match="cannot be both trained on and held out"):
        TaskSet.from_dataset(data, eval="train", **NAMES)
    with pytest.raises(ConfigError, match="has no splits"):
        TaskSet.from_dataset(part, eval="test", **NAMES)
    data.save_to_disk(tmp_path / "saved")
    assert TaskSet.from_dataset(tmp_path / "saved", **NAMES).fingerprint() == tasks.fingerprint()
    with pytest.raises(ConfigError, match=r"row 2: there is no column 'x'|no column 'x'"):
        TaskSet.from_dataset(data, prompt="x")


def test_a_stream_needs_a_limit():
    datasets = pytest.importorskip("datasets")

    def endless():
        number = 0
        while True:
            yield {"prompt": f"{number}?"}
            number += 1

    stream = datasets.IterableDataset.from_generator(endless)
    with pytest.raises(ConfigError, match="is a stream, which may not end → limit"):
        TaskSet.from_dataset(stream)
    assert len(TaskSet.from_dataset(stream, limit=7)) == 7
    with pytest.raises(ConfigError, match="limit=0"):
        TaskSet.from_dataset(stream, limit=0)
    assert len(TaskSet.from_dataset(datasets.Dataset.from_list(rows_of(9)), limit=4, **NAMES)) == 4


def test_image_features_stay_encoded_and_transforms_are_honoured():
    datasets = pytest.importorskip("datasets")
    pil = pytest.importorskip("PIL.Image")
    pictures = [pil.new("RGB", (3, 2), (n, 0, 0)) for n in range(3)]
    features = datasets.Features({
        "prompt": datasets.Value("string"),
        "image": datasets.Image(),
        "more": datasets.List(datasets.Image()),
        "label": datasets.ClassLabel(names=["cat", "dog"]),
    })  # fmt: skip
    columns = {
        "prompt": ["a", "b", "c"],
        "image": pictures,
        "more": [[p, p] for p in pictures],
        "label": [0, 1, 0],
    }
    data = datasets.Dataset.from_dict(columns, features=features)
    tasks = TaskSet.from_dataset(data, images=["image", "more"], answer="label")
    task = tasks["train-2"]
    assert task.answer == 1
    assert [type(part) for part in task.prompt] == [Image, Image, Image, Text]
    stored = data.cast_column("image", datasets.Image(decode=False))[1]["image"]["bytes"]
    assert task.prompt[0].data == stored
    stream = TaskSet.from_dataset(
        data.to_iterable_dataset(), limit=3, images=["image", "more"], answer="label"
    )
    assert stream.fingerprint() == tasks.fingerprint()
    louder = data.with_transform(lambda rows: {"prompt": [t.upper() for t in rows["prompt"]]})
    assert TaskSet.from_dataset(louder)["train-2"].prompt == "B"


def test_a_data_set_that_cannot_be_loaded_is_told(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def offline(source, name):
        raise ConnectionError("the hub is away\nwith details")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ConfigError, match=r"'openai/gsm8k' cannot be loaded: the hub is away$"):
        TaskSet.from_dataset("openai/gsm8k", name="main")
    with pytest.raises(ConfigError, match="int is not a data set"):
        TaskSet.from_dataset(3)


# -- Python -----------------------------------------------------------------------------------


def test_python_code_gives_tasks_or_rows_or_both():
    def make():
        yield Task("a", "1+1?", 2)
        yield {"prompt": "2+2?", "answer": 4}

    tasks = TaskSet.from_generator(make)
    assert list(tasks) == [Task("a", "1+1?", 2), Task("train-2", "2+2?", 4)]
    assert TaskSet.from_generator(make).fingerprint() == tasks.fingerprint()
    assert len(TaskSet.from_generator(make(), [Task("e", "?")]).ids("eval")) == 1


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (iter(()), "gives no tasks → a generator can be read once"),
        ("abc", "cannot be made of str"),
        ({"prompt": "a"}, "cannot be made of dict"),
        (7, "cannot be made of int"),
        ([("q", "a")], "row 1 is of type tuple"),
        ([{"prompt": "a"}, "b"], "row 2 is of type str"),
        ([{"prompt": "a"}, {"q": "b"}], "row 2: there is no column 'prompt'"),
    ],
)
def test_python_code_that_gives_something_else_is_told(source, words):
    with pytest.raises(ConfigError, match=words):
        TaskSet.from_generator(source)


def test_async_code_is_told_apart():
    async def coroutine():
        return []

    async def generator():
        yield {"prompt": "a"}

    for source in (coroutine, generator):
        with pytest.raises(ConfigError, match="cannot be made of"):
            TaskSet.from_generator(source)


def test_an_endless_generator_ends_at_its_limit(monkeypatch):
    from relax_agent.envs import task_sources

    def endless():
        number = 0
        while True:
            yield Task(str(number), "?")
            number += 1

    assert len(TaskSet.from_generator(endless, limit=5)) == 5
    monkeypatch.setattr(task_sources, "MAX_TASKS", 50)
    with pytest.raises(ConfigError, match="more than 50 tasks → limit"):
        TaskSet.from_generator(endless)
    assert len(TaskSet.from_generator([Task(str(n), "?") for n in range(50)])) == 50


def test_an_error_of_the_authors_own_code_is_left_as_it_is():
    def broken():
        yield Task("a", "?")
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        TaskSet.from_generator(broken)


# -- anything at all --------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
KEYS = st.sampled_from(["prompt", "answer", "id", "data", "image", "role", "content", "type"])
PROMPTS = st.recursive(
    JSON | st.just("<image>"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["role", "content", "type", "text", "image", "from", "value", "url"]), inner
    ),
    max_leaves=8,
)  # fmt: skip


@given(st.lists(st.dictionaries(KEYS, PROMPTS, max_size=5), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_is_in_the_rows_becomes_tasks_or_one_clear_line(rows):
    try:
        tasks = TaskSet.from_generator(rows, images="image" if "image" in rows[0] else [])
        found = list(tasks)
        tasks.fingerprint()
    except RelaxError as error:
        assert re.search(r"row \d|two tasks|task '", str(error)), error
    else:
        assert all(isinstance(message, Message) for task in found for message in task.to_messages())


@given(st.lists(JSON, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_fingerprint_survives_json_and_the_order_of_keys(values):
    def turned(value):
        if isinstance(value, dict):
            return {key: turned(value[key]) for key in reversed(value)}
        return [turned(each) for each in value] if isinstance(value, list) else value

    def prints(change):
        return TaskSet(Task(str(n), "?", change(v), {"v": v}) for n, v in enumerate(values))

    same = prints(lambda value: value).fingerprint()
    assert prints(turned).fingerprint() == same
    assert prints(lambda value: json.loads(json.dumps(value))).fingerprint() == same
    assert prints(lambda value: [value]).fingerprint() != same


def test_the_code_on_the_page_about_tasks_runs(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(compile(code, "tasks.md", "exec"), names)
    assert "['Text', 'Image', 'Text', 'Image', 'Text']" in capsys.readouterr().out
