"""What one rank does in the tests of the bridge."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.models.batches import two_rows
from usp import clip_by_global_norm
from usp.mesh import TABLES, P, build_mesh
from usp.models.hf import BridgedCausalLM
from usp.models.hf.reduce import reduce_module_grads
from usp.models.hf.shards import clip_grad_norm

Grads = dict[str, torch.Tensor]


def inputs_of(case: str) -> dict[str, Any]:
    """`two_rows` as keyword arguments of a Transformers model."""
    batch = two_rows(case)
    assert batch.cu_seqlens is not None
    length = batch.tokens.shape[1]
    edges = [0] + [row * length + int(e) for row, cut in enumerate(batch.cu_seqlens) for e in cut[1:]]
    return {"input_ids": batch.tokens, "labels": batch.labels, "cu_seqlens": torch.tensor(edges)}


def shifted(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same with targets shifted by the caller."""
    length, edges = inputs["input_ids"].shape[1], inputs["cu_seqlens"].tolist()
    flat = inputs["labels"].flatten().roll(-1)
    flat[[edge - 1 for edge in edges[1:]]] = -100
    rest = {key: value for key, value in inputs.items() if key != "labels"}
    return {**rest, "shift_labels": flat.view(-1, length)}


def whole(t: Any) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t.clone()


def step(model: BridgedCausalLM, inputs: dict[str, Any]) -> tuple[torch.Tensor, Grads]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    model.reduce_grads()
    return loss.detach(), {name: whole(p.grad).detach() for name, p in model.named_parameters()}


def on_rank(
    folder: Path, dp: int, ring: int, ulysses: int, table: str, keep_whole: bool, case: str, shift: bool
) -> Any:
    mesh = build_mesh(dp=dp, ring=ring, ulysses=ulysses)
    model = BridgedCausalLM.from_pretrained(
        folder, table=TABLES[table], mesh=mesh, whole=keep_whole, dtype=torch.float64, remat="full"
    )
    inputs = inputs_of(case)
    loss, grads = step(model, shifted(inputs) if shift else inputs)
    shards = {name: tuple(p.shape) for name, p in model.named_parameters() if isinstance(p, DTensor)}
    first = torch.distributed.get_rank() == 0
    return loss, grads if first else {}, shards


def save_on_rank(folder: Path, out: Path, table: str, keep_whole: bool) -> None:
    import torch.distributed as dist

    mesh = build_mesh(ulysses=dist.get_world_size())
    model = BridgedCausalLM.from_pretrained(folder, table=TABLES[table], mesh=mesh, whole=keep_whole)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)
    model.save_pretrained(out, is_main_process=dist.get_rank() == 0)
    dist.barrier()


def refused_on_rank(folder: Path) -> list[str]:
    """What a loader that deals out batches, and DistributedDataParallel over sums, are told."""
    mesh = build_mesh(ulysses=2)
    model: Any = BridgedCausalLM.from_pretrained(folder, mesh=mesh, whole=True)
    inputs = inputs_of("packed")
    said = []
    for call in (
        lambda: model(**{**inputs, "input_ids": (inputs["input_ids"] + mesh.get_rank()) % 101}),
        lambda: torch.nn.parallel.DistributedDataParallel(model)(**inputs),
    ):
        try:
            call()
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def summed_on_rank() -> None:
    """Over two axes: in bfloat16 256 + 1 is 256, whichever rank has the 256."""
    mesh = build_mesh(ring=2, ulysses=2)
    p = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    p.grad = torch.where(torch.arange(4) == torch.distributed.get_rank(), 256.0, 1.0).bfloat16()
    reduce_module_grads([p], mesh)
    assert torch.equal(p.grad, torch.full((4,), 259.0).bfloat16())


def clipped_on_rank() -> None:
    """Gradients in bfloat16 are scaled by the exact factor, as the functional path scales them."""
    mesh = build_mesh(ulysses=2)
    torch.manual_seed(3)
    value = distribute_tensor(torch.randn(6, 5).bfloat16(), mesh, [Replicate(), Replicate(), Shard(0)])
    p = torch.nn.Parameter(value)
    p.grad = value * 7
    grad: Any = p.grad
    own, spec = grad.to_local().clone(), P("ulysses", None)
    want, norm = clip_by_global_norm([own], [spec], mesh, 1.0)
    assert torch.equal(clip_grad_norm([p], 1.0), norm)
    assert torch.equal(grad.to_local(), want[0])
