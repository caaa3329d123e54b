"""DeepSpeed's ZeRO as the engine of a model whose sequences are cut over ranks. Needs the extra `deepspeed`.

All ranks together are DeepSpeed's data parallel group, those of one sequence too: it takes the mean of their
gradients over all ranks in every stage, and `averaged=True` makes that mean the gradient of the global batch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from usp.models.hf.bridge import BridgedCausalLM
from usp.models.hf.parallel import SequenceParallel

# Ways of DeepSpeed's own to cut what is cut here, each of which changes what its mean is taken over.
_CUT_TWICE = ("sequence_parallel_size", "data_parallel_size", "tensor_parallel", "autotp_size", "pipeline")


def deepspeed_engine(
    model: BridgedCausalLM | SequenceParallel,
    *,
    config: Mapping[str, Any] | str | os.PathLike[str],
    optimizer: Any = None,
    lr_scheduler: Any = None,
) -> Any:
    """`deepspeed.initialize` for this model: the engine, with ZeRO stage 0, 1, 2 or 3.

        model = BridgedCausalLM.from_pretrained(path, mesh=mesh, whole=True, averaged=True)
        engine = deepspeed_engine(model, config={"zero_optimization": {"stage": 2}}, optimizer=optimizer)
        engine.backward(engine(input_ids=tokens, labels=labels).loss)
        engine.step()

    Or `model`: what `sequence_parallel(model, averaged=True, ...)` yields, with
    `engine.backward(sp.loss(shard, engine=engine))`. Several micro-batches a step: pass the targets of all of
    them as num_items_in_batch (`num_valid` of the shard), and call
    `engine.set_gradient_accumulation_boundary(is_last)` before each backward. Batches are global, the same on
    every rank; train_micro_batch_size_per_gpu counts nothing here and is 1 unless given.

    Stage 3 cuts a bridged model's parameters and gathers all of them for a step; an unchanged Transformers
    model's are gathered module by module. Where even that is too much, cut a bridged model's parameters by
    placement (`table.rest`), without DeepSpeed. Raises ValueError for a model or a configuration under which
    the mean would not be the gradient.
    """
    module = model.model if isinstance(model, SequenceParallel) else model
    given = config if isinstance(config, Mapping) else json.loads(Path(config).read_text(encoding="utf-8"))
    _refuse(model, module, given)
    settings: dict[str, Any] = {"zero_allow_untested_optimizer": True, **given}
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & settings.keys():
        settings["train_micro_batch_size_per_gpu"] = 1
    import deepspeed  # here, as it changes the environment

    trained: Any = [p for p in module.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        model_parameters=trained,
        lr_scheduler=lr_scheduler,
        config=settings,
    )
    if isinstance(module, BridgedCausalLM) and engine.zero_optimization_stage() == 3:
        for parameter in module.parameters():  # read by the model itself: its inner modules never run
            deepspeed.zero.register_external_parameter(module, parameter)
    return engine


@contextmanager
def whole_parameters(engine: Any) -> Iterator[Any]:
    """The module inside an engine with whole parameters on every rank, to save it; every rank enters.

    with whole_parameters(engine) as model:
        model.save_pretrained(path, is_main_process=rank == 0)
    """
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        yield engine.module


def _refuse(model: Any, module: Any, config: Mapping[str, Any]) -> None:
    if not isinstance(model, BridgedCausalLM | SequenceParallel) or module is None:
        raise ValueError(
            f"model={type(model).__name__} must be a BridgedCausalLM or what sequence_parallel yields for a "
            f"model. Build one of them."
        )
    if any(isinstance(p, DTensor) for p in module.parameters()):
        raise ValueError(
            "model must have whole parameters for DeepSpeed to cut, got some cut by placement. Pass "
            "whole=True, or train it without DeepSpeed."
        )
    if not model.averaged:
        raise ValueError(
            "averaged=False must be True under DeepSpeed, which takes the mean of the ranks' gradients. Pass "
            "averaged=True where the model is built, or to sequence_parallel."
        )
    cut = sorted(key for key in _CUT_TWICE if config.get(key) not in (None, 0, 1))
    if cut:
        raise ValueError(f"config={cut} must be left out, as the mesh says how ranks are used. Leave it out.")
    number = config.get("gradient_accumulation_steps", 1)
    if number != 1:
        raise ValueError(
            f"gradient_accumulation_steps={number!r} must be 1, as DeepSpeed would weight micro-batches, not "
            f"targets, alike. Call engine.set_gradient_accumulation_boundary, and pass num_items_in_batch."
        )
