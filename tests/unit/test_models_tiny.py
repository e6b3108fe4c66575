"""Tiny models: made once, whole or not at all, equal for equal settings."""

import json
import subprocess
import sys

import pytest
from pydantic import ValidationError

from relax_agent.errors import ConfigError, StorageError
from relax_agent.messages import ToolCall, assistant, tool_message, user
from relax_agent.models import (
    ModelSettings,
    TinySettings,
    build_tokenizer,
    chat_texts,
    create_tiny_model,
    resolve_model,
)
from relax_agent.models.tokenizer import MARKUP_TOKENS, SPECIAL_TOKENS

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def conversation(number):
    call = ToolCall("add", {"a": number}, "call_0")
    return [
        user(f"What is {number} plus {number}?"),
        assistant(tool_calls=[call]),
        tool_message(str(2 * number), call),
        assistant(f"It is {2 * number}."),
    ]


@pytest.fixture(scope="module")
def texts():
    return chat_texts([conversation(number) for number in range(60)], [TOOL])


@pytest.fixture(scope="module")
def tokenizer(texts):
    return build_tokenizer(texts)


SMALL = TinySettings(hidden=16, layers=2, head_dim=8, expert_hidden=16, experts=4)


def test_every_special_token_is_one_token_and_survives_a_round_trip(tokenizer):
    for token in SPECIAL_TOKENS + MARKUP_TOKENS:
        assert len(tokenizer.encode(f"a{token}b", add_special_tokens=False)) == 3
    kept = tokenizer.decode(tokenizer.encode("<tool_call>x</tool_call>"), skip_special_tokens=True)
    assert kept == "<tool_call>x</tool_call>"


def test_every_digit_is_a_token_of_its_own(tokenizer):
    ids = tokenizer.encode("What is 1234567890 plus 42?", add_special_tokens=False)
    digits = [tokenizer.decode([i]) for i in ids if any(c.isdigit() for c in tokenizer.decode([i]))]
    assert digits == list("123456789042")


def test_text_that_was_never_seen_survives_a_round_trip(tokenizer):
    text = "héllo 😀 你好\n\n\tsystem\nuser assistant  12"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_tool_header_costs_few_tokens(tokenizer, texts):
    header = texts[0].split("<|im_end|>")[0]
    assert len(header) > 400
    assert len(tokenizer.encode(header, add_special_tokens=False)) < 20


def test_the_vocabulary_divides_among_eight_ranks(tokenizer, texts):
    assert len(tokenizer) % 8 == 0
    assert len(build_tokenizer(texts, vocab=333)) == 328


def test_equal_texts_give_an_equal_tokenizer_in_another_process(tokenizer, texts, tmp_path):
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    program = (
        "import json, sys; from relax_agent.models import build_tokenizer;"
        "t = build_tokenizer(json.load(open(sys.argv[1])));"
        "print(json.dumps(json.loads(t.backend_tokenizer.to_str())['model'], sort_keys=True))"
    )
    other = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "texts.json")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    mine = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    assert json.loads(other) == mine


def test_a_tokenizer_without_texts_is_refused():
    with pytest.raises(ConfigError, match="texts"):
        build_tokenizer([])


def test_a_tiny_model_is_made_once_and_found_again(texts, tmp_path):
    settings = ModelSettings(tiny=SMALL)
    folder = resolve_model(settings, tmp_path, texts)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(settings, tmp_path, texts) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_another_seed_or_other_texts_make_another_folder(texts, tmp_path):
    first = resolve_model(ModelSettings(tiny=SMALL), tmp_path, texts)
    second = resolve_model(
        ModelSettings(tiny=SMALL.model_copy(update={"seed": 1})), tmp_path, texts
    )
    third = resolve_model(ModelSettings(tiny=SMALL), tmp_path, texts[:30])
    assert len({first, second, third}) == 3


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_equal_settings_give_equal_weights_and_leave_the_random_state_alone(kind, texts, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    settings = SMALL.model_copy(update={"kind": kind})
    before = torch.random.get_rng_state()
    for name in ("a", "b"):
        create_tiny_model(tmp_path / name, settings, texts)
    assert torch.equal(torch.random.get_rng_state(), before)
    a, b = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("a", "b"))
    assert all(
        torch.equal(p, q)
        for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )
    assert a.dtype == torch.float32
    assert a.config.model_type == kind
    assert not a.config.tie_word_embeddings


def test_a_half_written_model_is_never_found(texts, tmp_path, monkeypatch):
    from transformers import PreTrainedTokenizerFast

    def fail(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", fail)
    with pytest.raises(StorageError, match="No space left"):
        resolve_model(ModelSettings(tiny=SMALL), tmp_path, texts)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_a_config_error_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match="does not exist") as error:
        resolve_model(ModelSettings(path=tmp_path / "nowhere"), tmp_path)
    assert "nowhere" in str(error.value)
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve_model(ModelSettings(path=tmp_path), tmp_path)


def test_a_tiny_model_without_texts_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="texts"):
        resolve_model(ModelSettings(tiny=SMALL), tmp_path)


@pytest.mark.parametrize(
    "settings",
    [{}, {"path": "x", "tiny": {}}, {"tiny": {"heads": 3, "kv_heads": 2}}, {"tiny": {"top_k": 9}}],
)
def test_settings_that_fit_no_model_are_refused(settings):
    with pytest.raises(ValidationError):
        ModelSettings.model_validate(settings)
