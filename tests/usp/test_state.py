"""Checkpoints of training state: to the bit, from any mesh to any other, each element written once."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.pool import Pool
from usp.mesh import P, build_mesh, local_slices
from usp.mesh.devices import AXES
from usp.state import Placed, Reader, Saver, open_last, steps_in
from usp.state.files import read_index

ONE = dict.fromkeys(AXES, 1)
Sizes = dict[str, int]
# name -> (global shape, placement, dtype): uneven cuts, empty parts, copies, several axes on one dimension
KINDS: dict[str, tuple[tuple[int, ...], P, torch.dtype]] = {
    "zero3": ((7, 5), P(AXES, None), torch.float32),
    "wide": ((2, 11), P("dp", ("ring", "ulysses")), torch.bfloat16),
    "few": ((3,), P(("ulysses", "dp", "ring")), torch.float64),
    "copied": ((4, 3), P(None, None), torch.float32),
    "half": ((5, 6), P(None, "ulysses"), torch.float32),
    "number": ((), P(), torch.int64),
}
MESHES: list[Sizes] = [
    {"dp": 2, "ring": 1, "ulysses": 2},
    {"dp": 1, "ring": 4, "ulysses": 1},
    {"dp": 1, "ring": 1, "ulysses": 4},
    {"dp": 4, "ring": 1, "ulysses": 1},
]


def whole(name: str) -> Tensor:
    shape, _, dtype = KINDS[name]
    coded = torch.arange(max(1, torch.Size(shape).numel())).reshape(shape)
    return (coded * 3 + len(name)).to(dtype)


def placed(mesh: Any) -> dict[str, Placed]:
    return {
        name: Placed(whole(name)[local_slices(spec, shape, mesh)].clone(), spec, shape)
        for name, (shape, spec, _) in KINDS.items()
    }


def assert_read(root: Path, step: int, mesh: Any, over: Any) -> None:
    last = open_last(root, over)
    assert last is not None
    assert last.found.step == step
    assert last.found.meta["rows"] == 3 * step
    with Reader(root, last.found) as reader:
        for name, want in placed(mesh).items():
            got = reader.shard(name, want.spec, want.shape, mesh)
            assert got.dtype == want.local.dtype
            assert torch.equal(got, want.local), name


def own_group() -> Any:
    return dist.new_group(backend="gloo")


def save_and_read(root: str, step: int, sizes: Sizes) -> list[str]:
    """On four ranks: read what another mesh wrote before, write over this one, read that."""
    mesh = build_mesh(**sizes, device_type="cpu")
    if step:
        assert_read(Path(root), step - 1, mesh, dist.group.WORLD)
    saver = Saver(Path(root), mesh=mesh, over=own_group())
    own = {f"random.{dist.get_rank()}": torch.full((3,), dist.get_rank(), dtype=torch.uint8)}
    saver.start(step, placed(mesh), own=own, meta={"rows": 3 * step})
    saver.wait()
    assert_read(Path(root), step, mesh, dist.group.WORLD)
    with Reader(Path(root), read_index(Path(root) / f"step-{step:08d}")) as reader:
        for rank in range(dist.get_world_size()):
            kept = reader.whole(f"random.{rank}")
            assert kept is not None
            assert kept.tolist() == [rank] * 3
        assert reader.whole("random.4") is None
    return [str(error) for error in [saver._error] if error]


def test_any_mesh_reads_what_any_other_wrote(ranks: Pool, tmp_path: Path) -> None:  # case D56, D57
    for step, sizes in enumerate(MESHES):
        assert ranks.run(save_and_read, str(tmp_path), step, sizes) == [[]] * 4
        index = read_index(tmp_path / f"step-{step:08d}")
        for name, (shape, _, _) in KINDS.items():
            assert_tiled([s.ranges for s in index.tensors[name].shards], shape)
    assert steps_in(tmp_path) == [3, 2]
    assert_read(tmp_path, 3, ONE, None)  # on one process
    saver = Saver(tmp_path, mesh=ONE, keep=3)
    saver.start(4, placed(ONE), meta={"rows": 12})
    saver.wait()
    assert steps_in(tmp_path) == [4, 3, 2]
    assert ranks.run(read_alone, str(tmp_path), 4, MESHES[0]) == [None] * 4


def read_alone(root: str, step: int, sizes: Sizes) -> None:
    assert_read(Path(root), step, build_mesh(**sizes, device_type="cpu"), dist.group.WORLD)


def assert_tiled(ranges: list[Any], shape: tuple[int, ...]) -> None:
    """Every element of the tensor is in one shard."""
    count = torch.zeros(shape)
    for each in ranges:
        count[tuple(slice(*r) for r in each)] += 1
    assert (count == 1).all()


def test_copies_take_turns(ranks: Pool, tmp_path: Path) -> None:
    """Of tensors that every rank holds, each rank writes about as many."""
    files = ranks.run(save_copies, str(tmp_path))[0]
    assert sorted(files) == sorted([f"rank-{i:05d}.safetensors" for i in range(4)] * 2)


def save_copies(root: str) -> list[str]:
    mesh = build_mesh(dp=2, ulysses=2)
    saver = Saver(Path(root), mesh=mesh, over=own_group())
    saver.start(1, {str(i): Placed(torch.ones(2), P(None), (2,)) for i in range(8)})
    saver.wait()
    index = read_index(Path(root) / "step-00000001")
    return [shard.file for entry in index.tensors.values() for shard in entry.shards]


def refused_on_ranks(root: str, blocked: int) -> str:
    """One rank cannot write: the same error on all, and the earlier checkpoint stays."""
    import usp.state.save as saving

    saver = Saver(Path(root), mesh=build_mesh(dp=4), over=own_group())
    saver.start(1, {"x": Placed(torch.ones(1), P("dp"), (4,))})
    saver.wait()
    real = saving.write_pieces

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    saving.write_pieces = full if dist.get_rank() == blocked else real
    try:
        saver.start(2, {"x": Placed(torch.ones(1), P("dp"), (4,))})
        saver.wait()
        return "saved"
    except OSError as error:
        return str(error)
    finally:
        saving.write_pieces = real


def test_a_rank_that_cannot_write_is_named_to_all(ranks: Pool, tmp_path: Path) -> None:
    said = ranks.run(refused_on_ranks, str(tmp_path), 2)
    assert len(set(said)) == 1
    assert said[0].startswith("rank 2: step=2 must be saved to")
    assert "No space left on device" in said[0]
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_steps_are_found_newest_first(tmp_path: Path) -> None:
    saver = Saver(tmp_path, mesh=ONE, keep=9)
    for step in (9, 100_000_000, 10):
        saver.start(step, {})
        saver.wait()
    (tmp_path / "step-00000011").mkdir()  # without its marker
    (tmp_path / "step-x").mkdir()
    assert steps_in(tmp_path) == [100_000_000, 10, 9]
    assert all(a > b for a, b in pairwise(steps_in(tmp_path)))
    assert steps_in(tmp_path / "none") == []
    assert open_last(tmp_path / "none", None) is None


def test_shards_and_counts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        Saver(tmp_path, mesh=ONE, keep=0)
    saver = Saver(tmp_path, mesh=ONE)
    with pytest.raises(ValueError, match=r"x=\(2,\) must be this rank's shard of \(3,\)"):
        saver.start(1, {"x": Placed(torch.ones(2), P(None), (3,))})
    saver.start(1, {"x": Placed(torch.ones(3), P(None), (3,))})
    saver.wait()
    last = open_last(tmp_path, None)
    assert last is not None
    with Reader(tmp_path, last.found) as reader:
        with pytest.raises(ValueError, match=r"x=\(4,\) must be in .* step 1, got shape \(3,\)"):
            reader.shard("x", P(None), (4,), ONE)
        with pytest.raises(ValueError, match="got no such tensor"):
            reader.shard("y", P(None), (3,), ONE)
