"""Attention by chunks of heads: what lives while its gradient is made, on tensors without data."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.models.plan.live import Live
from usp.kept import Kept
from usp.mesh import TABLES, build_mesh
from usp.models import LlamaConfig
from usp.models.head_chunks import add_by_chunks
from usp.models.params import Block
from usp.models.parts import local_parts
from usp.models.plan.local import local
from usp.models.plan.memory_chunks import weights_sums
from usp.models.plan.memory_layer import LayerBytes

LLAMA = LlamaConfig(
    vocab_size=128, hidden_size=4096, intermediate_size=14336, num_layers=1, num_heads=32, num_kv_heads=8
)
SEQ = 65536
KIB = 2**10


def empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


@cache
def backward_peak(cfg: LlamaConfig, ring: int, ulysses: int, head_chunks: int) -> int:
    """Bytes of a rank beside x, what attention kept, and weights: both gradients, and what chunks hold."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ring * ulysses)
    try:
        mesh, own = build_mesh(device_type="cpu", ring=ring, ulysses=ulysses), SEQ // ring // ulysses
        with FakeTensorMode(allow_non_fake_inputs=True), Live() as live:
            size, kept = cfg.head_dim, Kept()
            q, kv, d = cfg.num_heads * size, cfg.num_kv_heads * size, cfg.hidden_size
            shapes = {"norm_attn": (d,), "wq": (q, d), "wk": (kv, d), "wv": (kv, d), "wo": (d, q)}
            weights = {name: empty(*shape).requires_grad_() for name, shape in shapes.items()}
            w = Block(**{**dict.fromkeys(Block._fields), **weights})
            x, rope = empty(1, own, d).requires_grad_(), (empty(1, own, 1, size), empty(1, own, 1, size))
            base = live.now
            y = add_by_chunks(
                x, w, rope, None, local_parts(cfg, compiled=False), cfg=cfg, table=TABLES["usp"], mesh=mesh,
                shape=(1, SEQ, d), window=None, kernel="cpu", head_chunks=head_chunks, compiled=False,
                kept=kept,
            )  # fmt: skip
            base += sum(t.nbytes for t in kept.tensors) + y.nbytes
            grad = torch.empty_like(y)
            live.peak = 0
            y.backward(grad)
            return live.peak - base
    finally:
        dist.destroy_process_group()


def foretold(cfg: LlamaConfig, ring: int, ulysses: int, head_chunks: int) -> int:
    where = local(cfg, TABLES["usp"], {"dp": 1, "ring": ring, "ulysses": ulysses}, batch=1, seq_len=SEQ)
    return LayerBytes(where=where, dtype=torch.bfloat16, head_chunks=head_chunks).attention_moment()


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (1, 2), (2, 2)])
def test_falls_with_the_chunks_as_foretold(ring: int, ulysses: int) -> None:
    chunks = (2, 4, 8) if ring == 1 else (2, 4)
    got = [backward_peak(LLAMA, ring, ulysses, n) for n in chunks]
    assert got == pytest.approx([foretold(LLAMA, ring, ulysses, n) for n in chunks], rel=0.1)
    assert got == sorted(got, reverse=True)


def test_uneven_heads() -> None:
    """11 and 10 query heads in 4 parts, 3 kv heads of which the ranks share one."""
    cfg = replace(LLAMA, num_heads=21, num_kv_heads=3, head_dim=128)
    assert backward_peak(cfg, 1, 2, 4) == pytest.approx(foretold(cfg, 1, 2, 4), rel=0.1)


def test_a_token_costs_less_than_64_kib() -> None:
    """With x and what attention keeps, each of 8 KiB a token; gradients of the weights aside."""
    where = local(LLAMA, TABLES["usp"], {"dp": 1, "ring": 1, "ulysses": 2}, batch=1, seq_len=SEQ)
    nbytes = backward_peak(LLAMA, 1, 2, 8) - weights_sums(where, 2, 2)
    assert nbytes / (SEQ // 2) + 2 * 8 * KIB <= 52 * KIB
