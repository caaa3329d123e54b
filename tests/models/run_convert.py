"""What one rank does in the conversion tests. Spawned ranks import this: keep Transformers out of it."""

from pathlib import Path
from typing import Any

import torch

from usp.mesh import TABLES, build_mesh, local_slices
from usp.models import from_hf, init, load, named_leaves, param_specs, save, to_hf, writer
from usp.models.reader import Checkpoint

TABLE = TABLES["ulysses"]


def there_and_back(rank: int, world: int, source: Path, out: Path) -> int:
    mesh = build_mesh(dp=1, ulysses=world)
    read: list[int] = []
    plain = Checkpoint.read

    def counted(self: Checkpoint, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        part = plain(self, name, slices)
        read.append(part.nbytes)
        return part

    Checkpoint.read = counted  # type: ignore[method-assign]
    cfg, params = from_hf(source, table=TABLE, mesh=mesh)
    Checkpoint.read = plain  # type: ignore[method-assign]
    full = dict(named_leaves(from_hf(source)[1]))
    specs = dict(named_leaves(param_specs(cfg, TABLE)))
    for name, value in named_leaves(params):
        assert torch.equal(value, full[name][local_slices(specs[name], full[name].shape, mesh)]), name
    drawn = init(cfg, seed=5, table=TABLE, mesh=mesh)
    for name, value in named_leaves(init(cfg, seed=5)):
        mine = dict(named_leaves(drawn))[name]
        assert torch.equal(mine, value[local_slices(specs[name], value.shape, mesh)]), name
    to_hf(params, cfg, out / "hf", source=source, table=TABLE, mesh=mesh, max_shard_size="20KB")
    save(params, cfg, out / "own", table=TABLE, mesh=mesh)
    return sum(read)


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
    if rank == 0:

        def full_disk(*args: Any, **kwargs: Any) -> None:
            raise OSError("No space left on device")

        writer.save_file = full_disk
    attempt(to_hf, params, cfg, out / "b")
    attempt(load, out / "nothing" if rank == 1 else out / "nothing2")
    return messages


def reload(rank: int, world: int, own: Path, out: Path) -> None:
    mesh = build_mesh(dp=2, ulysses=2)
    cfg, params = load(own, table=TABLE, mesh=mesh)
    to_hf(params, cfg, out, table=TABLE, mesh=mesh)
