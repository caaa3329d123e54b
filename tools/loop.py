"""The training loop: steps, what is written about them, and when the state is saved."""

import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from usp import (
    Batch,
    Shard,
    adamw_update,
    models,
    reduce_grads,
    shard_batch,
    value_and_grad,
)
from usp.accumulate import accumulate, split_batch
from usp.models.params import named_leaves
from usp.optim import clip_scale, local_norms, norm_of_all
from usp.state import Saver
from usp.tools import text
from usp.tools.config import Train
from usp.tools.flops import utilization
from usp.tools.garbage import frozen
from usp.tools.metrics import Metrics, peak_memory_gb
from usp.tools.ranks import Ranks
from usp.tools.resume import State, save
from usp.tools.setup import Mesh, Setup
from usp.tools.stop import Stop

MAX_SKIPPED = 20
"""Steps left out in a row, with --on-nan skip, after which there is no hope."""


class StepResult(NamedTuple):
    loss: Tensor  # of the whole batch, the same on every rank
    norm: Tensor
    norms: Tensor  # of each gradient's part on this rank, in the order of the parameters
    updated: bool = True


def make_step(
    cfg: Train, setup: Setup, mesh: Mesh, device: torch.device, options: Mapping[str, Any]
) -> Callable[..., StepResult]:
    """One training step: `step(params, state, batch, lr)` updates parameters and optimizer state in place."""
    specs = models.param_specs(setup.model, setup.table)
    placed = [spec for _, spec in named_leaves(specs)]

    def loss_fn(params: models.Params, shard: Shard) -> Tensor:
        return models.loss(params, shard, setup.model, table=setup.table, mesh=mesh, **options)

    loss_and_grads = value_and_grad(loss_fn)

    def step(params: Any, state: Any, batch: Batch, lr: float) -> StepResult:
        parts = split_batch(batch, cfg.accumulate)
        shards = [shard_batch(part, table=setup.table, mesh=mesh, device=device) for part in parts]
        loss, grads = accumulate(loss_and_grads, params, shards)
        loss = loss.detach().float()
        if dist.is_initialized():
            dist.all_reduce(loss)
        grads = reduce_grads(grads, specs, mesh)
        norms = local_norms(grads)
        norm = norm_of_all(norms, placed, mesh)
        updated = cfg.on_nan != "skip" or bool(torch.isfinite(loss) & torch.isfinite(norm))
        if updated:
            scale = clip_scale(norm, cfg.max_norm) if cfg.max_norm else None
            adamw_update(
                params, grads, state, lr=lr, weight_decay=cfg.weight_decay, grad_scale=scale,
                compiled=options["compile"],
            )  # fmt: skip
        return StepResult(loss, norm, torch.stack(norms), updated)

    return step


def learning_rate(cfg: Train, step: int) -> float:
    """Linear from lr / warmup at step 1 to lr at step `warmup`, then constant."""
    return cfg.lr * min(1.0, step / cfg.warmup) if cfg.warmup else cfg.lr


class Waiting(NamedTuple):
    """A step that has not been written about yet."""

    step: int
    num_tokens: int
    result: StepResult


