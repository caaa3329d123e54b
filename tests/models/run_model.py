"""What one rank does in the parity tests. Spawned ranks import this: keep Transformers out of it."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.models.batches import two_rows
from tests.schemes import SCHEMES
from usp import reduce_grads, shard_batch, unshard_batch, value_and_grad
from usp.batch import IGNORE
from usp.mesh import P, build_mesh, redistribute
from usp.mesh.devices import AXES
from usp.models import Params, abstract, from_hf, logits, loss, map_params, named_leaves, param_specs
from usp.models.files.hf_names import hf_name


class Run(NamedTuple):
    """One parity run: degrees, table, key of the model, key of the batch, remat, parts of heads."""

    dp: int
    ring: int
    ulysses: int
    table: str
    model: str
    case: str
    remat: str
    head_chunks: int = 1


class Result(NamedTuple):
    loss: Tensor
    grads: dict[str, Tensor]
    logits: Tensor


def run(
    params: Params,
    cfg: Any,
    mesh: Any,
    table: Any,
    case: str | int,
    remat: str,
    head_chunks: int = 1,
    mlp_tile: int | None = None,
) -> Result:
    """Of rows given by a number, every token is its own target: a row of one token has no next one."""
    options: dict[str, Any] = {"remat": remat, "head_chunks": head_chunks, "mlp_tile": mlp_tile}
    shard = shard_batch(two_rows(case), table=table, mesh=mesh)
    if isinstance(case, int):
        own = shard.tokens.where(shard.tokens > 0, IGNORE)
        shard = shard._replace(labels=own, num_valid=torch.tensor(2.0 * case))

    def objective(p: Params) -> Tensor:
        return loss(p, shard, cfg, table=table, mesh=mesh, **options)

    value, grads = value_and_grad(objective)(params)
    value = value.detach().clone()
    specs = param_specs(cfg, table)
    grads = reduce_grads(grads, specs, mesh)
    if isinstance(mesh, DeviceMesh):
        for axis in AXES:
            dist.all_reduce(value, group=mesh.get_group(axis))  # the loss is the SUM over ranks

    def whole(_: str, grad: Tensor, spec: P, leaf: Any) -> Tensor:
        return redistribute(grad, spec, P(*(None for _ in leaf.shape)), mesh, shape=leaf.shape)

    full = map_params(whole, grads, specs, abstract(cfg))
    with torch.no_grad():
        out = logits(params, shard, cfg, table=table, mesh=mesh)
        out = unshard_batch(out, shard, table=table, mesh=mesh)
    return Result(value, {hf_name(n): g.detach() for n, g in named_leaves(full)}, out)


def on_rank(rank: int, world: int, folder: Path, runs: list[Run]) -> list[Result]:
    """All runs of one world size, so that starting ranks is paid once; gradients from rank 0 alone."""
    results = []
    for one in runs:
        mesh = build_mesh(dp=one.dp, ring=one.ring, ulysses=one.ulysses)
        cfg, params = from_hf(folder / one.model, table=SCHEMES[one.table], mesh=mesh, dtype=torch.float64)
        result = run(params, cfg, mesh, SCHEMES[one.table], one.case, one.remat, one.head_chunks)
        results.append(result if rank == 0 else Result(result.loss, {}, result.logits[:0]))
    return results
