"""The state of a training run: its tensors by name, and back from a checkpoint of any mesh."""

import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor

from usp import AdamWState, adamw_init, models
from usp.arena import Arena
from usp.mesh import axis_sizes
from usp.models.params import abstract, map_params, named_leaves, param_specs
from usp.state import Placed, Reader, Saver, folder_of, open_last, set_aside
from usp.tools.ranks import Ranks
from usp.tools.setup import Mesh, Setup


class State(NamedTuple):
    """`step`: steps done, and with them the rows of the data; `updates`: those of the optimizer."""

    params: models.Params
    optimizer: AdamWState
    step: int = 0
    updates: int = 0


def tensors(setup: Setup, state: State) -> dict[str, Placed]:
    """Parameters and moments by name: "params.layers.0.wq", "exp_avg.embed", ..."""
    shapes = {name: leaf.shape for name, leaf in named_leaves(abstract(setup.model))}
    specs = dict(named_leaves(param_specs(setup.model, setup.table)))
    trees = {
        "params": state.params,
        "exp_avg": state.optimizer.exp_avg,
        "exp_avg_sq": state.optimizer.exp_avg_sq,
    }
    return {
        f"{kind}.{name}": Placed(value, specs[name], shapes[name])
        for kind, tree in trees.items()
        for name, value in named_leaves(tree)
    }


def random_state(ranks: Ranks) -> dict[str, Tensor]:
    """Of this rank's generators."""
    found = {f"random.{ranks.rank}.cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        found[f"random.{ranks.rank}.cuda"] = torch.cuda.get_rng_state(ranks.device)
    return found


def save(saver: Saver, setup: Setup, state: State, mesh: Mesh, ranks: Ranks) -> None:
    """Begin to write a checkpoint. `rows` is the position in the data; the next row is the one after."""
    meta = {"updates": state.updates, "rows": state.step * setup.num_rows, "mesh": axis_sizes(mesh)}
    saver.start(state.step, tensors(setup, state), own=random_state(ranks), meta=meta)


def restore(root: Path, setup: Setup, mesh: Mesh, ranks: Ranks, home: Arena | None) -> State | None:
    """From the newest checkpoint that is whole, each rank its slices; None when there is no checkpoint.

    Parameters and moments are those that were saved, to the bit; random states too, on the same mesh. `home`:
    where moments live, if not on the device.
    """
    last = ranks.checked(lambda: open_last(root, dist.group.WORLD))
    if last is None:
        return None
    for step, problem in last.damaged.items():
        if ranks.first:
            print(
                f"warning: the checkpoint of step {step} is damaged: {problem}. It is set aside as "
                f"{set_aside(root, step).name}; going on from step {last.found.step}.",
                file=sys.stderr,
                flush=True,
            )
    with Reader(root, last.found) as reader:
        state = ranks.checked(partial(_read, reader, setup, mesh, ranks, home))
    if ranks.first:
        print(f"going on from {folder_of(root, state.step)}", flush=True)
    return state


def _read(reader: Reader, setup: Setup, mesh: Mesh, ranks: Ranks, home: Arena | None) -> State:
    specs, meta = param_specs(setup.model, setup.table), reader.index.meta

    def shard(name: str, leaf: Any, spec: Any) -> Tensor:
        return reader.shard(f"params.{name}", spec, leaf.shape, mesh).to(ranks.device)

    params = map_params(shard, abstract(setup.model), specs)
    state = adamw_init(params, arena=home)
    for kind in ("exp_avg", "exp_avg_sq"):
        trees = (getattr(state, kind), specs, abstract(setup.model))
        for (name, moment), (_, spec), (_, leaf) in zip(*map(named_leaves, trees), strict=True):
            moment.copy_(reader.shard(f"{kind}.{name}", spec, leaf.shape, mesh))
    pytree.tree_map_only(Tensor, lambda t: t.fill_(float(meta["updates"])), state.steps)
    step, rest = divmod(meta["rows"], setup.num_rows)
    if rest or step != reader.index.step:
        raise ValueError(
            f"batch_size={setup.num_rows} must be the run's, got a checkpoint of step {reader.index.step} "
            f"after {meta['rows']} rows. Change --batch-size."
        )
    if meta["mesh"] == axis_sizes(mesh):
        for name, value in random_state(ranks).items():
            kept = reader.whole(name)
            if kept is None or kept.shape != value.shape:
                continue
            if name.endswith("cuda"):
                torch.cuda.set_rng_state(kept, ranks.device)
            else:
                torch.set_rng_state(kept)
    return State(params, state, step, meta["updates"])
