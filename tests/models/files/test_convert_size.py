"""Memory of a conversion does not grow with the checkpoint, and a killed one leaves nothing that counts."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.models.files.bytes_of import assert_same_bytes, tensors_of
from usp.models import LlamaConfig, abstract, from_hf, init, load, named_leaves, to_hf
from usp.models.files.hf_files import write_json
from usp.models.files.hf_names import hf_name
from usp.models.files.safefile import make_header
from usp.models.files.source import open_own
from usp.models.files.stream import convert_checkpoint

ROOT = Path(__file__).resolve().parents[3]
MB = 2**20
MEASURE = """
import sys
from pathlib import Path
import torch
from usp.models.files.stream import convert_checkpoint

def kilobytes(key):
    return int(Path("/proc/self/status").read_text().split(key)[1].split()[0])

torch.zeros(1).isfinite().all()  # what the first call of anything needs is no memory of the conversion
before = kilobytes("VmRSS:")
dtype = getattr(torch, sys.argv[4]) if len(sys.argv) > 4 else None
convert_checkpoint(sys.argv[1], sys.argv[2], to=sys.argv[3], dtype=dtype)
print((kilobytes("VmHWM:") - before) * 1024)
"""
SLOW = """
import os, sys, time
import usp.models.files.writer as writer
from usp.models.files.reader import Checkpoint
from usp.models.files.stream import convert_checkpoint

def pause(what):
    print(what, flush=True)
    time.sleep(600)

point = sys.argv[3]
read = Checkpoint.read

def slow(self, name, slices):
    if name == point:
        pause(name)
    return read(self, name, slices)

Checkpoint.read = slow
if point == "rename":
    os.rename = lambda *args: pause("rename")
convert_checkpoint(sys.argv[1], sys.argv[2], to="hf", max_shard_size="2KB")
"""


def python(code: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def sparse(path: Path, num_layers: int) -> tuple[int, int]:
    """A float32 checkpoint of zeros that takes no disk; (bytes of all tensors, bytes of the largest)."""
    cfg = LlamaConfig(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1408,
        num_layers=num_layers,
        num_heads=8,
        tie_embeddings=True,
    )
    shapes = {hf_name(name): leaf.shape for name, leaf in named_leaves(abstract(cfg))}
    header, _ = make_header([(name, torch.float32, shape) for name, shape in shapes.items()])
    sizes = [torch.Size(shape).numel() * 4 for shape in shapes.values()]
    path.mkdir()
    with (path / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(sizes))
    write_json(path / "config.json", cfg.to_hf_dict())
    return sum(sizes), max(sizes)


def test_memory_is_that_of_the_largest_tensor(tmp_path: Path) -> None:
    """Small, and large to another dtype: all tensors in one file, which is the harder case."""
    (_, largest), (total, _) = sparse(tmp_path / "1", 1), sparse(tmp_path / "24", 24)
    assert total > 5 * largest
    growth = []
    for layers, to, dtype in ((1, "usp", []), (24, "hf", ["bfloat16"])):
        child = python(MEASURE, tmp_path / f"{layers}", tmp_path / f"{to}-{layers}", to, *dtype)
        growth.append(int(child.communicate(timeout=120)[0]))
        assert child.returncode == 0
    # pieces of 4 MB and what is made of one (cast, looked through: 10 MB), what the allocator keeps, and what
    # torch loads on the way
    assert max(growth) < largest + 32 * MB, [g / MB for g in growth]
    # 24 times the layers, and a cast: the same memory but for freed pieces that the allocator keeps
    assert growth[1] - growth[0] < 20 * MB


@pytest.mark.parametrize("point", ["layers.1.wq", "rename"])
def test_a_killed_conversion_leaves_nothing_that_looks_complete(point: str, tmp_path: Path) -> None:
    cfg = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=2)
    params = init(cfg, seed=0)
    source, out = tmp_path / "own", tmp_path / "folder" / "out"
    to_hf(params, cfg, tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", source, to="usp")
    child = python(SLOW, source, out, point)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == point
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL

    assert not out.exists()
    (left,) = out.parent.iterdir()
    assert left.name.startswith(".out.")
    assert left.name.endswith(".tmp")
    with pytest.raises(ValueError, match=r"config\.json"):
        from_hf(left)
    if point != "rename":
        assert list((left / "new").glob("*.safetensors"))  # it was in the middle of it
        with pytest.raises(ValueError, match=r"config\.json"):
            from_hf(left / "new")
    convert_checkpoint(source, out, to="hf", max_shard_size="2KB")
    assert_same_bytes(tensors_of(out), tensors_of(tmp_path / "hf"))
    assert (out.stat().st_mode & 0o777) == (out.parent.stat().st_mode & 0o777)


def test_the_command_on_two_processes(tmp_path: Path) -> None:
    """One bar, one message, every file once; a refusal is said once and ends all."""
    cfg = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=2)
    to_hf(init(cfg, seed=0), cfg, tmp_path / "hf")

    def convert() -> subprocess.CompletedProcess[str]:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        words = ["-m", "usp.tools.cli", "convert", tmp_path / "hf", tmp_path / "out", "--to", "usp"]
        return subprocess.run(
            [*launch, *map(str, words), "--max-shard-size", "1KB"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    done = convert()
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"wrote {tmp_path / 'out'} (usp format)") == 1
    assert done.stderr.count("write: 100%") == 1
    written = dict(named_leaves(load(tmp_path / "out")[1]))
    assert_same_bytes(written, dict(named_leaves(init(cfg, seed=0))))
    again = convert()
    assert again.returncode != 0
    assert len(re.findall("^error.* must be new or an empty folder", again.stderr, re.MULTILINE)) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "out"}


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """Not a bus error, which a mapped file would give."""
    cfg = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=12, num_layers=1, num_heads=2)
    to_hf(init(cfg, seed=0), cfg, tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "own", to="usp")
    found = open_own(tmp_path / "own", None)
    file = tmp_path / "own" / "params.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    last = max(found.checkpoint.tensors, key=lambda name: found.checkpoint.tensors[name].start)
    with pytest.raises(OSError, match=r"ended .* bytes early: it changed"):
        found.checkpoint.read_whole(last)
    with pytest.raises(ValueError, match="is truncated or damaged: its tensors end at byte"):
        load(tmp_path / "own")
