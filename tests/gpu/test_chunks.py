"""Two GPUs: what travels beside attention's chunks is there when it is read, every time."""

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from tests.ranks import run_ranks
from usp import Batch, models, shard_batch, value_and_grad
from usp.mesh import TABLES, build_mesh
from usp.models import LlamaConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
CFG = LlamaConfig(
    vocab_size=320, hidden_size=512, intermediate_size=1024, num_layers=3, num_heads=8, num_kv_heads=4
)
REPEATS = 12


def gradients(rank: int, world: int, scheme: tuple[int, int], device: str, length: int) -> list[float]:
    """Largest error of any gradient against all heads at once, then the largest change between repeats."""
    ring, ulysses = scheme
    mesh, table = build_mesh(ring=ring, ulysses=ulysses), TABLES["usp"]
    params = models.init(CFG, seed=1, table=table, mesh=mesh)
    params = pytree.tree_map_only(Tensor, lambda t: t.to(device), params)
    tokens = torch.randint(CFG.vocab_size, (1, length), generator=torch.Generator().manual_seed(2))
    shard = shard_batch(Batch(tokens), table=table, mesh=mesh, device=device)

    def run(chunks: int, remat: str) -> list[Tensor]:
        # a kernel whose sums have one order, so that a repeat is the same to the bit
        fn = value_and_grad(
            lambda p: models.loss(
                p, shard, CFG, table=table, mesh=mesh, remat=remat, head_chunks=chunks, kernel="tiled"
            )
        )
        return [t for t in pytree.tree_leaves(fn(params)) if isinstance(t, Tensor)]

    want, found = run(1, "full"), []
    for remat in ("attention", "full"):
        first = run(4, remat)
        errors = [float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in zip(first, want, strict=True)]
        changes = [
            float((a - b).abs().max())
            for _ in range(REPEATS)
            for a, b in zip(run(4, remat), first, strict=True)
        ]
        found += [max(errors), max(changes)]
    return found


@pytest.mark.parametrize("scheme", [(1, 2), (2, 1)], ids=["ulysses", "ring"])
def test_chunks_equal_all_heads_and_themselves(scheme: tuple[int, int]) -> None:
    """Case D24."""
    for found in run_ranks(gradients, 2, scheme, "cuda", 4096, backend="nccl", timeout=240.0):
        for error, change in zip(found[::2], found[1::2], strict=True):
            assert error < 1e-5  # float32 products, of other sizes: sums of up to 4096 terms in other orders
            assert change == 0
