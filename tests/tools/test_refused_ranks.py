"""What is refused on two ranks: one message each, by name, before the first step, and nobody waits."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.tools.test_errors import FORM, refused, words
from usp.host import Room
from usp.tools.options import check_host, host_share

Run = Callable[..., CompletedProcess[str]]

MANY = '''
"""python -m many FILE: training with one command line after the other in one group of processes."""
import json, os, sys
from usp.host import Room
from usp.tools import options, train
from usp.tools.ranks import start
from usp.tools.stop import Stop

ranks = start(30.0)
for name, line, free in json.load(open(sys.argv[1])):
    if free:  # bytes that are left in the memory that each rank names
        options.rooms = lambda: [Room(*free[min(ranks.rank, len(free) - 1)])]
    cfg, refused = train.read_options("many", line)
    try:
        code = train.train(cfg, ranks, Stop())
    except SystemExit as e:
        code = e.code
    if ranks.first:
        print("end of", name, code, file=sys.stderr, flush=True)
ranks.leave(0)
'''
NUMBERS = {
    "lr": ("inf", "nan", "-0.1"), "weight-decay": ("nan", "inf"), "max-norm": ("nan", "inf"),
    "warmup": ("-1",), "save-every": ("0",), "log-every": ("0",), "timeout": ("inf", "nan", "0", "-1", "1e8"),
    "seed": ("-1", str(2**63)), "keep": ("0",),
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "kernel='cudnn' must take device cpu, torch.float32": {"kernel": "cudnn"},
    "world_size=2 must equal dp * ring * ulysses, got 1 * 1 * 4 = 4.": {"ulysses": 4},
    "out=full must be new or an empty folder": {"out": "full"},
}
OFFLOAD = {"remat": "full", "offload": "host", "ulysses": 2, "seq_len": 512}
# 2 layers, the input of one kept: 256 tokens of 24 float32 on each rank
EACH = 256 * 24 * 4
HOST: dict[str, tuple[list[tuple[str, int]], bool]] = {
    "together too much": ([("machine", int(2 * EACH / 0.9) - 99)], False),
    "together enough": ([("machine", int(2 * EACH / 0.9) + 99)], True),
    "each enough": ([("one", int(EACH / 0.9) + 99), ("two", int(EACH / 0.9) + 99)], True),
    "the second too little": ([("one", 10**9), ("two", EACH)], False),
}


def test_numbers_and_memory(run: Run, model_dir: Path, corpus: Path, tmp_path: Path) -> None:
    cases: list[tuple[str, list[str], Any]] = []
    for name, values in NUMBERS.items():
        for value in values:
            line = [*words(model_dir, corpus, tmp_path / "out", ulysses=2), f"--{name}={value}"]
            cases.append((f"{name}={value}", line, None))
    (tmp_path / "full" / "file").mkdir(parents=True)
    for name, changed in OTHERS.items():
        line = words(model_dir, corpus, **{"out": tmp_path / "out", "ulysses": 2, **changed})
        cases.append((name, line, None))
    for index, (name, (free, _)) in enumerate(HOST.items()):
        cases.append((name, words(model_dir, corpus, tmp_path / f"out{index}", **OFFLOAD), free))
    (tmp_path / "many.py").write_text(MANY)
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    began = time.monotonic()
    result = run("many", "cases.json", ranks=2)
    assert time.monotonic() - began < 100
    assert result.returncode == 0, result.stderr
    said, rest = {}, result.stderr
    for name, _, _ in cases:
        said[name], _, rest = rest.partition(f"end of {name} ")
        code, _, rest = rest.partition("\n")
        good = HOST.get(name, (None, False))[1]
        assert code == ("0" if good else "1"), (name, said[name])
        if not good:
            assert said[name].count("error") == 1, (name, said[name])
            assert FORM.search(said[name]), (name, said[name])
    for name, values in NUMBERS.items():
        for value in values:
            at = float(value) if name in ("lr", "weight-decay", "max-norm", "timeout") else int(value)
            assert f"error: {name.replace('-', '_')}={at} must be" in said[f"{name}={value}"]
    for name in OTHERS:
        assert f"error: {name}" in said[name]
    for name in ("together too much", "the second too little"):
        assert "error: offload=host must fit nine tenths of the host memory that is left, got" in said[name]
    assert "for ranks 0 to 1, which share it" in said["together too much"]
    assert "for ranks 1 to 1, which share it" in said["the second too little"]
    assert [(tmp_path / f"out{index}").exists() for index in range(4)] == [good for _, good in HOST.values()]


def test_a_time_limit_that_no_timer_takes(run: Run, model_dir: Path, corpus: Path, tmp_path: Path) -> None:
    """Also before there is a group of processes whose limit it would be."""
    for module, timeout in (("usp.tools.train", "inf"), ("usp.tools.eval", "nan")):
        line = words(model_dir, corpus, tmp_path / "out", ulysses=2, timeout=timeout)
        if module.endswith("eval"):
            line = [word for i, word in enumerate(line) if "--steps" not in (word, line[i - 1])]
        result = run(module, *line, ranks=2)
        assert result.returncode == 1
        refused(result, f"timeout={timeout} must be a number of seconds from 1")


def test_memory_that_ranks_share() -> None:
    """Two machines of 100 with two ranks each, one rank in a group of 30."""
    one, two = Room("one", 100), Room("two", 100)
    shared = [[one], [one, Room("group", 30)], [two], [two]]
    check_host(shared, [45, 27, 45, 45])
    for need, message in (
        ([70, 21, 45, 45], "for ranks 0 to 1"),
        ([45, 28, 45, 45], "for ranks 1 to 1"),
        ([45, 27, 0, 91], "for ranks 2 to 3"),
    ):
        with pytest.raises(ValueError, match=message):
            check_host(shared, need)
    assert host_share(shared) == 27
    assert host_share([]) == 0
    check_host([[], []], [1, 1])  # where nothing is known
