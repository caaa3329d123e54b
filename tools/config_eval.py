"""What a user can set for `usp eval`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from usp.tools.config import SUFFIXES
from usp.tools.lengths import Tokens


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Loss and perplexity of a Llama-family checkpoint on long text, with the sequence cut over processes.

    On 2 GPUs: torchrun --nproc-per-node 2 -m usp.tools.eval --ulysses 2 ...; the process count must equal
    dp * ring * ulysses.
    """

    model: Path
    """Hugging Face model directory: config.json, *.safetensors and the tokenizer."""
    data: tuple[Path, ...]
    """UTF-8 text: files (read whatever their suffix) and folders (read recursively, see --include)."""
    seq_len: Tokens
    """Tokens in one row, over all ranks: 131072, 128K or 2M. Documents lie end to end; one that crosses the
    end of a row is cut there, and its pieces do not see each other."""
    batch_size: int | None = None
    """Rows worked on at once over all ranks; any number. Default: dp."""
    out: Path | None = None
    """New file for the result as JSON."""

    ulysses: int = 1
    """Ranks that cut one sequence and exchange it for attention heads by all-to-all."""
    ring: int = 1
    """Ranks that cut one sequence and pass keys and values around."""
    dp: int = 1
    """Ranks, or groups of ranks, that work on different rows."""
    table: str = "usp"
    """Placement table by name: usp, ulysses, ring, odysseus, replicated."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Computation. auto: bfloat16 on a GPU, float32 on a CPU."""
    mlp_tile: int | None = None
    """Tokens that the MLP sees at a time. Default: all of them."""
    head_chunks: int = 1
    """Parts in which a rank's heads go through attention."""
    include: tuple[str, ...] = SUFFIXES
    """File suffixes read from folders."""
    timeout: float = 600.0
    """Seconds that a rank waits for the others."""
