"""`usp convert SRC DST --to {usp,hf}`: between a Hugging Face directory and usp's own format."""

import torch

from usp import models
from usp.tools.config import Convert


def convert(cfg: Convert) -> None:
    """Read SRC in whichever of the two formats it is, write DST in the other (or the same, with --dtype).

    One process; no communication. Raises ValueError for a source that is neither and a folder with content.
    """
    check_target(cfg)
    dtype = None if cfg.dtype == "keep" else getattr(torch, cfg.dtype)
    if (cfg.src / "usp.json").is_file():
        model, params = models.load(cfg.src, dtype=dtype)
    elif (cfg.src / "config.json").is_file():
        model, params = models.from_hf(cfg.src, dtype=dtype)
    else:
        raise ValueError(
            f"src={cfg.src} must be a Hugging Face model directory or one in usp's format, got "
            "no config.json and no usp.json in it. Correct the path."
        )
    write = models.save if cfg.to == "usp" else models.to_hf
    write(params, model, cfg.dst, source=cfg.src, max_shard_size=cfg.max_shard_size)
    print(f"wrote {cfg.dst} ({cfg.to} format)")


def check_target(cfg: Convert) -> None:
    if cfg.dst.exists() and (not cfg.dst.is_dir() or any(cfg.dst.iterdir())):
        raise ValueError(
            f"dst={cfg.dst} must be new or an empty folder, got one with content. Give another DST."
        )
