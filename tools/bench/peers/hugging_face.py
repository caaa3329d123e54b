"""What the peers share: a Transformers model of our shape, an attention that names its kernel, the loss.

The kernel is ours wherever a peer lets one choose, so that the same one is compared. A model is built with an
attention of its own name, which raises for a mask, for a window that is not the layer's and for a kernel
that does not take the input: nothing else can run in its place without a word.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from usp import attention
from usp.mesh import TABLES
from usp.models import LlamaConfig, training_memory
from usp.models.plan.choose import usable
from usp.models.plan.settings import gib
from usp.tools.bench.job import Job, Row
from usp.tools.bench.place import Place
from usp.tools.bench.shape import figures, guess_seconds, shape
from usp.tools.bench.timing import SHORT, held, measure, release, repeats

ATTENTION = "usp_bench"
FIRST = ("recompute", "least", "free")  # what takes least memory comes first: after "out of memory" all ends
LOSS_TILE = 2**28  # float32 logits of one tile, 1 GiB
LIKELY = 1.1  # what a peer takes of what ours takes, to choose what is computed again


Attend = Callable[[Tensor, Tensor, Tensor, float, int | None], Tensor]
"""Called with q, k, v [B, N, S, H], scale and window; gives [B, S, N, H]."""


class Seen(NamedTuple):
    """Sizes that attention was called with, last."""

    tokens: list[int]
    heads: list[int]


def have_liger(place: Place) -> bool:
    return place.device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None


def use_liger(cfg: LlamaConfig) -> None:
    """Liger's rotation, norm and activation for every model of this type that is built from now on."""
    by_type: Any = importlib.import_module(
        "liger_kernel.transformers.monkey_patch"
    ).MODEL_TYPE_TO_APPLY_LIGER_FN
    by_type[cfg.model_type](
        rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
    )


def register(cfg: LlamaConfig, attend: Attend) -> Seen:
    """`attend` becomes Transformers' attention `ATTENTION`, for models of this shape."""
    from transformers import AttentionInterface, AttentionMaskInterface

    seen = Seen([], [])

    def attention_forward(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **ignored: Any,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None or dropout:
            raise ValueError("attention must come without mask and dropout, as one causal document.")
        if sliding_window != (own := cfg.window_of(module.layer_idx)):
            raise ValueError(
                f"sliding_window={sliding_window} must be that of the layer, got {own}. Correct the model."
            )
        seen.tokens[:], seen.heads[:] = [query.shape[2]], [query.shape[1]]
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        return attend(query, key, value, scale, sliding_window), None

    AttentionInterface.register(ATTENTION, attention_forward)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)
    return seen


def by_kernel(kernel: str, dtype: torch.dtype) -> Attend:
    """Causal attention over all tokens that are given, or those of the layer's window, by one of our kernels,
    in `dtype` also where autocast has left queries and keys wider."""

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        q_BSNH, k_BSKH, v_BSKH = (t.transpose(1, 2).to(dtype) for t in (query, key, value))
        return attention(q_BSNH, k_BSKH, v_BSKH, scale=scale, kernel=kernel, window=window)

    return attend


def build(cfg: LlamaConfig, place: Place, dtype: torch.dtype) -> Any:
    """The model on this process's device, with random weights and `ATTENTION`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config: Any = AutoConfig.for_model(**cfg.to_hf_dict())
    config.use_cache = False
    auto: Any = AutoModelForCausalLM
    with place.device:
        model = auto.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    return model.train()


def tokens(cfg: LlamaConfig, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, labels (shifted: the last is none) and positions of the whole row, the same on every rank."""
    generator = torch.Generator().manual_seed(seq_len)
    ids = torch.randint(cfg.vocab_size, (1, seq_len), generator=generator)
    labels = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)
    return ids.to(device), labels.to(device), torch.arange(seq_len, device=device).unsqueeze(0)


def mean_loss(model: Any, hidden: Tensor, labels: Tensor, *, liger: bool) -> Tensor:
    """Mean loss of these tokens: Liger's fused one, or tiles that are computed again in the backward."""
    if liger:
        fused: Any = importlib.import_module("liger_kernel.transformers.model.loss_utils")
        found: Tensor = fused.LigerForCausalLMLoss(
            hidden_states=hidden, lm_head_weight=model.lm_head.weight, labels=None, shift_labels=labels,
            hidden_size=hidden.shape[-1],
        )  # fmt: skip
        return found

    def tile(x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(model.lm_head(x).float(), y, reduction="sum")

    size = max(1, LOSS_TILE // model.config.vocab_size)
    parts = zip(torch.split(hidden.flatten(0, 1), size), torch.split(labels.flatten(), size), strict=True)
    losses: list[Tensor] = [checkpoint(tile, x, y, use_reentrant=False) for x, y in parts]
    return torch.stack(losses).sum() / labels.numel()


def checkpointing(model: Any, every: int) -> str:
    """Every `every`-th layer is computed again; 0: none. Returns it in words."""
    model.gradient_checkpointing_disable()
    if not every:
        return "nothing computed again"
    own = {"use_reentrant": False}
    if every == 1:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=own)
        return "every layer computed again"
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=own, every_n_layers=every)
    return f"1 of {every} layers computed again"


def how_often(variant: str, cfg: LlamaConfig, seq_len: int, place: Place) -> int:
    """As few layers as likely fit, for the variant "free". Raises MemoryError when only all of them do."""
    if variant != "free":
        return 1
    sizes = {"dp": 1, "ring": 1, "ulysses": place.world}
    none, full = (
        training_memory(
            cfg, TABLES["usp"], sizes, batch=1, seq_len=seq_len, dtype=place.dtype, compile=True, remat=remat
        ).peak.nbytes
        for remat in ("none", "full")
    )
    room = usable(place.memory())
    for every, needed in ((0, none), (2, (none + full) // 2)):
        if needed * LIKELY <= room:
            return every
    raise MemoryError(f"half of the layers would take {gib((none + full) // 2)} of {gib(room)}")


Prepared = tuple[Callable[[], Tensor], Row]


def run_variants(job: Job, place: Place, prepare: Callable[[str, int, int], Prepared]) -> None:
    """A row for every variant and length. `prepare`(variant, length, every): a step, and facts about it."""
    cfg = shape(job.model, job.layers)
    for length in SHORT if place.device.type == "cuda" else (64,):
        step, _ = prepare("recompute", length * place.world, 1)  # makes the optimizer's moments too
        step()
        del step
    base = held(place.device)
    for variant in sorted(job.variants, key=FIRST.index):
        for seq_len in sorted(job.seq_lens):
            row = {**job.facts(), "label": variant, "variant": variant, "seq_len": seq_len, "base": base}
            guess = guess_seconds(cfg, seq_len, place.world, place.device.type)
            steps, warmup = repeats(guess, job.steps)
            row["dtype"] = str(place.dtype).removeprefix("torch.")
            try:
                step, facts = prepare(variant, seq_len, how_often(variant, cfg, seq_len, place))
                row |= facts
                row |= measure(step, steps=steps, warmup=warmup, device=place.device)
            except (MemoryError, ValueError) as e:
                place.emit({**row, "error": f"not tried: {e}"})
                continue
            except torch.OutOfMemoryError as e:  # what is half done cannot be undone: the launch ends
                return place.emit({**row, "error": f"out of memory: {str(e)[:160]}"})
            place.emit(figures(row, cfg))
            del step
            release(place.device)
