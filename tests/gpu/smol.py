"""SmolLM2-135M's shape with random weights and a small vocabulary, text to train on, and the launcher."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.tools.conftest import environment, make_tokenizer


def smol_shape(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def write_text(folder: Path) -> Path:
    """The standard library's own longest source files."""
    folder.mkdir()
    library = Path(subprocess.__file__).parent
    for file in sorted(library.glob("*.py"), key=lambda f: f.stat().st_size)[-20:]:
        (folder / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def launch(ranks: int, model: Path, data: Path, out: Path, *, seq_len: int, steps: int, dtype: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "usp.tools.train", "--model", str(model), "--data", str(data), "--out", str(out)]
    command += ["--seq-len", str(seq_len), "--ulysses", str(ranks), "--steps", str(steps), "--dtype", dtype]
    command += [
        "--remat",
        "full",
        "--lr",
        "1e-4",
    ]  # where training is stable: at 1e-3 the loss jumps and any rounding grows
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
