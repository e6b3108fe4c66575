"""Tiny models, reference forwards and request bodies that the embedded engine's tests share."""

from __future__ import annotations

from pathlib import Path

import torch

from relax_agent.engines.embedded.batch import Batch
from relax_agent.engines.embedded.requests import Job, Limits, parse_generate
from relax_agent.engines.embedded.runner import ModelRunner, load_model, stop_tokens
from relax_agent.engines.embedded.scheduler import Scheduler
from relax_agent.engines.embedded.weights import checkpoint_shapes

VOCAB, LAYERS, TOP_K, EXPERTS, EOS = 512, 3, 2, 8, 2
CONTEXT = 1024


def moe_config(**changes):
    from transformers import Qwen3MoeConfig

    settings = {
        "moe_intermediate_size": 32,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    }
    return Qwen3MoeConfig(**_shared() | settings | changes)


def dense_config(**changes):
    from transformers import Qwen3Config

    return Qwen3Config(**_shared() | changes)


def _shared():
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "bos_token_id": None,
    }


def save_model(folder: Path, config, seed=0) -> Path:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


class Reference:
    """The same model as transformers runs it: one full forward per question."""

    def __init__(self, folder: Path):
        self.model = load_model(folder, "float32")
        self.model.set_attn_implementation("eager")
        if hasattr(self.model, "set_experts_implementation"):
            self.model.set_experts_implementation("eager")

    @torch.no_grad()
    def logits(self, ids):
        return self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()

    def logprobs(self, ids, start, temperature=1.0, bias=None):
        """Log-probs of ``ids[start:]``, each given all before it."""
        logits = self.logits(ids)[start - 1 : -1].clone()
        for token, value in (bias or {}).items():
            logits[:, token] += value
        logits = (logits / (temperature or 1.0)).log_softmax(-1)
        return logits.gather(1, torch.tensor(ids[start:])[:, None])[:, 0].tolist()

    def greedy(self, ids, count, stops=(EOS,)):
        ids, start = list(ids), len(ids)
        while len(ids) - start < count and (len(ids) == start or ids[-1] not in stops):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[start:]

    @torch.no_grad()
    def routes(self, ids):
        """Expert ids ``[tokens, layers, top_k]``, dense layers zero."""
        found, hooks = {}, []
        for name, module in self.model.named_modules():
            if name.endswith(".mlp.gate"):
                layer = int(name.split(".")[2])
                hooks.append(
                    module.register_forward_hook(
                        lambda _m, _i, out, layer=layer: found.__setitem__(layer, out[2])
                    )
                )
        self.logits(ids)
        for hook in hooks:
            hook.remove()
        full = torch.zeros(len(ids), LAYERS, TOP_K, dtype=torch.int32)
        for layer, chosen in found.items():
            full[:, layer] = chosen.int()
        return full.numpy()


def make_scheduler(folder: Path, *, max_total=16384, cache_tokens=4096, **options) -> Scheduler:
    """A scheduler that has not been started."""
    model = load_model(folder, "float32")
    options = {"max_running": 32, "max_prefill": 4096} | options
    death = {"on_death": options.pop("on_death")} if "on_death" in options else {}
    runner = ModelRunner(model, max_total)
    batch = Batch(runner, cache_tokens=cache_tokens, **options)
    scheduler = Scheduler(batch, checkpoint_shapes(folder), **death)
    scheduler.limits = Limits(CONTEXT, max_total, runner.vocabulary, stop_tokens(model))
    return scheduler


def job(scheduler, input_ids, *, seed=0, **body) -> Job:
    """Parse a request; keys that ``/generate`` does not have at its top are sampling parameters."""
    top = ("rid", "return_routed_experts", "routed_experts_start_len", "logprob_start_len")
    params = {key: value for key, value in body.items() if key not in top}
    params = {"max_new_tokens": 8, "sampling_seed": seed} | params
    full = {key: body[key] for key in top if key in body}
    full |= {"input_ids": list(input_ids), "sampling_params": params, "return_logprob": True}
    return parse_generate(full, scheduler.limits, 0)


def prompt(length, seed=0):
    generator = torch.Generator().manual_seed(seed * 7919 + length)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()
