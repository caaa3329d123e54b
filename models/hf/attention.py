"""The attention function that stands in for a Transformers model's own, and what it lets through.

What a layer wants is read from the arguments its attention interface gets: head counts and sizes from the
tensors, window, sinks, soft cap and scale by name. Anything else that is set is refused by name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from usp import Shard, attention, heads_to_seq, seq_to_heads
from usp.deal import deal_heads
from usp.heads import trading_axis
from usp.mesh import MeshLike, Table, axis_sizes, coordinates
from usp.models.hf.handed import Handed

KEY = "usp_shard"
"""Name of the keyword argument that carries the shard to every layer."""

# Arguments that say how attention attends, each honoured below.
_READ = ("dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", KEY)
# Arguments that travel with the others and do not change what attention computes.
_PASSED = (
    "position_ids",
    "position_embeddings",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "num_items_in_batch",
    "input_ids",
)


class Wanted(NamedTuple):
    """How one layer attends."""

    window: int | None
    softcap: float | None
    scale: float | None
    causal: bool
    sinks: Tensor | None
    shard: Shard | None


def wanted(module: nn.Module, name: str, mask: Any, kwargs: dict[str, Any]) -> Wanted:
    """What the layer asks for. Raises ValueError, naming the layer, for what cannot be honoured."""
    config: Any = getattr(module, "config", None)
    problems = [
        f"{key} is set"
        for key, value in kwargs.items()
        if key not in (*_READ, *_PASSED) and value is not None and value is not False
    ]
    if mask is not None:
        problems.append("attention_mask is set: pass cu_seqlens in the batch instead")
    dropout = max(kwargs.get("dropout") or 0.0, getattr(module, "attention_dropout", 0.0) or 0.0)
    if dropout:
        problems.append(f"dropout={dropout}: set attention_dropout=0")
    if kwargs.get("output_attentions"):
        problems.append("output_attentions is set: attention weights never exist")
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    window = kwargs.get("sliding_window")
    kind = _kind(module, config)
    if kind == "sliding_attention" and window is None:
        problems.append("its window of sliding_attention is not among its arguments")
    if kind == "full_attention" and window is not None:
        problems.append(f"sliding_window={window} is set although config calls it full_attention")
    if window is not None and not causal:
        problems.append("a window that looks both ways, which models count in different ways")
    if problems:
        raise ValueError(f"layer={name!r} must attend in a way this honours, got {'; '.join(problems)}.")
    handed = kwargs.get(KEY)
    return Wanted(
        window=window,
        softcap=kwargs.get("softcap"),
        scale=kwargs.get("scaling"),
        causal=causal,
        sinks=kwargs.get("s_aux"),
        shard=handed.value if isinstance(handed, Handed) else None,
    )


def _kind(module: nn.Module, config: Any) -> str | None:
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    return kinds[index] if kinds and isinstance(index, int) and index < len(kinds) else None


def attend(
    q: Tensor, k: Tensor, v: Tensor, want: Wanted, table: Table, mesh: MeshLike, kernel: str
) -> Tensor:
    """q [B, N, S, H] and k, v [B, K, S, H] of this rank's tokens; result [B, S, N, H] of the same tokens.

    Communicates 1 all-to-all each way before and after where attention trades sequence for heads, and what a
    ring takes.
    """
    assert want.shard is not None
    seq_len, num_heads = want.shard.seq_len, q.shape[1]
    kind = q.device.type
    # where a trainer casts automatically, rotary embeddings leave q and k wider than v
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    q, k, v = (t.transpose(1, 2).to(dtype or t.dtype) for t in (q, k, v))
    num_kv_heads = k.shape[2]
    # [B, S@ulysses, N, H] -> [B, S, N@ulysses, H]: 1 all-to-all for q, k and v
    q, k, v = seq_to_heads(q, k, v, mesh=mesh, table=table, seq_len=seq_len)
    sinks = want.sinks
    axis = trading_axis(table, mesh)
    if sinks is not None and axis is not None:
        own = deal_heads(num_heads, num_kv_heads, axis_sizes(mesh)[axis])[coordinates(mesh)[axis]]
        sinks = sinks[own.q_start : own.q_stop]
    o = attention(
        q, k, v, table=table, mesh=mesh, cu_seqlens=want.shard.cu_seqlens, causal=want.causal,
        window=want.window, sinks=sinks, softcap=want.softcap, scale=want.scale, kernel=kernel,
    )  # fmt: skip
    # [B, S, N@ulysses, H] -> [B, S@ulysses, N, H]: 1 all-to-all
    return heads_to_seq(o, num_heads=num_heads, mesh=mesh, table=table, seq_len=seq_len)
