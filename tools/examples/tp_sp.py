"""A scheme of one's own: tensor parallelism with the sequence cut between its two halves.

    torchrun --nproc-per-node 2 -m usp.tools.examples.tp_sp

Attention and MLP keep their weights cut over `ulysses`, by head and by feature, also while they compute;
their input is gathered along the sequence and their output, a sum over the ranks, scattered along it again
(Korthikanti et al., arXiv 2205.05198). The library has no code for this: the table below is all there is.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from usp import Batch, models, shard_batch, value_and_grad
from usp.mesh import P, Table, build_mesh, differences
from usp.mesh.tables import TABLES, weights

OUT, IN, BIAS = P("ulysses", None), P(None, "ulysses"), P("ulysses")
CUT = {
    **dict.fromkeys(("wq", "wk", "wv", "w_gate", "w_up"), OUT),
    **dict.fromkeys(("wo", "w_down"), IN),
    **dict.fromkeys(("bq", "bk", "bv", "b_gate", "b_up"), BIAS),
}
TP_SP = Table(
    name="tp_sp",
    tokens=P("dp", "ulysses"),
    residual=P("dp", "ulysses", None),
    attn_x=P("dp", None, None),
    q=P("dp", None, "ulysses", None),
    kv=P("dp", None, "ulysses", None),
    mlp_x=P("dp", None, None),
    rest=weights(P(None, None), P(None), **CUT),
    use=weights(P(None, None), P(None), **CUT),
)


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    mesh = build_mesh(ulysses=dist.get_world_size())
    cfg = models.LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_layers=2, num_heads=6, num_kv_heads=2
    )
    batch = Batch(torch.randint(97, (1, 50), generator=torch.Generator().manual_seed(0)))
    losses = {}
    for table, where in ((TP_SP, mesh), (TABLES["replicated"], {"dp": 1, "ring": 1, "ulysses": 1})):
        params = models.init(cfg, seed=0, dtype=torch.float64, table=table, mesh=where)
        shard = shard_batch(batch, table=table, mesh=where)
        loss, _ = value_and_grad(
            lambda p, s=shard, t=table, m=where: models.loss(p, s, cfg, table=t, mesh=m)
        )(params)
        total = loss.detach()
        if table is TP_SP:
            dist.all_reduce(total)  # the loss is the sum over ranks
        losses[table.name] = float(total)
    if dist.get_rank() == 0:
        print(differences(TABLES["ulysses"], TP_SP))
        world, one = losses["tp_sp"], losses["replicated"]
        print(f"loss on {dist.get_world_size()} ranks {world:.12f}, on one {one:.12f}")
        assert math.isclose(losses["tp_sp"], losses["replicated"], rel_tol=1e-12)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