def run_steps(
    cfg: Train,
    setup: Setup,
    state: State,
    mesh: Mesh,
    ranks: Ranks,
    saver: Saver,
    stop: Stop,
    options: Mapping[str, Any],
) -> State:
    """Up to the last step, or the one after which all ranks agree to stop, with everything saved by then.

    `options`: keyword arguments of `models.loss`. Rank 0 shows a bar and writes metrics; the host waits for a
    GPU only where it logs or saves.
    """
    step_fn = make_step(cfg, setup, mesh, ranks.device, options)
    batches = setup.data.batches(setup.num_rows, start=state.step)
    metrics = ranks.checked(lambda: Metrics(cfg.out, after=state.step) if ranks.first else None)
    bar = tqdm(total=cfg.steps, initial=state.step, unit="step", disable=not ranks.first)
    waiting: list[Waiting] = []
    stop.ask()
    began, skipped, stopping = time.perf_counter(), 0, stop.agreed()
    settled, first = ExitStack(), state.step + 1
    try:
        while state.step < cfg.steps and not stopping:
            step = state.step + 1
            ranks.doing(f"step {step}", limited=True)
            stop.ask()
            batch = next(batches)
            result = step_fn(state.params, state.optimizer, batch, learning_rate(cfg, step))
            state = state._replace(step=step, updates=state.updates + result.updated)
            waiting.append(Waiting(step, text.num_tokens(batch), result))
            if step == first:  # by now everything is compiled
                settled.enter_context(frozen())
            skipped = 0 if result.updated else skipped + 1
            stopping = stop.agreed()
            last = stopping or step == cfg.steps
            due = cfg.save_every is not None and (step % cfg.save_every == 0 or step == cfg.steps)
            if step % cfg.log_every == 0 or last or due or skipped >= MAX_SKIPPED:
                ranks.checked(partial(report, metrics, bar, waiting, cfg, began, ranks, setup))
                ranks.checked(partial(_check, saver, skipped))
                waiting, began = [], time.perf_counter()
            if due or stopping:
                ranks.checked(partial(save, saver, setup, state, mesh, ranks))
                began = time.perf_counter()  # what a save takes is no step's
            bar.update()
        ranks.doing(f"saving step {state.step}")
        ranks.checked(saver.wait)
    except SystemExit:  # on all ranks alike, and what is being saved is good
        ranks.doing("the save that had begun")
        try:
            saver.wait()
        except Exception as e:
            if ranks.first:
                print(f"the save that had begun failed too: {e}", file=sys.stderr, flush=True)
        raise
    finally:
        settled.close()
        bar.close()
        if metrics is not None:
            metrics.close()
    return state


def _check(saver: Saver, skipped: int) -> None:
    saver.check()
    if skipped >= MAX_SKIPPED:
        raise ValueError(
            f"loss=nan must not come {skipped} steps in a row. Resume with a lower --lr, or without --on-nan "
            "skip to see where it comes from."
        )


def report(
    metrics: Metrics | None,
    bar: Any,
    waiting: list[Waiting],
    cfg: Train,
    began: float,
    ranks: Ranks,
    setup: Setup,
) -> None:
    """Write the steps since the last report: each its own loss, all the mean speed.

    Raises ValueError, on every rank alike, at the first step whose loss or gradient norm is not finite and
    that was not left out.
    """
    values = [(w, float(w.result.loss), float(w.result.norm)) for w in waiting]  # waits for the device
    seconds = time.perf_counter() - began
    speed, memory = sum(w.num_tokens for w in waiting) / seconds, peak_memory_gb()
    used = utilization(setup.model, cfg.seq_len, speed / ranks.world, ranks.device)
    bad = next((v for v in values if v[0].result.updated and not _finite(*v[1:])), None)
    where = "" if bad is None else _first_bad(bad[0].result, ranks, setup)
    for w, loss, norm in values:
        if bad is not None and w is bad[0]:
            raise ValueError(
                f"loss={loss} and grad_norm={norm} must be finite, got this at step={w.step}{where}. Nothing "
                "is exported or saved of it; lower --lr, or look for the row that did it."
            )
        if metrics is not None:
            metrics.log(
                w.step,
                loss=loss,
                grad_norm=norm,
                lr=learning_rate(cfg, w.step),
                tokens_per_s=speed,
                **used,
                seconds=seconds / len(values),
                memory_gb=memory,
            )
    share = f" ({used['mfu']:.0%} of peak)" if "mfu" in used else ""
    work = f", {used['tflops']:.1f} TFLOP/s{share}" if ranks.device.type == "cuda" else ""
    bar.set_postfix_str(f"loss {values[-1][1]:.4f}, {speed:.0f} tok/s{work}, {memory:.2f} GB")


def _finite(*values: float) -> bool:
    return all(math.isfinite(value) for value in values)


def _first_bad(result: StepResult, ranks: Ranks, setup: Setup) -> str:
    """Names the first gradient, in the order of the parameters, with a value that is not finite."""
    found = torch.isfinite(result.norms).logical_not().nonzero().flatten().tolist()
    firsts = ranks.exchange(found[0] if found else None)
    places = [place for place in firsts if place is not None]
    if not places:
        return ", with every gradient finite"
    name = [name for name, _ in named_leaves(models.abstract(setup.model))][min(places)]
    at = ", ".join(str(rank) for rank, place in enumerate(firsts) if place == min(places))
    return f", first in the gradient of {name} on rank {at}"
