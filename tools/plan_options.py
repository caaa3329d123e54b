"""What `usp plan` chose, as words for the commands that do it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from usp.models import LlamaConfig, Settings
from usp.tools.config_plan import Plan
from usp.tools.presets import MODELS
from usp.tools.setup import rows_of_step


def as_options(cfg: Plan, model: LlamaConfig, seq_len: int, settings: Settings) -> str:
    """The command lines that make training, but for its files, and `usp bench` do this."""
    chosen = settings.words()
    mesh = {name: str(getattr(cfg, name)) for name in ("dp", "ring", "ulysses") if getattr(cfg, name) > 1}
    mesh |= {"table": cfg.table} if cfg.table != "usp" else {}
    batch = {name: str(getattr(cfg, name) or 1) for name in ("batch_size", "accumulate")}
    batch = {name: number for name, number in batch.items() if number != "1"}
    how: dict[str, str] = {} if cfg.dtype == "bfloat16" else {"dtype": cfg.dtype}
    how |= {} if cfg.compile else {"compile": "off"}
    own_model = {} if cfg.model in MODELS else {"model": cfg.model}
    ranks = cfg.dp * cfg.ring * cfg.ulysses
    start = "usp train " if ranks == 1 else f"torchrun --nproc-per-node {ranks} -m usp.tools.train "
    lines = [start + flags({**own_model, "seq_len": str(seq_len), **mesh, **batch, **how, **chosen})]
    if cfg.dp == 1 and rows_of_step(cfg) == 1 and cfg.dtype == "bfloat16":
        chosen |= {} if cfg.compile else {"compile": "False"}
        own = {name: value for name, value in mesh.items() if name != "ulysses"}
        setting = ",".join(f"{name}={value}" for name, value in {**own, **chosen}.items())
        what = {"model": cfg.model, "layers": str(model.num_layers), "gpus": str(cfg.ring * cfg.ulysses)}
        only = {"peers": "none", "variants": "", "setting": setting}
        lines.append("usp bench " + flags({**what, "seq_len": str(seq_len), **only}))
    return "\n".join(lines)


def flags(values: Mapping[str, str]) -> str:
    words = ((f"--{name.replace('_', '-')}", *([value] if value else [])) for name, value in values.items())
    return " ".join(shlex.join(pair) for pair in words)
