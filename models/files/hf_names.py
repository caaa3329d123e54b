"""The one map between our dotted parameter names and Hugging Face's tensor names."""

from __future__ import annotations

import re
from collections.abc import Collection

from usp.models.config import LlamaConfig
from usp.models.params import abstract, named_leaves

_TOP = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "lm_head": "lm_head.weight"}
EMBED, HEAD = _TOP["embed"], _TOP["lm_head"]
_BLOCK = {
    "norm_attn": "input_layernorm.weight",
    "wq": "self_attn.q_proj.weight",
    "wk": "self_attn.k_proj.weight",
    "wv": "self_attn.v_proj.weight",
    "wo": "self_attn.o_proj.weight",
    "norm_mlp": "post_attention_layernorm.weight",
    "w_gate": "mlp.gate_proj.weight",
    "w_up": "mlp.up_proj.weight",
    "w_down": "mlp.down_proj.weight",
    "bq": "self_attn.q_proj.bias",
    "bk": "self_attn.k_proj.bias",
    "bv": "self_attn.v_proj.bias",
    "bo": "self_attn.o_proj.bias",
    "b_gate": "mlp.gate_proj.bias",
    "b_up": "mlp.up_proj.bias",
    "b_down": "mlp.down_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # older files store it; it follows from the config


def hf_name(dotted: str) -> str:
    """ "layers.3.wq" -> "model.layers.3.self_attn.q_proj.weight"."""
    if dotted in _TOP:
        return _TOP[dotted]
    _, index, leaf = dotted.split(".")
    return f"model.layers.{index}.{_BLOCK[leaf]}"


def is_derived(name: str) -> bool:
    """Whether a stored tensor carries nothing that the config does not already say."""
    return _DERIVED.search(name) is not None


def hf_map(cfg: LlamaConfig, stored: Collection[str] = ()) -> dict[str, list[str]]:
    """Dotted name -> tensor names that hold it, the first one to be read.

    With tied embeddings `stored` (the names of a checkpoint) decides: it may hold the shared matrix under the
    embedding's name (usual), the head's name, or both.
    """
    names = {dotted: [hf_name(dotted)] for dotted, _ in named_leaves(abstract(cfg))}
    if cfg.tie_embeddings and HEAD in stored:
        names["embed"] = [EMBED, HEAD] if EMBED in stored else [HEAD]
    return names
