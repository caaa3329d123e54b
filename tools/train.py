"""Training: `torchrun --nproc-per-node 2 -m usp.tools.train --model DIR --data PATH --seq-len N ...`."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm

from usp import (
    Batch,
    Shard,
    adamw_init,
    adamw_update,
    clip_by_global_norm,
    models,
    reduce_grads,
    shard_batch,
    value_and_grad,
)
from usp.accumulate import accumulate, split_batch
from usp.arena import Arena
from usp.mesh import TABLES, Table, build_mesh
from usp.mesh.devices import check_world_size
from usp.tools import text
from usp.tools.cli import parse
from usp.tools.config import Train
from usp.tools.metrics import Metrics, peak_memory_gb
from usp.tools.ranks import Ranks, start

Mesh = DeviceMesh | Mapping[str, int]


class Setup(NamedTuple):
    """Everything that is checked before the first collective."""

    model: models.LlamaConfig
    table: Table
    dtype: torch.dtype
    data: text.Packed
    num_rows: int


def flag(name: str) -> str:
    return name.replace("_", "-")


def check_config(cfg: Train, world: int) -> None:
    """The rules that need no file. Raises ValueError."""
    for name in ("dp", "ring", "ulysses", "steps", "log_every", "accumulate", "group"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"{name}={getattr(cfg, name)} must be at least 1. Change --{flag(name)}.")
    check_world_size(world, dp=cfg.dp, ring=cfg.ring, ulysses=cfg.ulysses)
    if cfg.table not in TABLES:
        raise ValueError(f"table={cfg.table} must be one of {', '.join(sorted(TABLES))}. Change --table.")
    for axis in ("ring", "ulysses"):
        if getattr(cfg, axis) > 1 and axis not in TABLES[cfg.table].tokens.axes:
            raise ValueError(
                f"{axis}={getattr(cfg, axis)} must be 1 where it cuts nothing, got table={cfg.table}. "
                "Choose another --table, or more --dp."
            )
    shortest = max(2, cfg.ring * cfg.ulysses)
    if cfg.seq_len < shortest:
        raise ValueError(
            f"seq_len={cfg.seq_len} must be at least {shortest}, got ring={cfg.ring} ulysses={cfg.ulysses}. "
            "Use a longer --seq-len."
        )
    parts = cfg.dp * cfg.accumulate
    if cfg.batch_size is not None and (cfg.batch_size < 1 or cfg.batch_size % parts):
        raise ValueError(
            f"batch_size={cfg.batch_size} must be a multiple of dp * accumulate, got dp={cfg.dp} "
            f"accumulate={cfg.accumulate}. Change --batch-size, --dp or --accumulate."
        )
    if cfg.mlp_tile is not None and cfg.mlp_tile < 1:
        raise ValueError(f"mlp_tile={cfg.mlp_tile} must be at least 1. Change --mlp-tile.")
    if cfg.remat == "none" and (cfg.group != 1 or cfg.offload != "none"):
        raise ValueError(
            f"remat=none must come without groups and offload, got group={cfg.group} offload={cfg.offload}. "
            "Change --remat."
        )
    for name in ("lr", "warmup", "weight_decay", "max_norm"):
        if not getattr(cfg, name) >= 0:
            raise ValueError(
                f"{name}={getattr(cfg, name)} must be a number of 0 or more. Change --{flag(name)}."
            )
    if cfg.out.exists() and (not cfg.out.is_dir() or any(cfg.out.iterdir())):
        raise ValueError(f"out={cfg.out} must be new or an empty folder, got one with content. Change --out.")


def read_model_config(folder: Path) -> models.LlamaConfig:
    """The architecture a Hugging Face directory names. Raises ValueError when it is not such a directory."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(
            f"model={folder} must be a Hugging Face model directory, got no config.json in it. "
            "Correct the path, or save the model with save_pretrained."
        )
    try:
        return models.LlamaConfig.from_hf_dict(json.loads(file.read_text(encoding="utf-8")))
    except json.JSONDecodeError as e:
        raise ValueError(f"model={folder} must hold a readable config.json, got: {e}. Repair it.") from None


def prepare(cfg: Train, ranks: Ranks) -> Setup:
    """Read and check everything a user gave, without communication. Raises ValueError or OSError."""
    check_config(cfg, ranks.world)
    sizes = {"dp": cfg.dp, "ring": cfg.ring, "ulysses": cfg.ulysses}
    table = TABLES[cfg.table]
    model = read_model_config(cfg.model)
    models.check_layout(model, mesh=sizes, table=table, seq_len=cfg.seq_len)
    tokenizer = text.load_tokenizer(cfg.model)
    texts = text.read_documents(text.find_files(cfg.data, include=cfg.include))
    docs = text.encode(texts, tokenizer, vocab_size=model.vocab_size, progress=ranks.first)
    auto = "bfloat16" if ranks.device.type == "cuda" else "float32"
    return Setup(
        model=model,
        table=table,
        dtype=getattr(torch, auto if cfg.dtype == "auto" else cfg.dtype),
        data=text.Packed(docs=docs, seq_len=cfg.seq_len, seed=cfg.seed),
        num_rows=cfg.batch_size or cfg.dp * cfg.accumulate,
    )


class StepResult(NamedTuple):
    loss: torch.Tensor  # of the whole batch, the same on every rank
    norm: torch.Tensor


