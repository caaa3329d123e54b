"""Checkpoints that are damaged, late or cannot be written; one process."""

import hashlib
import json
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import usp.state.files as files
import usp.state.save as saving
from usp.mesh import P
from usp.mesh.devices import AXES
from usp.state import Placed, Reader, Saver, folder_of, open_last, set_aside, steps_in

ONE = dict.fromkeys(AXES, 1)


def tensors(value: float) -> dict[str, Placed]:
    return {
        "a": Placed(torch.full((4, 3), value), P(None, None), (4, 3)),
        "b": Placed(torch.full((5,), value, dtype=torch.bfloat16), P(None), (5,)),
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 and 2."""
    saver = Saver(tmp_path, mesh=ONE)
    for step in (1, 2):
        saver.start(step, tensors(step))
        saver.wait()
    return tmp_path


def read(root: Path, step: int) -> float:
    last = open_last(root, None)
    assert last is not None
    assert last.found.step == step
    with Reader(root, last.found) as reader:
        value = reader.shard("a", P(None, None), (4, 3), ONE)
    assert (value == value[0, 0]).all()
    return float(value[0, 0])


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def reindexed(folder: Path, change: Callable[[Any], None]) -> None:
    """Another index, with the marker that fits it: not damage but malice."""
    index = json.loads((folder / "index.json").read_text())
    change(index)
    text = json.dumps(index).encode()
    (folder / "index.json").write_bytes(text)
    (folder / "complete").write_text(hashlib.sha256(text).hexdigest())


def outside(index: Any) -> None:
    index["tensors"]["a"]["shards"][0]["file"] = "../../rank-00000.safetensors"


def wider(index: Any) -> None:
    index["tensors"]["a"]["shards"][0]["ranges"] = [[0, 9], [0, 3]]


def another_dtype(index: Any) -> None:
    index["tensors"]["a"]["dtype"] = "load"


def later_format(index: Any) -> None:
    index["format"] = 99


FILE = "rank-00000.safetensors"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a value": (lambda p: flip(p / FILE, -1), "is not what was written"),
    "the header": (lambda p: flip(p / FILE, 9), "cannot be read"),
    "cut off": (lambda p: (p / FILE).write_bytes((p / FILE).read_bytes()[:-5]), "cannot be read"),
    "gone": (lambda p: (p / FILE).unlink(), "cannot be read"),
    "the index": (lambda p: flip(p / "index.json", 20), "index.json is not the one that was written"),
    "no index": (lambda p: (p / "index.json").unlink(), "it cannot be read"),
    "the marker": (lambda p: flip(p / "complete", 3), "index.json is not the one that was written"),
    "a path": (lambda p: reindexed(p, outside), "index.json names '../../rank-00000"),
    "a range": (lambda p: reindexed(p, wider), "index.json names"),
    "a dtype": (lambda p: reindexed(p, another_dtype), "unknown dtype 'load'"),
    "the format": (lambda p: reindexed(p, later_format), "its format is 99"),
    "no tensors": (lambda p: reindexed(p, lambda i: i.pop("tensors")), "is not as it should be"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_the_one_before_taken(root: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    damage(folder_of(root, 2))
    last = open_last(root, None)
    assert last is not None
    assert list(last.damaged) == [2]
    assert message in last.damaged[2]
    assert read(root, 1) == 1.0
    assert set_aside(root, 2).is_dir()
    assert steps_in(root) == [1]


def test_nothing_whole_is_an_error_that_names_all(root: Path) -> None:
    for step in (1, 2):
        (folder_of(root, step) / FILE).unlink()
    with pytest.raises(ValueError, match=r"must hold a checkpoint that is whole, got step 2: .*; step 1: "):
        open_last(root, None)


def test_without_its_marker_a_folder_is_no_checkpoint(root: Path) -> None:
    (folder_of(root, 2) / "complete").unlink()
    assert read(root, 1) == 1.0


def test_no_pickle_is_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, name, never)
    assert read(root, 2) == 2.0


def test_the_caller_goes_on_while_a_thread_writes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`start` copies and returns; later changes of the tensors are not in what is saved."""
    writing, go_on = threading.Event(), threading.Event()
    real = saving.write_pieces

    def slow(*args: Any) -> Any:
        writing.set()
        assert go_on.wait(30)
        return real(*args)

    monkeypatch.setattr(saving, "write_pieces", slow)
    saver, values = Saver(root, mesh=ONE), tensors(3.0)
    saver.start(3, values)
    assert writing.wait(30)
    saver.check()  # still under way: nothing to say
    assert steps_in(root) == [2, 1]
    for placed in values.values():
        placed.local.fill_(-1.0)
    go_on.set()
    saver.wait()
    assert saver.last == 3
    assert steps_in(root) == [3, 2]
    assert read(root, 3) == 3.0


@pytest.mark.parametrize("where", ["save_file", "write_index"])
def test_a_disk_that_is_full_keeps_the_earlier_ones(
    root: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files if where == "save_file" else saving, where, full)
    saver = Saver(root, mesh=ONE)
    saver.start(3, tensors(3.0))
    with pytest.raises(OSError, match=r"step=3 must be saved to .*No space left.*Earlier"):
        saver.wait()
    assert saver.last is None
    assert sorted(p.name for p in root.iterdir()) == ["step-00000001", "step-00000002"]
    monkeypatch.undo()
    saver.start(3, tensors(3.0))  # there is room again
    saver.wait()
    assert read(root, 3) == 3.0


def test_what_a_killed_process_left_is_swept_up(root: Path) -> None:
    for name in (".step-00000003.tmp", ".step-00000002.old"):
        (root / name).mkdir()
        (root / name / FILE).write_bytes(b"half")
    saver = Saver(root, mesh=ONE)
    saver.start(3, tensors(3.0))
    saver.wait()
    assert sorted(p.name for p in root.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_step_that_is_there_already_is_replaced(root: Path) -> None:
    saver = Saver(root, mesh=ONE)
    saver.start(2, tensors(7.0))
    saver.wait()
    assert read(root, 2) == 7.0
    assert steps_in(root) == [2, 1]
