"""Evaluation: `torchrun --nproc-per-node 2 -m usp.tools.eval --model DIR --data PATH --seq-len N ...`."""

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from tqdm import tqdm

from usp import Batch, models
from usp.mesh import TABLES, build_mesh
from usp.mesh.devices import check_world_size
from usp.models.options import Options, check_how
from usp.tools import text
from usp.tools.cli import parse
from usp.tools.config_eval import Eval
from usp.tools.ranks import Ranks, on_ranks
from usp.tools.setup import check_axes, check_timeout, read_model_config, tell_positions


def check(cfg: Eval, world: int) -> None:
    """The rules that need no file. Raises ValueError."""
    for name in ("dp", "ring", "ulysses", "batch_size", "mlp_tile", "head_chunks"):
        value = getattr(cfg, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1. Change --{name.replace('_', '-')}.")
    check_timeout(cfg.timeout)
    check_world_size(world, dp=cfg.dp, ring=cfg.ring, ulysses=cfg.ulysses)
    if cfg.table not in TABLES:
        raise ValueError(f"table={cfg.table} must be one of {', '.join(sorted(TABLES))}. Change --table.")
    check_axes(cfg.table, ring=cfg.ring, ulysses=cfg.ulysses)
    if cfg.seq_len < 2:
        raise ValueError(f"seq_len={cfg.seq_len} must be at least 2 for a label. Use a longer --seq-len.")
    if cfg.out is not None and cfg.out.exists():
        raise ValueError(f"out={cfg.out} must be new, got an existing file. Change --out.")


def prepare(cfg: Eval, ranks: Ranks) -> text.Packed:
    """Read and check everything a user gave, without communication. Raises ValueError or OSError."""
    check(cfg, ranks.world)
    sizes = {"dp": cfg.dp, "ring": cfg.ring, "ulysses": cfg.ulysses}
    model = read_model_config(cfg.model)
    models.check_layout(model, mesh=sizes, table=TABLES[cfg.table], seq_len=cfg.seq_len)
    check_how(model, table=TABLES[cfg.table], mesh=sizes, options=how(cfg))
    tokenizer = text.load_tokenizer(cfg.model)
    texts = text.read_documents(text.find_files(cfg.data, include=cfg.include))
    docs = text.encode(texts, tokenizer, vocab_size=model.vocab_size, progress=ranks.first)
    return text.Packed(docs=docs, seq_len=cfg.seq_len)


def how(cfg: Eval) -> Options:
    """What the layers are told."""
    return {"mlp_tile": cfg.mlp_tile, "head_chunks": cfg.head_chunks}


def batches(data: text.Packed, num_rows: int, *, progress: bool) -> Iterator[Batch]:
    """Every row once; the last batch may have fewer."""
    rows = data.rows()
    bar = tqdm(total=data.rows_per_epoch, unit="row", disable=not progress)
    with bar:
        while chosen := list(islice(rows, num_rows)):
            yield text.to_batch(chosen)
            bar.update(len(chosen))


def run(cfg: Eval, ranks: Ranks) -> models.Evaluation:
    """The result, the same on every rank; rank 0 prints it and writes --out."""
    data = ranks.checked(partial(prepare, cfg, ranks))
    sizes = {"dp": cfg.dp, "ring": cfg.ring, "ulysses": cfg.ulysses}
    mesh: Any = build_mesh(**sizes, device_type=ranks.device.type) if ranks.world > 1 else sizes
    table = TABLES[cfg.table]
    auto = "bfloat16" if ranks.device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, auto if cfg.dtype == "auto" else cfg.dtype)
    ranks.doing("reading the model")
    read = partial(models.from_hf, cfg.model, table=table, mesh=mesh, dtype=dtype, device=ranks.device)
    model, params = ranks.checked(read)
    tell_positions(ranks, model, data.num_positions)
    ranks.doing("the evaluation")
    found = models.evaluate(
        params,
        batches(data, cfg.batch_size or cfg.dp, progress=ranks.first),
        model, table=table, mesh=mesh, device=ranks.device, **how(cfg),
    )  # fmt: skip
    ranks.checked(lambda: report(cfg, found) if ranks.first else None)
    return found


def report(cfg: Eval, found: models.Evaluation) -> None:
    result = {"loss": found.loss, "perplexity": found.perplexity, "tokens": found.num_tokens}
    print(f"loss {found.loss:.6f}, perplexity {found.perplexity:.4f}, {found.num_tokens} tokens", flush=True)
    if cfg.out is not None:
        cfg.out.parent.mkdir(parents=True, exist_ok=True)
        fresh = cfg.out.with_name(f".{cfg.out.name}.{os.getpid()}.tmp")
        fresh.write_text(json.dumps({**result, "seq_len": cfg.seq_len}) + "\n", encoding="utf-8")
        os.replace(fresh, cfg.out)


def main(args: Sequence[str] | None = None, *, prog: str = "python -m usp.tools.eval") -> None:
    cfg: Eval | None = None
    refused: SystemExit | None = None
    try:
        cfg = parse(Eval, prog=prog, args=args)
    except SystemExit as e:
        refused = e
    on_ranks(cfg, refused, run)


if __name__ == "__main__":
    main()
