"""What is no product and no attention: passes over memory, each against a copy of the bytes it must move.

The least that must move is every input read once and every result written once; of a tile's logits the loss
also reads each row a second time, since a row of a large vocabulary fits no multiprocessor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from usp.adamw import LARGE
from usp.heads import wire
from usp.loss_tile import tile_pass
from usp.mesh.cast import as_dtype
from usp.models import LlamaConfig
from usp.models.parts import gated, local_parts, rms_norm
from usp.models.rope import rope, rope_cos_sin
from usp.optim import adamw_init, adamw_update
from usp.programs import own_programs
from usp.tools.bench.job import Job
from usp.tools.bench.place import Place
from usp.tools.bench.shape import shape
from usp.tools.bench.timing import timed
from usp.tools.rates import UPDATE_BYTES
from usp.wire import can_wire, to_wire

LOSS_TILE = 4096
RANKS = 2  # for which q, k and v are put in order


class Pass(NamedTuple):
    label: str
    nbytes: int
    run: Callable[..., object]
    before: Callable[[], tuple[Any, ...]] = tuple
    """Makes what `run` takes, anew for each call."""


def run(job: Job, place: Place) -> None:
    """A row for each pass and length: milliseconds, bytes per second, and how many times the copy's time."""
    cfg, device = shape(job.model, job.layers), place.device
    lengths = sorted(job.seq_lens)
    for seq_len in lengths:
        for one in passes(cfg, seq_len, place, last=seq_len == lengths[-1]):
            row = {**job.facts(), "label": one.label, "seq_len": seq_len, "nbytes": one.nbytes}
            took = timed(one.run, device, before=one.before)
            row |= {"ms": took.device, "host_ms": took.host, "bytes_per_s": 1e3 * one.nbytes / took.device}
            place.emit({**row, "over_floor": took.device / copied(one.nbytes, device)})


def copied(nbytes: int, device: torch.device) -> float:
    """Milliseconds of a copy that reads and writes so many bytes in all."""
    here, there = (torch.ones(nbytes // 2, dtype=torch.uint8, device=device) for _ in range(2))
    return timed(lambda: there.copy_(here), device).device


def passes(cfg: LlamaConfig, tokens: int, place: Place, *, last: bool) -> Iterator[Pass]:
    """Of a layer forward and backward, as the model runs them; at the last length those, too, that do not
    depend on it: a tile of the loss, and the optimizer."""
    made: dict[str, Any] = {"device": place.device, "dtype": place.dtype}
    compiled = place.device.type == "cuda"
    x = torch.randn(1, tokens, cfg.hidden_size, **made)
    weight = torch.randn(cfg.hidden_size, **made)
    norm = local_parts(cfg, compiled).norm
    wanted = x.requires_grad_(), weight.requires_grad_()
    yield Pass("norm", size([x, x, weight]), lambda: norm(*wanted))
    yield norm_backward(cfg, *wanted, compiled=compiled)
    yield from rotation(cfg, tokens, made)
    gates = [torch.randn(1, tokens, cfg.intermediate_size, **made) for _ in range(2)]
    yield from both("activation", own_programs(gated) if compiled else gated, gates, read_back=gates)
    del gates
    if last:
        yield loss(cfg, tokens, made)
        yield from of_weights(cfg, place)


def size(tensors: Iterable[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def both(
    label: str,
    fn: Callable[..., Tensor],
    inputs: list[Tensor],
    *,
    read_back: Sequence[Tensor],
    kept: Sequence[Tensor] = (),
) -> Iterator[Pass]:
    """`fn` with a graph, and its gradients: these read `read_back` and what comes from above. `kept`: what
    both read besides."""
    wanted = [t.requires_grad_() for t in inputs]
    up = torch.randn_like(fn(*wanted))
    yield Pass(label, size([*inputs, up, *kept]), lambda: fn(*wanted))
    moved = size([up, *read_back, *kept, *inputs])
    yield Pass(
        f"{label}, backward", moved, lambda y: torch.autograd.grad(y, wanted, up),
        before=lambda: (fn(*wanted),),  # what is compiled takes no graph a second time
    )  # fmt: skip


def norm_backward(cfg: LlamaConfig, x: Tensor, weight: Tensor, *, compiled: bool) -> Pass:
    """As in the MLP, where two products read the result and the sum of their gradients is a part of the pass:
    the model's norm, compiled with two readers in their place."""

    def read_twice(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = rms_norm(x, weight, eps=cfg.rms_eps)
        return y, 2 * y

    wanted = [x, weight]
    fn, ups = own_programs(read_twice) if compiled else read_twice, [torch.randn_like(x) for _ in range(2)]
    return Pass(
        "norm, backward", size([x, x, *ups]), lambda *ys: torch.autograd.grad(ys, wanted, ups),
        before=lambda: fn(*wanted),
    )  # fmt: skip


def rotation(cfg: LlamaConfig, tokens: int, made: dict[str, Any]) -> Iterator[Pass]:
    """q and k rotated, and both with v put in the order in which they are sent."""
    heads = cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads
    ranks = RANKS if cfg.num_heads % RANKS == cfg.num_kv_heads % RANKS == 0 else 1
    tensors = [torch.randn(1, tokens, n, cfg.head_dim, **made) for n in heads]
    positions = torch.arange(tokens, device=made["device"])[None]
    turn = rope_cos_sin(positions, cfg, made["dtype"], seq_len=tokens)

    def wired(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if can_wire(q):
            return to_wire([q, k, v], ranks, turn=turn)
        return wire([rope(q, *turn), rope(k, *turn), v], ranks)

    yield from both("rotation, order of the wire", wired, tensors, read_back=(), kept=turn)


def loss(cfg: LlamaConfig, tokens: int, made: dict[str, Any]) -> Pass:
    """Of one tile: losses, and the logits' gradients, written over them."""
    rows = min(tokens, LOSS_TILE)
    logits = torch.randn(rows, cfg.vocab_size, **made)
    labels = torch.randint(cfg.vocab_size, (rows,), device=made["device"])
    return Pass(f"loss, a tile of {rows}", 3 * logits.nbytes, lambda: tile_pass(logits, labels))


def of_weights(cfg: LlamaConfig, place: Place) -> Iterator[Pass]:
    """What a step does once with every entry: gradients widened, AdamW. As many entries as a layer's MLP."""
    count = max(LARGE, 3 * cfg.hidden_size * cfg.intermediate_size)
    narrow = torch.randn(count, device=place.device, dtype=place.dtype)
    if place.dtype != torch.float32:
        yield Pass("gradients to float32", 3 * narrow.nbytes, lambda: as_dtype([narrow], torch.float32))
    params = {"weight": torch.randn(count, device=place.device)}
    grads, state = {"weight": narrow.float()}, adamw_init(params)
    scale = torch.ones((), device=place.device)
    yield Pass(
        "AdamW with clipping", UPDATE_BYTES * count,
        lambda: adamw_update(params, grads, state, lr=1e-5, grad_scale=scale),
    )  # fmt: skip
