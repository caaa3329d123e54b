"""What a user can set, as frozen dataclasses. The parser reads names, types, defaults and help from here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from usp.tools.lengths import Tokens

SUFFIXES = (".txt", ".md", ".rst", ".py")


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a Llama-family checkpoint on long text, with the sequence cut over several processes.

    On 2 GPUs: torchrun --nproc-per-node 2 -m usp.tools.train --ulysses 2 ...; the process count must equal
    dp * ring * ulysses.
    """

    model: Path
    """Hugging Face model directory: config.json, *.safetensors and the tokenizer."""
    data: tuple[Path, ...]
    """UTF-8 text: files (read whatever their suffix) and folders (read recursively, see --include)."""
    out: Path
    """New or empty folder. Gets config.json, metrics.jsonl, loss.png, tensorboard/, checkpoints in state/ and
    the trained hf/."""
    seq_len: Tokens
    """Tokens in one row, over all ranks: 131072, 128K or 2M. Documents lie end to end; one that crosses the
    end of a row is cut there, and its pieces do not see each other."""

    steps: int = 100
    """Optimizer steps. The data starts again, in a new order, when an epoch ends."""
    batch_size: int | None = None
    """Rows of one step over all ranks, a multiple of dp * accumulate. Default: dp * accumulate."""
    accumulate: int = 1
    """Parts that a step's rows are worked on in, one after the other: a given --batch-size takes less memory,
    with the same result. Without one a step has dp * accumulate rows."""

    ulysses: int = 1
    """Ranks that cut one sequence and exchange it for attention heads by all-to-all."""
    ring: int = 1
    """Ranks that cut one sequence and pass keys and values around."""
    dp: int = 1
    """Ranks, or groups of ranks, that work on different rows."""
    table: str = "usp"
    """Placement table by name: usp, ulysses, ring, odysseus, replicated."""

    lr: float = 2e-5
    """Learning rate after the warm-up; constant from then on."""
    warmup: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    max_norm: float = 1.0
    """Gradients are scaled down to this global norm. 0 turns clipping off."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Computation and exported weights; weights and optimizer state stay float32 while training.
    auto: bfloat16 on a GPU, float32 on a CPU."""
    remat: Literal["auto", "none", "full", "attention"] = "auto"
    """What the backward computes again. auto: on a GPU the fastest that fits, together with stored, group,
    offload, mlp_tile and head_chunks (to set one of these, name another remat); on a CPU full. none:
    nothing. full: keep only each layer's input and compute the layer again. attention: keep the attention
    output too, and do not compute that again."""
    stored: int = 0
    """So many of the last layers keep everything; the others do as --remat full or attention says."""
    group: int = 1
    """Keep only the input of every group-th layer; the others are found by running the group once more."""
    offload: Literal["none", "host"] = "none"
    """host: what is kept for the backward waits in the host's memory."""
    moments: Literal["auto", "device", "host"] = "auto"
    """Where AdamW's two moments live. host: in the host's memory; each visits the GPU for its update. auto:
    on the GPU, unless remat=auto finds no room for them."""
    mlp_tile: int | None = None
    """Tokens that the MLP sees at a time. Default: all of them."""
    head_chunks: int = 1
    """Parts in which a rank's heads go through attention."""
    kernel: str = "auto"
    """Attention kernel: flash4, cudnn, flash, cpu, tiled, reference. auto: the first that takes the input."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Fuse the local parts of a layer; the first step then takes some seconds longer. auto: on a GPU."""

    seed: int = 0
    """Decides the order of the documents."""
    include: tuple[str, ...] = SUFFIXES
    """File suffixes read from folders."""
    log_every: int = 1
    """Steps between two lines of metrics. Larger values keep a GPU from waiting for the host."""

    save_every: int | None = None
    """Steps between two checkpoints of the whole training state in OUT/state, and one at the end. Default:
    none, but for the one that SIGTERM asks for (Ctrl-C does not)."""
    keep: int = 2
    """Checkpoints that are kept."""
    resume: bool = False
    """Go on from the newest checkpoint in --out that is whole, on any mesh that works on as many rows a step;
    start at step 0, with metrics.jsonl anew, when it has none. A restart by torchrun (--max-restarts) does
    this by itself."""
    on_nan: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite ends the run, or its step is left out; 20 of them in a row end
    it. skip makes the host wait for every step."""
    timeout: float = 600.0
    """Seconds that a rank waits for the others; twice as many for a whole step. Then the run ends."""


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Convert a checkpoint between the Hugging Face format and usp's own, exactly."""

    src: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """Hugging Face model directory, or a directory in usp's format (usp.json)."""
    dst: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
    """New or empty folder."""
    to: Literal["usp", "hf"]
    """Format to write."""
    dtype: Literal["keep", "float32", "bfloat16", "float16"] = "keep"
    """Type of the written tensors. keep: as they are."""
    max_shard_size: str = "5GB"
    """Largest file written, for example 500MB or 5GB. A single larger tensor gets a file of its own."""
