"""What tells one model directory from another, at a bounded cost."""

from itertools import pairwise
from pathlib import Path

import pytest

from usp.tools import facts

MIB = 2**20


def digest(folder: Path) -> str:
    return facts._digest(folder)


def flip(file: Path, at: int, length: int = 1) -> None:
    data = bytearray(file.read_bytes())
    data[at : at + length] = bytes(byte ^ 1 for byte in data[at : at + length])
    file.write_bytes(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(3 * MIB))
    return tmp_path


def test_any_byte_of_a_file_that_is_not_large(folder: Path) -> None:
    seen = {digest(folder)}
    for at in (0, 70_000, 3 * MIB // 2 + 1, 3 * MIB - 1):
        flip(folder / "model.safetensors", at)
        seen.add(digest(folder))
    (folder / "config.json").write_text('{"a": 1}')
    seen.add(digest(folder))
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    seen.add(digest(folder))
    assert len(seen) == 7
    (folder / "README.md").write_text("not a part of the model")
    assert digest(folder) in seen


def test_a_large_file_in_blocks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stretch as long as the distance of two blocks is seen; what is read does not grow with size."""
    monkeypatch.setattr(facts, "WHOLE", MIB)
    monkeypatch.setattr(facts, "PART", 2**12)
    monkeypatch.setattr(facts, "BLOCK", 2**8)
    monkeypatch.setattr(facts, "BLOCKS", 64)
    size = 3 * MIB
    read = sum(length for _, length in facts._blocks(size))
    assert read == 2 * facts.PART + facts.BLOCKS * facts.BLOCK
    assert all(start >= 0 and start + length <= size for start, length in facts._blocks(size))
    before = digest(folder)
    for at in (0, size // 3, size // 2, size - 2 * size // 64):
        flip(folder / "model.safetensors", at, size // 64)
        after = digest(folder)
        assert after != before, at
        before = after
    middle = next(start for start, _ in facts._blocks(size) if start > size // 2)
    flip(folder / "model.safetensors", middle + 2**8 + 1)  # between two blocks
    assert digest(folder) == before


def test_the_bound() -> None:
    """34 MiB of 5 GB, as its docstring has it: no matrix of a large model lies between two blocks."""
    blocks = list(facts._blocks(5 * 10**9))
    assert sum(length for _, length in blocks) == 34 * MIB
    gaps = [later[0] - sum(earlier) for earlier, later in pairwise(blocks)]
    assert max(gaps) < 2.5e6
