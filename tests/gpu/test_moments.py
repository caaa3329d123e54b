"""AdamW's moments in the host's memory: the same updates to the bit, and no memory of theirs on the GPU."""

import copy

import pytest
import torch

from usp import adamw_init, adamw_update
from usp.arena import Arena

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
]


def test_moments_visit() -> None:
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    shapes = [(1 << 12, 1 << 12)] * 6 + [(1 << 12,)]
    params = {str(i): normal(*shape) for i, shape in enumerate(shapes)}
    other, arena = copy.deepcopy(params), Arena()
    here, away = adamw_init(params), adamw_init(other, arena=arena)
    assert all(t.is_pinned() for t in away.exp_avg.values())
    nbytes = sum(p.nbytes for p in params.values())
    assert arena.nbytes == 2 * nbytes
    for _ in range(4):
        grads = {name: normal(*p.shape) for name, p in params.items()}
        adamw_update(params, grads, here, lr=0.01, weight_decay=0.1)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        adamw_update(other, grads, away, lr=0.01, weight_decay=0.1)
        peak = torch.cuda.max_memory_allocated() - before
        # both moments of the leaf that is used and of the next, and the numbers that the step goes by
        assert peak <= 4 * params["0"].nbytes + 4096
        torch.cuda.current_stream().synchronize()  # which has the moments back on the host
        for name in params:
            assert torch.equal(params[name], other[name])
            assert torch.equal(here.exp_avg[name].cpu(), away.exp_avg[name])
            assert torch.equal(here.exp_avg_sq[name].cpu(), away.exp_avg_sq[name])
