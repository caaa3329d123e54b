"""What a user gave, read and checked before the first collective of a run."""

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from usp import models
from usp.mesh import TABLES, Table
from usp.mesh.devices import check_world_size
from usp.models.options import check_kernel
from usp.models.plan.local import padded_length
from usp.tools import facts, text
from usp.tools.config import Train
from usp.tools.config_plan import Plan
from usp.tools.ranks import MOST_SECONDS, Ranks, can_wait

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


def check_axes(table: str, **degrees: int) -> None:
    """ValueError for ranks along an axis that the table does not cut the sequence over."""
    for axis, degree in degrees.items():
        if degree > 1 and axis not in TABLES[table].tokens.axes:
            raise ValueError(
                f"{axis}={degree} must be 1 where it cuts nothing, got table={table}. "
                "Choose another --table, or more --dp."
            )


def rows_of_step(cfg: Train | Plan) -> int:
    return cfg.batch_size or cfg.dp * cfg.accumulate


def check_rows(cfg: Train | Plan) -> None:
    if cfg.batch_size is not None and (cfg.batch_size < 1 or cfg.batch_size % (cfg.dp * cfg.accumulate)):
        raise ValueError(
            f"batch_size={cfg.batch_size} must be a multiple of dp * accumulate, got dp={cfg.dp} "
            f"accumulate={cfg.accumulate}. Change --batch-size, --dp or --accumulate."
        )


def positions_note(model: models.LlamaConfig, positions: int) -> str | None:
    """Words for a user whose rows are longer than what the model's RoPE was made for; None otherwise."""
    rope, known = model.rope, model.max_position
    if rope.rope_type in ("yarn", "longrope", "llama3") and rope.factor is not None:
        known = max(known, int(rope.factor * rope.original_max_position))
    if positions <= known:
        return None
    return (
        f"note: positions reach {positions}, beyond the {known} that the model knows (rope_type "
        f"{rope.rope_type}). To stretch them, give its config.json RoPE parameters with a factor."
    )


def tell_positions(ranks: Ranks, model: models.LlamaConfig, positions: int) -> None:
    note = positions_note(model, positions)
    if note is not None and ranks.first:
        print(note, flush=True)


def check_config(cfg: Train, world: int) -> None:
    """The rules that need no file. Raises ValueError."""
    for name in ("dp", "ring", "ulysses", "steps", "log_every", "accumulate", "group", "keep"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"{name}={getattr(cfg, name)} must be at least 1. Change --{flag(name)}.")
    check_world_size(world, dp=cfg.dp, ring=cfg.ring, ulysses=cfg.ulysses)
    if cfg.table not in TABLES:
        raise ValueError(f"table={cfg.table} must be one of {', '.join(sorted(TABLES))}. Change --table.")
    check_axes(cfg.table, ring=cfg.ring, ulysses=cfg.ulysses)
    shortest = max(2, cfg.ring * cfg.ulysses)
    if cfg.seq_len < shortest:
        raise ValueError(
            f"seq_len={cfg.seq_len} must be at least {shortest}, got ring={cfg.ring} ulysses={cfg.ulysses}. "
            "Use a longer --seq-len."
        )
    check_rows(cfg)
    if cfg.save_every is not None and cfg.save_every < 1:
        raise ValueError(f"save_every={cfg.save_every} must be at least 1. Change --save-every.")
    check_timeout(cfg.timeout)
    for name in ("lr", "warmup", "weight_decay", "max_norm", "seed"):
        if not 0 <= getattr(cfg, name) < math.inf:
            raise ValueError(
                f"{name}={getattr(cfg, name)} must be a number of 0 or more. Change --{flag(name)}."
            )
    if cfg.seed >= 2**63:
        raise ValueError(f"seed={cfg.seed} must be below 2^63. Change --seed.")
    content = cfg.out.exists() and (not cfg.out.is_dir() or not all(map(_unfinished, cfg.out.iterdir())))
    if content and not cfg.resume:
        again = " To go on with the run in it, add --resume." if (cfg.out / facts.FILE).is_file() else ""
        raise ValueError(
            f"out={cfg.out} must be new or an empty folder, got one with content. Change --out.{again}"
        )
    if content and not (cfg.out / facts.FILE).is_file():
        raise ValueError(
            f"out={cfg.out} must hold a run to resume it, got content without {facts.FILE}. Change --out."
        )


def check_timeout(timeout: float) -> None:
    if not can_wait(timeout):
        raise ValueError(
            f"timeout={timeout} must be a number of seconds from 1 to {MOST_SECONDS}. Change --timeout."
        )


def _unfinished(path: Path) -> bool:
    """What a process that was killed may leave, and the next one does not need."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


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
    sizes = {"dp": cfg.dp, "ring": cfg.ring, "ulysses": cfg.ulysses}
    table = TABLES[cfg.table]
    model = read_model_config(cfg.model)
    models.check_layout(model, mesh=sizes, table=table, seq_len=cfg.seq_len)
    auto = "bfloat16" if ranks.device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, auto if cfg.dtype == "auto" else cfg.dtype)
    padded = padded_length(table, sizes, cfg.seq_len)
    kernel = partial(check_kernel, cfg.kernel, model, device=ranks.device, dtype=dtype, seq_len=padded)
    kernel(packed=False)
    tokenizer = text.load_tokenizer(cfg.model)
    texts = text.read_documents(text.find_files(cfg.data, include=cfg.include))
    docs = text.encode(texts, tokenizer, vocab_size=model.vocab_size, progress=ranks.first)
    kernel(packed=any(len(doc) % cfg.seq_len for doc in docs))  # a row that several of them share
    return Setup(
        model=model,
        table=table,
        dtype=dtype,
        data=text.Packed(docs=docs, seq_len=cfg.seq_len, seed=cfg.seed),
        num_rows=rows_of_step(cfg),
    )
