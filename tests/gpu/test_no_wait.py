"""The host does not wait for the GPU where a batch is cut and positions become angles."""

import pytest
import torch

from tests.models.test_rope import ROPES, config
from usp import Batch, Shard, shard_batch
from usp.mesh import TABLES
from usp.models.rope import rope_cos_sin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
]
ONE = {"dp": 1, "ring": 1, "ulysses": 1}


@pytest.mark.parametrize("rope", ROPES)
def test_the_host_goes_on(rope: str) -> None:
    """And what the GPU gets is what the host has, although the host's copy is let go at once."""
    batch = Batch(torch.arange(600).view(2, 300), cu_seqlens=[[0, 100, 300], [0, 300]])
    want = shard_batch(batch, table=TABLES["ulysses"], mesh=ONE)

    def work() -> tuple[Shard, list[torch.Tensor]]:
        shard = shard_batch(batch, table=TABLES["ulysses"], mesh=ONE, device="cuda")
        return shard, list(rope_cos_sin(shard.positions, config(rope), torch.float32, seq_len=300))

    work()  # the first time memory is made
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            busy = busy @ busy
        shard, angles = work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name in ("tokens", "labels", "positions", "num_valid"):
        assert torch.equal(getattr(shard, name).cpu(), getattr(want, name))
    expected = rope_cos_sin(want.positions, config(rope), torch.float32, seq_len=300)
    for got, host in zip(angles, expected, strict=True):
        # angles of up to 300, in float32, whose powers a GPU rounds otherwise
        assert (got.cpu() - host).abs().max() < 1e-3