def make_step(cfg: Train, setup: Setup, mesh: Mesh, device: torch.device) -> Callable[..., StepResult]:
    """One training step: `step(params, state, batch, lr)` updates parameters and optimizer state in place."""
    specs = models.param_specs(setup.model, setup.table)

    arena = Arena() if cfg.offload == "host" else None

    def loss_fn(params: models.Params, shard: Shard) -> torch.Tensor:
        return models.loss(
            params, shard, setup.model, table=setup.table, mesh=mesh, dtype=setup.dtype, remat=cfg.remat,
            group=cfg.group, offload=cfg.offload, arena=arena, mlp_tile=cfg.mlp_tile,
        )  # fmt: skip

    loss_and_grads = value_and_grad(loss_fn)

    def step(params: Any, state: Any, batch: Batch, lr: float) -> StepResult:
        parts = split_batch(batch, cfg.accumulate)
        shards = [shard_batch(part, table=setup.table, mesh=mesh, device=device) for part in parts]
        loss, grads = accumulate(loss_and_grads, params, shards)
        grads = reduce_grads(grads, specs, mesh)
        grads, norm = clip_by_global_norm(grads, specs, mesh, cfg.max_norm or float("inf"))
        adamw_update(params, grads, state, lr=lr, weight_decay=cfg.weight_decay)
        loss = loss.detach().float()
        if dist.is_initialized():
            dist.all_reduce(loss)
        return StepResult(loss, norm)

    return step


def learning_rate(cfg: Train, step: int) -> float:
    """Linear from lr / warmup at step 1 to lr at step `warmup`, then constant."""
    return cfg.lr * min(1.0, step / cfg.warmup) if cfg.warmup else cfg.lr


def train(cfg: Train, ranks: Ranks) -> None:
    """Train, write metrics and plot, and export the result to OUT/hf."""
    setup = ranks.checked(partial(prepare, cfg, ranks))
    sizes = {"dp": cfg.dp, "ring": cfg.ring, "ulysses": cfg.ulysses}
    mesh: Mesh = build_mesh(**sizes, device_type=ranks.device.type) if ranks.world > 1 else sizes
    model, params = ranks.checked(
        lambda: models.from_hf(
            cfg.model, table=setup.table, mesh=mesh, dtype=torch.float32, device=ranks.device
        )
    )
    ranks.checked(lambda: start_folder(cfg, setup) if ranks.first else None)
    run_steps(cfg, setup, params, mesh, ranks)
    export = partial(models.to_hf, source=cfg.model, table=setup.table, mesh=mesh, dtype=setup.dtype)
    ranks.checked(lambda: export(params, model, cfg.out / "hf"))
    if ranks.first:
        print(f"saved {cfg.out}/hf (Hugging Face), {cfg.out}/metrics.jsonl, {cfg.out}/loss.png", flush=True)


def start_folder(cfg: Train, setup: Setup) -> None:
    cfg.out.mkdir(parents=True, exist_ok=True)
    (cfg.out / "config.json").write_text(json.dumps(dataclasses.asdict(cfg), default=str, indent=2) + "\n")
    data = setup.data
    print(
        f"{len(data.docs)} documents, {data.num_tokens} tokens: {data.rows_per_epoch} rows of {cfg.seq_len} "
        f"an epoch; {setup.num_rows} rows a step",
        flush=True,
    )


def run_steps(cfg: Train, setup: Setup, params: Any, mesh: Mesh, ranks: Ranks) -> None:
    """The loop: rank 0 shows a bar and writes metrics; the host waits for a GPU only where it logs."""
    step_fn = make_step(cfg, setup, mesh, ranks.device)
    state = adamw_init(params)
    batches = setup.data.batches(setup.num_rows)
    metrics = ranks.checked(lambda: Metrics(cfg.out) if ranks.first else None)
    bar = tqdm(total=cfg.steps, unit="step", disable=not ranks.first)
    waiting: list[tuple[int, int, StepResult]] = []
    began = time.perf_counter()
    try:
        for step in range(1, cfg.steps + 1):
            batch = next(batches)
            result = step_fn(params, state, batch, learning_rate(cfg, step))
            waiting.append((step, text.num_tokens(batch), result))
            if step % cfg.log_every == 0 or step == cfg.steps:
                ranks.checked(partial(report, metrics, bar, waiting, cfg, began))
                waiting, began = [], time.perf_counter()
            bar.update()
    finally:
        bar.close()
        if metrics is not None:
            metrics.close()


def report(
    metrics: Metrics | None,
    bar: Any,
    waiting: list[tuple[int, int, StepResult]],
    cfg: Train,
    began: float,
) -> None:
    """Write the steps since the last report: each its own loss, all the mean speed.

    Raises ValueError, on every rank alike, at the first step whose loss or gradient norm is not finite.
    """
    values = [(step, float(r.loss), float(r.norm)) for step, _, r in waiting]  # waits for the device
    seconds = time.perf_counter() - began
    speed, memory = sum(tokens for _, tokens, _ in waiting) / seconds, peak_memory_gb()
    for step, loss, norm in values:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise ValueError(
                f"loss={loss} and grad_norm={norm} must be finite, got this at step={step}. Nothing is "
                "exported; lower --lr, or look for the row that did it."
            )
        if metrics is not None:
            metrics.log(
                step,
                loss=loss,
                grad_norm=norm,
                lr=learning_rate(cfg, step),
                tokens_per_s=speed,
                seconds=seconds / len(values),
                memory_gb=memory,
            )
    bar.set_postfix_str(f"loss {values[-1][1]:.4f}, {speed:.0f} tok/s, {memory:.2f} GB")


def main(args: Sequence[str] | None = None, *, prog: str = "python -m usp.tools.train") -> None:
    ranks = start()
    code = 0
    try:
        cfg: Train = ranks.checked(lambda: parse(Train, prog=prog, args=args))
        train(cfg, ranks)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0
    ranks.leave(code)


if __name__ == "__main__":
    main()
