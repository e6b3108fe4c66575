"""An independent reference for the Megatron tests: plain transformers, one row at a time."""

from __future__ import annotations

import numpy as np
import torch
from trainer_support import TOP_K

from relax_agent.trainers.algorithms.grpo import policy_loss


def force(model, row):
    """Make transformers' routers choose the row's experts, and their own where it has none."""
    for index, layer in enumerate(model.model.layers):
        if not hasattr(layer.mlp, "gate"):
            continue
        wanted = torch.from_numpy(row.routes[:, index].astype(np.int64))
        known = torch.from_numpy(row.has_route)

        def gate(x, router=layer.mlp.gate, wanted=wanted, known=known):
            logits = torch.nn.functional.linear(x, router.weight)
            scores = logits.softmax(-1)
            live = scores.topk(TOP_K, -1).indices
            chosen = torch.where(known[: len(x), None], wanted[: len(x)], live)
            picked = scores.gather(-1, chosen)
            if router.norm_topk_prob:
                picked = picked / picked.sum(-1, keepdim=True)
            return logits, picked, chosen

        layer.mlp.gate.forward = gate


def reference_gradients(folder, groups, algorithm, *, routed, temperature=1.0):
    """Gradients by on-disk name: no packing, dense logits, none of the trainer's hooks."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    loss, tokens = 0.0, 0
    for members in groups:
        rewards = np.array([e.reward for e in members.episodes])
        advantages = (rewards - rewards.mean()) / rewards.std()
        for episode, advantage in zip(members.episodes, advantages, strict=True):
            (row,) = episode.rows()
            if routed:
                force(model, row)
            ids = torch.from_numpy(row.token_ids.astype(np.int64))
            logits = model(ids[None]).logits[0] / temperature
            logprobs = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
            mask = torch.from_numpy(row.loss_mask[1:] != 0)
            old = torch.from_numpy(row.logprobs[1:])[mask]
            signal = torch.full_like(old, float(advantage))
            loss = loss + policy_loss(logprobs[mask], old, signal, algorithm).loss.sum()
            tokens += int(mask.sum())
    (loss / tokens).backward()
    return per_expert({name: p.grad for name, p in model.named_parameters()})


def per_expert(tensors):
    """Name fused expert tensors as ``save_pretrained`` does: one per expert and matrix."""
    out = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj" and stem.endswith("experts"):
            for index, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                out[f"{stem}.{index}.gate_proj.weight"] = gate
                out[f"{stem}.{index}.up_proj.weight"] = up
        elif last == "down_proj" and stem.endswith("experts"):
            for index, matrix in enumerate(tensor):
                out[f"{stem}.{index}.down_proj.weight"] = matrix
        else:
            out[name] = tensor
    return out


def worst(got, expected):
    """The largest difference, each tensor's relative to its own largest entry (at least 1e-3)."""
    assert got.keys() == expected.keys()
    ratios = {
        name: float((got[name] - want).abs().max() / want.abs().max().clamp(min=1e-3))
        for name, want in expected.items()
    }
    return max(ratios.values())
