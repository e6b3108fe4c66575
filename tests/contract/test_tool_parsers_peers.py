"""Where others read a format too, they and we read the golden files alike."""

import json
import os
import re
import subprocess
from pathlib import Path

import parser_support
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_support import FILES, TOOLS, differs, good_calls

from relax_agent.engines.launch import SHIMS, sglang_python
from relax_agent.engines.settings import EngineSettings
from relax_agent.rendering import TOOL_PARSERS, PackageRenderer, RendererSettings, tool_parser
from relax_agent.rendering.tokens import TokenIds

MARKS = (
    "<|endoftext|> <|im_start|> <|im_end|> <tool_call> </tool_call> <tool_response> "
    "</tool_response> <think> </think> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|> "
    "<|begin_of_text|> <|eot_id|> <|eom_id|> <|start_header_id|> <|end_header_id|> <|python_tag|> "
    "<|end_of_text|> <|finetune_right_pad_id|>"
)


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes, and one token for each mark of the families."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    byte_level.decoder = decoders.ByteLevel()
    tokens = [AddedToken(mark, special=True, normalized=False) for mark in MARKS.split()]
    byte_level.add_special_tokens(tokens)
    return TokenIds(byte_level)


RENDERERS = [(n, r) for n, file in FILES.items() for r in file["same_as"].get("renderers", [])]
THINKING = {"enable_thinking": False}
NO_SUCH_OPTION = ("llama-3", "prime-qwen3", "qwen3-vl")


def package_renderer(tokenizer, name):
    options = {} if name in NO_SUCH_OPTION else THINKING
    return PackageRenderer(tokenizer, RendererSettings(name=name, options=options))


def told(message):
    """What two readers of one output must agree on."""
    reasoning = (message.reasoning or "").strip() or None
    broken = [call.error is not None for call in message.tool_calls]
    return good_calls(message), broken, message.text, reasoning


@pytest.mark.parametrize(("name", "peer"), RENDERERS)
def test_whole_outputs_are_read_as_the_renderers_package_reads_ids(tokenizer, name, peer):
    """Calls, broken ones too, content and reasoning; the file names each exception."""
    renderer = package_renderer(tokenizer, peer)
    for case in FILES[name]["cases"]:
        ours = tool_parser(name).parse(case["text"], TOOLS)
        theirs = renderer.parse(tokenizer.encode(case["text"]), TOOLS)
        reason = differs(case, "renderers", peer)
        assert (told(ours) == told(theirs)) == (reason is None), (case["name"], reason, theirs)


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(
            [
                *("<tool_call>", "</tool_call>", "\n", " ", "<think>", "</think>", "text", "{"),
                '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
                '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "é"}}</tool_call>',
            ]
        ),
        max_size=12,
    )
)
def test_random_outputs_are_read_as_the_renderers_package_reads_ids(tokenizer, pieces):
    """All but the text after a call, which the package drops."""
    renderer = package_renderer(tokenizer, "qwen3")
    text = "".join(pieces)
    ours = tool_parser("hermes").parse(text, TOOLS)
    theirs = renderer.parse(tokenizer.encode(text), TOOLS)
    assert good_calls(ours) == good_calls(theirs)
    assert len(ours.tool_calls) == len(theirs.tool_calls)
    assert ours.text.startswith(theirs.text)
    assert told(ours)[3] == told(theirs)[3]


def test_the_docs_name_who_reads_what():
    page = (Path(__file__).parents[2] / "docs" / "parsing.md").read_text("utf-8")
    table = page.partition("## Formats")[2].partition("\n## ")[0]
    rows = {row.split("`")[1]: row for row in re.findall(r"^\| `.*", table, re.M)}
    assert list(rows) == list(TOOL_PARSERS)
    for name, file in FILES.items():
        for peers in file["same_as"].values():
            assert all(f"`{peer}`" in rows[name] for peer in peers)


@pytest.mark.sglang
def test_whole_outputs_are_read_as_sglang_reads_them():
    """The calls that can be run; the files name each exception."""
    separate = os.environ.get("RELAX_SGLANG_PYTHON")
    python = separate or sglang_python(EngineSettings(kind="sglang"))
    texts = {
        peer: [case["text"] for case in file["cases"]]
        for file in FILES.values()
        for peer in file["same_as"].get("sglang", [])
    }
    env = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(SHIMS), "OMP_NUM_THREADS": "1"}
    shown = subprocess.run(
        [python, Path(parser_support.__file__).with_name("sglang_parsers.py")],
        input=json.dumps({"tools": TOOLS, "parsers": texts}),
        env=os.environ | env | {"HF_HUB_OFFLINE": "1", "SGLANG_FORWARD_UNKNOWN_TOOLS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert shown.returncode == 0, shown.stderr[-2000:]
    theirs = json.loads(shown.stdout.splitlines()[-1])
    for name, file in FILES.items():
        for peer in file["same_as"].get("sglang", []):
            for case, calls in zip(file["cases"], theirs[peer], strict=True):
                ours = good_calls(tool_parser(name).parse(case["text"], TOOLS))
                reason = differs(case, "sglang", peer)
                assert (ours == calls) == (reason is None), (peer, case["name"], reason, calls)
