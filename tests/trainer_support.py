"""Groups of made-up episodes and tiny models that trainer tests share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from relax_agent.episode import Episode, EpisodeStatus, Group
from relax_agent.trainers.protocol import BatchLayout, RouteShape

VOCAB = 64
LAYERS, EXPERTS, TOP_K = 3, 4, 2
SHAPE = RouteShape(LAYERS, (1, 2), TOP_K, EXPERTS)


def layout(budget=256, routes=None, multiple=1):
    return BatchLayout(budget, VOCAB, routes, multiple)


def random_routes(rng, tokens):
    order = rng.random((tokens, LAYERS, EXPERTS)).argsort(-1)
    return order[..., :TOP_K].astype(np.uint8)


def episode(
    reward=1.0,
    turns=((5, 4), (3, 2)),
    seed=0,
    group_id="g",
    version=0,
    routes=False,
    status=EpisodeStatus.COMPLETED,
    logprob=None,
):
    """An episode of ``(prompt tokens, sampled tokens)`` turns with random ids and log-probs."""
    rng = np.random.default_rng(seed)
    out = Episode("env", "task", group_id, 0, id=f"{group_id}-{seed}")
    for prompt, sampled in turns:
        out.add_prompt(rng.integers(0, VOCAB, prompt).tolist())
        ids = rng.integers(0, VOCAB, sampled).tolist()
        logprobs = rng.normal(-4.1, 0.3, sampled) if logprob is None else [logprob] * sampled
        out.add_sampled(ids, [float(x) for x in logprobs], [version] * sampled, "stop")
    out.turns[-1].reward = reward
    if routes:
        out.add_routes(0, random_routes(rng, len(out) - 1))
    out.finish(status)
    return out


def group(rewards, id="g", **kwargs):
    turns = kwargs.pop("turns", None)
    shapes = turns or [((5, 4 + i % 3), (3 + i, 2)) for i in range(len(rewards))]
    offset = sum(map(ord, id)) * 1000
    episodes = [
        episode(r, turns=shapes[i], seed=offset + i, group_id=id, **kwargs)
        for i, r in enumerate(rewards)
    ]
    return Group(id, "env", "task", episodes)


def moe_model(folder: Path, **changes):
    """Write a tiny Qwen3-MoE (layers: dense, experts, experts) and return it."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    values = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        **changes,
    }
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**values))
    with torch.no_grad():  # norms of 1 would hide a norm that is skipped
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def dense_model(folder: Path):
    """Write a tiny dense Qwen3 with tied embeddings and return it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return model
