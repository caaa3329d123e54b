"""torch's context_parallel with FSDP2: cuDNN attention in a ring with head-tail balance, bfloat16 compute.

Parameters and moments are float32 shards; each layer is a unit of FSDP2. The ring fetches keys and values by
all-gather, torch's default (its all-to-all rotation took the same time when both were measured).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from usp.tools.bench.job import Job
from usp.tools.bench.peers import hugging_face as hf
from usp.tools.bench.place import Place
from usp.tools.bench.shape import shape

BACKENDS: Mapping[str, SDPBackend] = MappingProxyType(
    {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
)


def run(job: Job, place: Place) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    cfg, liger, device = shape(job.model, job.layers), hf.have_liger(place), place.device
    kernel = "cudnn" if job.kernel == "auto" else job.kernel
    if kernel not in BACKENDS:
        raise ValueError(f"kernel={kernel} must be cudnn or flash: torch context_parallel goes through SDPA.")

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        assert window is None, "a model with windows is refused before it is built"
        with sdpa_kernel(BACKENDS[kernel]):  # that one or none: SDPA raises when it cannot
            # by its name in the module, which context_parallel exchanges
            o = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=True
            )
        return o.transpose(1, 2).contiguous()

    seen = hf.register(cfg, attend)
    if liger:
        hf.use_liger(cfg)
    model = sharded(hf.build(cfg, place, torch.float32), place, liger=liger)
    mesh = init_device_mesh(device.type, (place.world,), mesh_dim_names=("cp",))
    set_rotate_method("allgather")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def prepare(variant: str, seq_len: int, every: int) -> hf.Prepared:
        if variant == "least":
            raise ValueError("context_parallel has nothing but recomputation to save memory with")
        again = hf.checkpointing(model, every)
        whole = hf.tokens(cfg, seq_len, device)

        def step() -> Tensor:
            ids, labels, positions = buffers = [t.clone() for t in whole]
            with context_parallel(
                mesh, buffers=buffers, buffer_seq_dims=[1] * 3, no_restore_buffers=set(buffers)
            ):
                loss = model(input_ids=ids, position_ids=positions, shift_labels=labels)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            assert seen.tokens == [seq_len // place.world], "attention must see this rank's shard"
            found: Tensor = loss.detach() / place.world
            return found

        by = {"mlp": "liger" if liger else "torch", "loss_by": "liger" if liger else "tiles"}
        return step, {"kernel": kernel, "again": again, **by}

    hf.run_variants(job, place, prepare)


def sharded(model: Any, place: Place, *, liger: bool) -> Any:
    """FSDP2 over all processes; the forward ends with the loss, so that the head is gathered for it too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def forward(self: Any, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor) -> Tensor:
        x = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return hf.mean_loss(self, x, shift_labels, liger=liger)

    model.forward = MethodType(forward, model)
    mesh = init_device_mesh(place.device.type, (place.world,), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy(
        param_dtype=place.dtype, reduce_dtype=place.dtype, cast_forward_inputs=False
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)
