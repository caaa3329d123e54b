"""What one rank does in the conversion tests. Spawned ranks import this: keep Transformers out of it."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.models.batches import tokens_of
from usp import Batch, shard_batch, unshard_batch
from usp.mesh import TABLES, build_mesh, local_slices
from usp.mesh.agree import agree, gather_objects, place
from usp.models import from_hf, init, load, logits, named_leaves, param_specs, save, to_hf
from usp.models.files import writer
from usp.models.files.stream import convert_checkpoint

TABLE = TABLES["ulysses"]
LENGTHS = ("dynamic rope", "longrope", "qwen2, upper layers")


def bytes_read() -> int:
    """By this process since it started, whatever the means: what the kernel counts."""
    return int(Path("/proc/self/io").read_text().split()[1])


def two(rank: int, world: int, folder: Path, out: Path) -> dict[str, Any]:
    """Every test of two ranks, so that starting them is paid once."""
    return {
        "read": there_and_back(world, folder / "hf", out),
        "twice": read_twice_stored(world, folder / "twice"),
        "refused": refused(rank, world, folder / "hf", out),
        "shared": shared(rank, folder, out),
        "agree": agreed(rank),
        "logits": {name: logits_of(folder / name, build_mesh(ulysses=world)) for name in LENGTHS},
    }


def four(rank: int, world: int, folder: Path, out: Path) -> dict[str, Any]:
    mesh = build_mesh(dp=2, ulysses=2)
    cfg, params = load(folder / "own", table=TABLE, mesh=mesh)
    to_hf(params, cfg, out / "reloaded", table=TABLE, mesh=mesh)
    return {"read": there_and_back(world, folder / "hf", out), "agree": agreed_in_part(rank)}


def logits_of(path: Path, mesh: Any) -> torch.Tensor:
    """[2, 77, V] float64: beyond the original length, and cut into unequal parts."""
    cfg, params = from_hf(path, table=TABLE, mesh=mesh, dtype=torch.float64)
    shard = shard_batch(Batch(tokens=tokens_of(2, 77)), table=TABLE, mesh=mesh)
    with torch.no_grad():
        out = logits(params, shard, cfg, table=TABLE, mesh=mesh)
        return unshard_batch(out, shard, table=TABLE, mesh=mesh)


def there_and_back(world: int, source: Path, out: Path) -> int:
    mesh = build_mesh(dp=1, ulysses=world)
    before = bytes_read()
    cfg, params = from_hf(source, table=TABLE, mesh=mesh)
    read = bytes_read() - before
    full = dict(named_leaves(from_hf(source)[1]))
    specs = dict(named_leaves(param_specs(cfg, TABLE)))
    for name, value in named_leaves(params):
        assert torch.equal(value, full[name][local_slices(specs[name], full[name].shape, mesh)]), name
    drawn = init(cfg, seed=5, table=TABLE, mesh=mesh)
    for name, value in named_leaves(init(cfg, seed=5)):
        mine = dict(named_leaves(drawn))[name]
        assert torch.equal(mine, value[local_slices(specs[name], value.shape, mesh)]), name
    to_hf(params, cfg, out / "hf", source=source, table=TABLE, mesh=mesh, max_shard_size="200KB")
    save(params, cfg, out / "own", table=TABLE, mesh=mesh)
    return read


def read_twice_stored(world: int, source: Path) -> int:
    mesh = build_mesh(dp=1, ulysses=world)
    before = bytes_read()
    cfg, _ = from_hf(source, table=TABLE, mesh=mesh)
    assert cfg.tie_embeddings
    return bytes_read() - before


def refused(rank: int, world: int, source: Path, out: Path) -> list[str]:
    mesh = build_mesh(dp=world)
    cfg, params = from_hf(source, table=TABLE, mesh=mesh)
    messages = []

    def attempt(fn: Any, *args: Any, **kwargs: Any) -> None:
        try:
            fn(*args, table=TABLE, mesh=mesh, **kwargs)
        except (ValueError, OSError) as error:
            messages.append(f"{type(error).__name__}: {error}")

    attempt(to_hf, params, cfg, source)  # the target holds something: only rank 0 looks
    wrong = params._replace(norm=params.norm[:-1]) if rank == 1 else params
    attempt(to_hf, wrong, cfg, out / "a")  # one rank alone is wrong
    plain = writer.write_all
    if rank == 0:

        def full_disk(file: Any, data: memoryview) -> None:
            if file.tell() > 100_000:
                raise OSError("No space left on device")
            plain(file, data)

        writer.write_all = full_disk
    attempt(to_hf, params, cfg, out / "b")
    writer.write_all = plain
    attempt(load, out / "nothing" if rank == 1 else out / "nothing2")
    attempt(from_hf, source if rank == 0 else source.parent / "twice")  # not the same on every rank
    return messages


def shared(rank: int, folder: Path, out: Path) -> int:
    before = bytes_read()
    convert_checkpoint(folder / "hf", out / "shared", to="usp", max_shard_size="200KB", over=dist.group.WORLD)
    return bytes_read() - before


def agreed(rank: int) -> list[str]:
    """What every rank hears of what fails on some."""

    def fails(on: dict[int, Exception]) -> str:
        def fn() -> str:
            if rank in on:
                raise on[rank]
            return "fine"

        try:
            return agree(fn, dist.group.WORLD)
        except Exception as error:
            own = " (cause known)" if error.__cause__ else ""
            return f"{type(error).__name__}: {error}{own}"

    return [
        fails({}),
        fails({1: ValueError("one")}),
        fails({0: OSError("disk"), 1: OSError("full")}),
        fails({0: ValueError("same"), 1: ValueError("same")}),
        fails({0: KeyError("bug")}),
        fails({0: ValueError("a"), 1: OSError("b")}),
        agree(lambda: "alone", None),
    ]


def agreed_in_part(rank: int) -> tuple[Any, ...]:
    """Over a mesh of all ranks, one axis of it, and a mesh of two axes that has no group of its own."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    pair = mesh["c"]
    try:
        said = agree(lambda: 1 // (rank % 2), pair)
    except RuntimeError as error:
        said = str(error)
    return place(mesh), gather_objects(rank, mesh), place(pair), gather_objects(rank, pair), said
