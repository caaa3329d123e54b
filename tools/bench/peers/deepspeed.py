"""DeepSpeed ALST: ZeRO-3 in bfloat16, Ulysses inside Transformers' attention, Liger's parts, fused AdamW.

Variant "least" takes the MLP in tiles and keeps the layers' inputs in the host's memory besides.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from usp.tools.bench.job import Job, Row
from usp.tools.bench.peers import hugging_face as hf
from usp.tools.bench.place import Place, kernel_name
from usp.tools.bench.shape import shape


def load(place: Place) -> Any:
    """The package, which reads at its import which accelerator it is for."""
    if place.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed: Any = importlib.import_module("deepspeed")
    deepspeed.init_distributed(dist_backend="nccl" if place.device.type == "cuda" else "gloo")
    return deepspeed


def ulysses() -> Any:
    """DeepSpeed's module of sequence parallelism for Transformers."""
    return importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")


def config(place: Place) -> Row:
    """Best for speed as measured: defaults of ZeRO-3 with both overlaps on."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": place.dtype == torch.bfloat16},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
        "zero_allow_untested_optimizer": True,  # torch's fused AdamW, over DeepSpeed's flat float32 shards
        "sequence_parallel_size": place.world,
        "seq_parallel_communication_data_type": "bf16" if place.dtype == torch.bfloat16 else "fp32",
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


class Alst:
    """The engine, and steps of it."""

    def __init__(self, job: Job, place: Place) -> None:
        self.cfg, self.place, self.liger = shape(job.model, job.layers), place, hf.have_liger(place)
        self.kernel = kernel_name(job.kernel, self.cfg, place)
        deepspeed = load(place)
        self.seen = hf.register(self.cfg, hf.by_kernel(self.kernel, place.dtype))
        if self.liger:
            hf.use_liger(self.cfg)
        self.model = hf.build(self.cfg, place, place.dtype)
        self.model.forward = MethodType(self.forward, self.model)
        mpu = None
        if place.world > 1:
            mpu = ulysses().UlyssesSPAttentionHF.register_with_transformers(
                model_name_or_path=self.model,
                core_attn_implementation=hf.ATTENTION,
                sequence_parallel_size=place.world,
                micro_batch_size=1,
                seq_length_is_variable=True,
            )
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.engine, *_ = deepspeed.initialize(
            config=config(place), model=self.model, optimizer=optimizer, mpu=mpu
        )
        if self.engine.zero_optimization_stage() != 3:
            raise ValueError("DeepSpeed must run ZeRO-3, and does not. Correct its configuration.")

    def forward(self, model: Any, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor) -> Tensor:
        x = model.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        if self.liger:
            return hf.mean_loss(model, x, shift_labels, liger=True)
        size = max(1, hf.LOSS_TILE // self.cfg.vocab_size)

        def tile(module: Any, x: Tensor, y: Tensor) -> Tensor:
            losses = torch.nn.functional.cross_entropy(
                module.lm_head(x).float().flatten(0, -2), y.flatten(), reduction="sum"
            )
            return losses / shift_labels.numel()

        found: Tensor = ulysses().TiledFusedLogitsLoss.apply(
            tile, model, x, shift_labels, None, math.ceil(x.shape[1] / size), [model.lm_head.weight], "sum"
        )
        return found

    def tile_mlp(self, seq_len: int | None) -> None:
        """The MLP in DeepSpeed's tiles of as many tokens as the model is wide; None: whole again."""
        tiled = None if seq_len is None else ulysses().TiledMLP
        for layer in self.model.model.layers:
            whole = type(layer.mlp).forward

            def forward(self: Any, x: Tensor, whole: Any = whole) -> Tensor:
                num = math.ceil(x.shape[1] / x.shape[2])
                found: Tensor = tiled.apply(whole, self, x, num, list(self.parameters()))  # type: ignore[union-attr]
                return found

            layer.mlp.forward = MethodType(whole if tiled is None else forward, layer.mlp)

    def prepare(self, variant: str, seq_len: int, every: int) -> hf.Prepared:
        place, least = self.place, variant == "least"
        if seq_len % place.world:
            raise ValueError(f"seq_len={seq_len} must be a multiple of the processes, got {place.world}.")
        again = hf.checkpointing(self.model, every)
        self.tile_mlp(seq_len if least else None)
        around: Any = contextlib.nullcontext()
        if least and place.device.type == "cuda":
            module = "deepspeed.runtime.activation_checkpointing.offload_activations"
            around = importlib.import_module(module).get_checkpoint_hidden_states_offloading_ctx_manager()
            again += ", inputs in the host's memory"
        whole = hf.tokens(self.cfg, seq_len, place.device)
        ids, labels, positions = (t.chunk(place.world, 1)[place.rank].contiguous() for t in whole)
        want = [seq_len], [self.cfg.num_heads // place.world]

        def step() -> Tensor:
            with around:
                loss = self.engine(input_ids=ids, position_ids=positions, shift_labels=labels)
                self.engine.backward(loss)
            self.engine.step()
            assert (self.seen.tokens, self.seen.heads) == want, "attention must see all tokens of its heads"
            found: Tensor = loss.detach().float() / place.world
            return found

        mlp = ("liger" if self.liger else "torch") if not least else "DeepSpeed's tiles"
        loss_by = "liger" if self.liger else "DeepSpeed's tiles"
        return step, {"kernel": self.kernel, "again": again, "mlp": mlp, "loss_by": loss_by}


def run(job: Job, place: Place) -> None:
    hf.run_variants(job, place, Alst(job, place).prepare)
