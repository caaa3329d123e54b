"""Conversion on several ranks: each reads its part, rank 0 writes, a failure is everybody's."""

from pathlib import Path

import pytest
import torch

from tests.models.files import assert_same_bytes, tensors_of
from tests.models.run_convert import refused, reload, there_and_back
from tests.models.tiny import hf_model, save_hf
from tests.ranks import run_ranks
from usp.models import from_hf, load, named_leaves, save


@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_reads_its_part_and_rank_0_writes(world: int, tmp_path: Path) -> None:
    source = save_hf(hf_model("gqa 9/3 tied").to(torch.bfloat16), tmp_path / "hf", max_shard_size="30KB")
    want = tensors_of(source)
    read = run_ranks(there_and_back, world, source, tmp_path / "out", timeout=400)
    assert sum(read) == sum(t.nbytes for t in want.values())  # every byte on one rank
    assert max(read) < sum(read) / world * 1.2
    assert_same_bytes(tensors_of(tmp_path / "out" / "hf"), want)
    assert_same_bytes(
        dict(named_leaves(load(tmp_path / "out" / "own")[1])), dict(named_leaves(from_hf(source)[1]))
    )
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_a_failure_is_raised_on_every_rank(tmp_path: Path) -> None:
    source = save_hf(hf_model(), tmp_path / "hf")
    out = tmp_path / "out"
    out.mkdir()
    for messages in run_ranks(refused, 2, source, out, timeout=400):
        assert [m.split(":")[0] for m in messages] == ["ValueError", "ValueError", "OSError", "ValueError"]
        assert "must not exist or be an empty directory" in messages[0]
        assert "norm has shape" in messages[1]
        assert "No space left" in messages[2]
    assert list(out.iterdir()) == []


def test_another_mesh_reads_it(tmp_path: Path) -> None:
    source = save_hf(hf_model("biases"), tmp_path / "hf")
    cfg, params = from_hf(source)
    save(params, cfg, tmp_path / "own")
    run_ranks(reload, 4, tmp_path / "own", tmp_path / "out", timeout=400)
    assert_same_bytes(tensors_of(tmp_path / "out"), tensors_of(source))
