"""`usp convert SRC DST --to {usp,hf}`: between a Hugging Face directory and usp's own format."""

import os

import torch

from usp.models.files.stream import convert_checkpoint
from usp.tools.config import Convert
from usp.tools.ranks import start


def convert(cfg: Convert) -> None:
    """Read SRC in whichever of the two formats it is, write DST in the other (or the same, with --dtype).

    Memory holds one tensor at a time. Started by torchrun, the processes share the files of DST. Raises
    ValueError for a source that is neither, damage in it, and a folder with content.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return _convert(cfg, over=None)
    ranks = start()
    code = 0
    try:
        ranks.checked(lambda: _convert(cfg, over=torch.distributed.group.WORLD))
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    ranks.leave(code)


def _convert(cfg: Convert, *, over: torch.distributed.ProcessGroup | None) -> None:
    dtype = None if cfg.dtype == "keep" else getattr(torch, cfg.dtype)
    convert_checkpoint(
        cfg.src,
        cfg.dst,
        to=cfg.to,
        dtype=dtype,
        max_shard_size=cfg.max_shard_size,
        over=over,
        progress=True,
    )
    if over is None or over.rank() == 0:
        print(f"wrote {cfg.dst} ({cfg.to} format)")
