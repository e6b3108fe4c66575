"""Toy chat templates, and a tokenizer whose ids are not what it would encode their text to."""

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from relax_agent.rendering import ChatTemplate, PackageRenderer, RendererSettings, TemplateRenderer
from relax_agent.rendering.tokens import TokenIds

TEMPLATES = Path(__file__).parent / "templates"
SEVEN = sorted(
    path.stem for path in TEMPLATES.glob("*.jinja") if not path.stem.startswith(("viii_", "ix_"))
)
SPECIAL = """
<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|>
<|video_pad|> <|begin_of_text|> <|eot_id|> <|eom_id|> <|start_header_id|>
<|end_header_id|> <|python_tag|> <|end_of_text|> <|finetune_right_pad_id|> [gMASK] <sop>
<|system|> <|user|> <|assistant|> <|observation|> [TOOL_CALLS] <|im_user|>
<|im_assistant|> <|im_system|> <|im_middle|> <|tool_calls_section_begin|>
<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|>
<|tool_call_end|> [EOS] [BOS] <｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜>
<｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜>
<｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜>
<｜tool▁output▁begin｜> <｜tool▁output▁end｜> ]~!b[ ]~b] [e~[
""".split()  # noqa: SIM905
MARKUP = """
<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key>
</arg_key> <arg_value> </arg_value> <tools> </tools> <minimax:tool_call>
</minimax:tool_call>
""".split()  # noqa: SIM905
MERGES = [("a", "b"), ("ab", "c"), ("t", "h"), ("th", "e"), ("o", "k")]


@cache
def core(bos: str | None = None) -> Tokenizer:
    """Bytes, a few merges, and one token for each mark; ``bos`` is added by the tokenizer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(letters)} | {
        a + b: len(letters) + i for i, (a, b) in enumerate(MERGES)
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def tokens(bos: str | None = None) -> TokenIds:
    return TokenIds(core(bos))


def toy(name: str, *, bos: str | None = None, eos: str | None = None, **settings):
    """A renderer of one of the toy templates."""
    path = next(TEMPLATES.glob(f"{name}*.jinja"))
    template = ChatTemplate(path.name, path.read_text(), {"bos_token": bos or "<|begin_of_text|>"})
    ids = tokens(bos)
    stops = [ids.convert_tokens_to_ids(each) for each in (eos or "<|endoftext|>").split()]
    return TemplateRenderer(ids, template, RendererSettings(**settings), stop_ids=stops)


def family(name: str) -> PackageRenderer:
    """A renderer of the package over the same tokenizer."""
    return PackageRenderer(tokens(), RendererSettings(name=name))
