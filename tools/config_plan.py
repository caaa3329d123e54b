"""What a user can set for `usp plan`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from usp.tools.lengths import Tokens


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Print what a training step sends and holds on each rank. Needs no GPU and starts no processes."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Hugging Face model directory, or a name such as llama-3-8b, qwen3-4b or smollm2-135m."""
    seq_len: Tokens | None = None
    """Tokens in one row, over all ranks: 131072, 128K or 2M. Needed unless --longest."""
    longest: bool = False
    """Find the longest row that fits, and the settings for it. It is often the host's memory that ends it."""

    ulysses: int = 1
    """Ranks that cut one sequence and exchange it for attention heads by all-to-all."""
    ring: int = 1
    """Ranks that cut one sequence and pass keys and values around."""
    dp: int = 1
    """Ranks, or groups of ranks, that work on different rows."""
    table: str = "usp"
    """Placement table by name: usp, ulysses, ring, odysseus, replicated."""
    batch_size: int | None = None
    """Rows of one step over all ranks, a multiple of dp * accumulate. Default: dp * accumulate."""
    accumulate: int = 1
    """Parts that a step's rows are worked on in, one after the other."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Computation; weights and optimizer state are float32."""
    compile: bool = True
    """Whether the parts of a layer are compiled."""
    remat: Literal["auto", "none", "full", "attention"] = "auto"
    """auto: the cheapest settings that fit, stored, group, offload, mlp_tile and head_chunks among them: to
    set one of these, name another. none: nothing is computed again. full: each layer. attention: all but
    that."""
    stored: int = 0
    """So many of the last layers keep everything; the others do as --remat full or attention says."""
    group: int = 1
    """Keep only the input of every group-th layer."""
    offload: Literal["none", "host"] = "none"
    """host: what is kept for the backward waits in the host's memory."""
    moments: Literal["auto", "device", "host"] = "auto"
    """Where AdamW's two moments live. auto: on the GPU, unless remat=auto finds no room for them."""
    mlp_tile: int | None = None
    """Tokens that the MLP sees at a time. Default: all of them."""
    head_chunks: int = 1
    """Parts that a rank's heads are taken through attention in."""

    gpu: str = "h200"
    """GPU by name: a100, h100, h200 or b200."""
    gpu_memory: str | None = None
    """Memory of one GPU, for example 141GB or 80GiB. Default: that of --gpu."""
    host_memory: str = "200GB"
    """Memory of the host that one rank may use for what it offloads: that of a machine over its GPUs."""
    rates: Path | None = None
    """File that `usp bench --calibrate` wrote on a machine with such GPUs, for the time of a step. Default:
    usp/rates.json in $XDG_CACHE_HOME or ~/.cache."""
