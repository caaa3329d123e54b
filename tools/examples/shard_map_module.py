"""Any nn.Module on sequence shards: `functional_call` inside `shard_map`, gradients by `value_and_grad`.

    torchrun --nproc-per-node 2 -m usp.tools.examples.shard_map_module

Outside are DTensors, inside plain tensors: this rank's tokens, and whole weights.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from usp import attention, heads_to_seq, seq_to_heads, value_and_grad
from usp.mesh import TABLES, MeshLike, P, build_mesh, placements_of, shard_map
from usp.tools.examples.start import ranks, say

D, HEADS, SEQ, TABLE = 24, 4, 50, TABLES["ulysses"]


class Mixer(nn.Module):  # of your own: on this rank's tokens, attention alone talks to other ranks
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x_BSD: Tensor, mesh: MeshLike) -> Tensor:
        q, k, v = (t.unflatten(2, (HEADS, -1)) for t in self.qkv(self.norm(x_BSD)).chunk(3, 2))
        q, k, v = seq_to_heads(q, k, v, mesh=mesh, table=TABLE, seq_len=SEQ)
        o = heads_to_seq(attention(q, k, v), num_heads=HEADS, mesh=mesh, table=TABLE, seq_len=SEQ)
        return x_BSD + torch.tanh(self.out(o.flatten(2)))


def main() -> list[float]:
    """How far loss and gradients are from those of one rank, relative."""
    mesh = build_mesh(ulysses=dist.get_world_size())
    torch.manual_seed(0)
    module, x = Mixer().double().to(mesh.device_type), torch.randn(2, SEQ, D, dtype=torch.float64)
    args = {name: p.detach() for name, p in module.named_parameters()}, x.to(mesh.device_type)

    def loss(params: dict[str, Tensor], x: Tensor, mesh: MeshLike) -> Tensor:
        out: Tensor = torch.func.functional_call(module, params, (x, mesh))
        return out.square().sum() / (2 * SEQ)  # this rank's part of the mean

    specs = {name: P(*(None,) * p.dim()) for name, p in args[0].items()}, P(None, "ulysses", None)
    placed = pytree.tree_map(lambda t, s: distribute_tensor(t, mesh, placements_of(s, mesh)), args, specs)
    mapped = shard_map(lambda p, x: loss(p, x, mesh), mesh, specs, P(partial=("ulysses",)))
    value, grads = value_and_grad(mapped)(*placed)
    one, wanted = value_and_grad(loss)(*args, {"dp": 1, "ring": 1, "ulysses": 1})
    pairs = [(value, one), *((grads[name], wanted[name]) for name in wanted)]
    apart = [float((got.full_tensor() - want).norm() / want.norm()) for got, want in pairs]
    say(f"loss {float(one):.6f}; apart from one rank: {apart[0]:.1e}, gradients {max(apart[1:]):.1e}")
    return apart


if __name__ == "__main__":
    with ranks():
        apart = main()
