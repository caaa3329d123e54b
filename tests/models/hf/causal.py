"""Small random Transformers models of several families, and what they compute on one process."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from usp import Batch

_BASE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 5},
    "gemma2": {
        **_WINDOWS,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 5,
    },
    "gemma3_text": {**_WINDOWS, "query_pre_attn_scalar": 5},
    "gemma4_text": {  # each layer has heads and sizes of its own
        **_WINDOWS,
        "per_layer_config": {"1": {"head_dim": 12, "num_key_value_heads": 1}},
        "vocab_size_per_layer_input": 101,
        "hidden_size_per_layer_input": 4,
    },
    "gpt_oss": {**_WINDOWS, "num_local_experts": 3, "num_experts_per_tok": 2, "num_key_value_heads": 3},
}


def causal_model(family: str, **changes: Any) -> Any:
    """Float64, every weight random and large enough to matter, norms in the model's own precision.

    "llama, both ways": its layers look at the tokens behind them too.
    """
    family, _, both_ways = family.partition(", ")
    fields = {**_BASE, **FAMILIES.get(family, {}), **changes}
    config = AutoConfig.for_model(family, **fields)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    model = model.double()
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.normal_(1.0 if "norm" in key else 0.0, 0.3)
    if both_ways:
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
    return exact_norms(model)


def exact_norms(model: Any) -> Any:
    """Transformers normalises in float32 whatever the dtype; float64 runs must not, to be compared."""
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            eps = getattr(module, "variance_epsilon", None) or module.eps
            one = 1.0 if name.startswith("Gemma") and not name.startswith("Gemma4") else 0.0

            def forward(x: Tensor, norm: Any = module, eps: float = eps, one: float = one) -> Tensor:
                weight = norm.weight + one if getattr(norm, "with_scale", True) else None
                return F.rms_norm(x, (x.shape[-1],), weight, eps)

            module.forward = forward
    return model


def dense(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, edges: list[list[int]], **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention with whole scores, in the dtype given, masks from each row's document boundaries."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * kwargs["scaling"]
    if kwargs.get("softcap"):
        scores = kwargs["softcap"] * torch.tanh(scores / kwargs["softcap"])
    at = torch.arange(q.shape[2])
    seen = torch.stack([torch.bucketize(at, torch.tensor(row[1:]), right=True) for row in edges])
    allowed = seen[:, :, None] == seen[:, None, :]
    if module.is_causal:
        allowed = allowed & (at[:, None] >= at[None, :])
    if kwargs.get("sliding_window"):
        allowed = allowed & (at[:, None] - at[None, :] < kwargs["sliding_window"])
    scores = scores.masked_fill(~allowed[:, None], float("-inf"))
    sinks = kwargs.get("s_aux")
    if sinks is not None:
        extra = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return (torch.cat([scores, extra], -1).softmax(-1)[..., :-1] @ v).transpose(1, 2), None
    return (scores.softmax(-1) @ v).transpose(1, 2), None


def unsharded(model: Any, batch: Batch) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Loss, gradients and logits of the whole batch on one process."""
    assert batch.labels is not None
    assert batch.cu_seqlens is not None
    edges = [[int(e) for e in row] for row in batch.cu_seqlens]
    positions, targets = torch.zeros_like(batch.tokens), torch.full_like(batch.tokens, -100)
    for row, cuts in enumerate(edges):
        for a, b in pairwise(cuts):
            positions[row, a:b] = torch.arange(b - a)
            targets[row, a : b - 1] = batch.labels[row, a + 1 : b]
    before, ALL_ATTENTION_FUNCTIONS["dense64"] = model.config._attn_implementation, dense
    try:
        model.set_attn_implementation("dense64")
        logits = model(input_ids=batch.tokens, position_ids=positions, use_cache=False, edges=edges).logits
    finally:
        model.set_attn_implementation(before)
        del ALL_ATTENTION_FUNCTIONS["dense64"]
    loss = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), ignore_index=-100)
    names, leaves = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    zeros = [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, grads, strict=True)]
    return loss.detach(), dict(zip(names, zeros, strict=True)), logits.detach()
