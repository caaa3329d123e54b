"""Whether a Transformers model can run on sequence shards: asked of the model itself, not of a list of names.

The model runs once on five tokens with an attention that mixes nothing, one token being NaN. A NaN in another
token's row shows a layer that carries state along the sequence outside of attention (convolution, recurrence,
token shift): on shards its state would start anew on every rank, without a word. No process group is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LENGTH, _AT = 5, 2
_ROPES_OF_LENGTH = ("dynamic", "longrope")
_KINDS = ("full_attention", "sliding_attention")


def refuse_by_config(model: Any) -> None:
    """What the configuration alone tells. Raises one ValueError that names everything."""
    config = model.config.get_text_config()
    problems = []
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - set(_KINDS))
    if kinds:
        problems.append(f"layer_types with {', '.join(kinds)}: their state or mask ends at a shard's end")
    ropes = sorted(set(_rope_types(getattr(config, "rope_parameters", None))) & set(_ROPES_OF_LENGTH))
    if ropes:
        problems.append(f"rope_type={ropes[0]}: its frequencies depend on the length that a rank sees")
    if getattr(model.config, "is_encoder_decoder", False):
        problems.append("an encoder and a decoder")
    if getattr(config, "output_router_logits", False):
        problems.append("output_router_logits: the auxiliary loss would see one shard")
    if problems:
        raise ValueError(
            f"model={type(model).__name__} must be a causal model that mixes tokens in attention alone, got "
            f"{'; '.join(problems)}. Llama-family models with any rope_type: BridgedCausalLM."
        )


def _rope_types(parameters: Any) -> Iterator[str]:
    if isinstance(parameters, dict):
        if isinstance(parameters.get("rope_type"), str):
            yield parameters["rope_type"]
        for value in parameters.values():
            yield from _rope_types(value)


@torch.no_grad()
def refuse_by_running(model: Any, run: Callable[[Tensor, Tensor], int]) -> bool:
    """Run the model on five tokens; returns whether its head is one plain matrix.

    `run(tokens, positions)` calls the model with the attention that mixes nothing and returns how many layers
    used it. Raises ValueError that names the first module that mixes tokens.
    """
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("model must hold real parameters, got some on the meta device. Load them first.")
    device = model.get_input_embeddings().weight.device
    tokens = torch.zeros(1, _LENGTH, dtype=torch.int64, device=device)
    positions = torch.arange(_LENGTH, device=device).unsqueeze(0)
    with ExitStack() as stack:
        stack.enter_context(_poisoned(model.get_input_embeddings()))
        for name, module in model.named_modules():
            stack.enter_context(_watched(module, f"{name} ({type(module).__name__})", type(model).__name__))
        plain = stack.enter_context(_head(model))
        num_layers = run(tokens, positions)
    if not num_layers:
        raise ValueError(
            f"model={type(model).__name__} must call the attention that attn_implementation names, got none "
            f"that did. Use a model whose attention layers do."
        )
    return all(plain) and bool(plain)


@contextmanager
def _poisoned(embedding: nn.Module) -> Iterator[None]:
    def hook(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        out = out.clone()
        out[:, _AT] = math.nan
        return out

    handle = embedding.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _watched(module: nn.Module, name: str, model: str) -> Iterator[None]:
    """Raise when other tokens than the poisoned one come out of the module as NaN, and went in clean."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        first = out[0] if isinstance(out, tuple) and out else out
        if _spread(first) and not any(_spread(x) for x in (*args, *kwargs.values())):
            raise ValueError(
                f"model={model} must mix tokens in attention alone, got {name}, which carries state along "
                f"the sequence. On shards it would start anew on every rank."
            )

    handle = module.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _spread(x: Any) -> bool:
    """Whether x is [1, S, ...] with NaN in rows that were not poisoned."""
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[1] != _LENGTH or not x.is_floating_point():
        return False
    rows: list[bool] = x.isnan().any(2)[0].tolist()
    return any(rows[:_AT] + rows[_AT + 1 :])


@contextmanager
def _head(model: Any) -> Iterator[list[bool]]:
    """Whether logits are head.weight times what goes into the head: tried with large values, on which a
    bias, a scale or a cap would show. A head that wraps another (an adapter) counts as not plain."""
    head, plain = model.get_output_embeddings(), []
    weight = getattr(head, "weight", None)
    if weight is None or any(head.children()) or getattr(head, "bias", None) is not None:
        yield [False]
        return
    wanted: list[Tensor] = []

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        matrix = head.weight  # whole here, whatever engine keeps it in parts
        x = torch.ones_like(args[0]) + torch.arange(args[0].shape[-1], device=matrix.device).to(args[0]) % 3
        size = F.linear(x, matrix).abs().amax().clamp(min=1e-6)
        x = x * (200.0 / size)
        wanted.append(F.linear(x, matrix))
        return (x, *args[1:])

    def after(_: nn.Module, __: Any, out: Any) -> None:
        logits = out.logits if hasattr(out, "logits") else out[0]
        want = wanted[-1].to(logits.dtype)
        plain.append(logits.shape == want.shape and torch.allclose(logits, want, rtol=1e-2, atol=1e-2))

    handles = [head.register_forward_pre_hook(before), model.register_forward_hook(after)]
    try:
        yield plain
    finally:
        for handle in handles:
            handle.remove()
