"""The examples run, and do what they say."""

import os
import subprocess
import sys


def test_tp_sp_equals_one_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "usp.tools.examples.tp_sp"],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    first, *rows, last = done.stdout.strip().splitlines()
    assert first.split() == ["ulysses", "tp_sp"]
    assert any(row.startswith("attn_x") for row in rows)
    assert not any(row.startswith("tokens") for row in rows)  # alike in both
    assert last.startswith("loss on 2 ranks")
