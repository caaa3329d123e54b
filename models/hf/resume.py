"""Saving and resuming in a Trainer whose model's parameters are cut by placement, each rank its own shards.

Weights are a directory that Transformers loads; the optimizer's state is a checkpoint of `usp.state`, which
any mesh reads. No weight and no moment is in a pickle.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Trainer

from usp.mesh import MeshLike, P
from usp.mesh.agree import agree
from usp.models.hf.bridge import BridgedCausalLM
from usp.models.hf.shards import OnShards, clip_grad_norm, placed
from usp.state import Placed, Reader, Saver, open_last

FOLDER, SCHEDULER = "optimizer", "scheduler.pt"
"""Names inside a checkpoint of the Trainer."""
_PLAIN = (int, float, bool, str, type(None), tuple, list)


class CutParameters(Trainer):
    """What a Trainer does otherwise where the model is a `BridgedCausalLM` whose parameters are cut.

    Nothing wraps the model, and gradients arrive as sums: parameters, gradients and the optimizer's state are
    one shard a rank throughout. With any other model everything is the Trainer's own.
    """

    mesh: MeshLike
    _shards: OnShards | None = None

    def cut_model(self, model: Any = None) -> BridgedCausalLM | None:
        model = self.model if model is None else model  # never wrapped, if it is one
        return model if isinstance(model, BridgedCausalLM) and model.is_cut else None

    def own_placement(self) -> None:
        """Tell the Trainer that the model looks after shards and gradients. ValueError for half of both."""
        model = self.cut_model()
        if isinstance(self.model, BridgedCausalLM) and self.is_fsdp_enabled:
            raise ValueError(
                "fsdp must be left out with a BridgedCausalLM. Cut it by placement: whole=False."
            )
        if model is None:
            return
        if self.is_deepspeed_enabled or self.args.fp16:
            raise ValueError(
                "deepspeed and fp16=True must be left out where parameters are cut by placement. Pass "
                "whole=True, or for fp16 bf16=True."
            )
        left = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
        if left:
            raise ValueError(
                f"table={model.table.name!r} must cut all parameters or none in a Trainer, got {left[0]} and "
                f"{len(left) - 1} more whole. Place them in its column rest, or pass whole=True."
            )
        self.is_distributed_loading_by_transformers = True  # the Trainer's word for it

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        cut = self.cut_model(model)
        if cut is None:
            super()._move_model_to_device(model, device)
        elif cut.device.type != device.type:
            raise ValueError(
                f"device={cut.device} must be the Trainer's where parameters are cut, got {device}. Pass "
                f"device= to from_pretrained."
            )

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if self._shards is None and self.cut_model() is not None:
            self._shards = OnShards(optimizer)
        return optimizer

    def _clip_grad_norm(self, model: Any) -> Any:
        cut = self.cut_model()
        if cut is None:
            return super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        return clip_grad_norm(_trained(cut), self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        cut = self.cut_model()
        if cut is None or grad_norm is not None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[no-untyped-call]
        return clip_grad_norm(_trained(cut), None)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        model = self.cut_model()
        if model is None or self._shards is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        root, step = Path(output_dir), self.state.global_step
        save_optimizer(root / FOLDER, model, self.optimizer, self._shards, self.mesh, step=step)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), root / SCHEDULER)  # type: ignore[union-attr]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        model = self.cut_model()
        if model is None or self._shards is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        root = Path(checkpoint)
        load_optimizer(root / FOLDER, model, self.optimizer, self._shards, self.mesh)
        held = agree(lambda: torch.load(root / SCHEDULER, weights_only=True), self.mesh)
        self.lr_scheduler.load_state_dict(held)  # type: ignore[union-attr]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        cut = self.cut_model()
        if cut is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            cut.load_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        cut, best = self.cut_model(), self.state.best_model_checkpoint
        if cut is None or best is None:
            super()._load_best_model()
        else:
            cut.load_weights(best)


def save_optimizer(
    root: Path, model: nn.Module, optimizer: Any, shards: OnShards, mesh: MeshLike, *, step: int
) -> None:
    """Write what the optimizer holds of the model's parameters, each element once. Every rank calls this."""
    names = _names(model, shards)
    held: Mapping[str, Any] = optimizer.state_dict()
    tensors = {}
    for at, fields in held["state"].items():
        for key, value in fields.items():
            tensors[f"{names[at]}/{key}"] = _placed(f"{names[at]}/{key}", value, *shards.pairs[at])
    groups = [{k: v for k, v in group.items() if k != "params"} for group in held["param_groups"]]
    wrong = sorted({key for group in groups for key, value in group.items() if not isinstance(value, _PLAIN)})
    if wrong:
        raise ValueError(f"optimizer={wrong} must be plain numbers or words to be saved. Use another one.")
    Saver(root, mesh=mesh, keep=1, over=mesh).save(step, tensors, meta={"groups": groups})


def load_optimizer(root: Path, model: nn.Module, optimizer: Any, shards: OnShards, mesh: MeshLike) -> None:
    """Take what `save_optimizer` wrote, on any mesh. ValueError, on every rank, for what does not fit."""
    last = open_last(root, mesh)
    if last is None:
        raise ValueError(f"resume_from_checkpoint={root.parent} must hold {root.name}, got none. Train anew.")
    keys: dict[str, list[str]] = {}
    for entry in last.found.tensors:
        name, _, key = entry.rpartition("/")
        keys.setdefault(name, []).append(key)
    with Reader(root, last.found) as reader:
        state = {
            at: {key: _read(reader, f"{name}/{key}", *pair) for key in keys.get(name, ())}
            for at, (name, pair) in enumerate(zip(_names(model, shards), shards.pairs, strict=True))
        }
    numbers = iter(range(len(state)))
    groups = [
        {**group, "params": [next(numbers) for _ in own["params"]]}
        for group, own in zip(last.found.meta["groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _names(model: nn.Module, shards: OnShards) -> list[str]:
    """Of the optimizer's parameters, in its own order."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for p, _ in shards.pairs]


def _placed(name: str, value: Any, p: Tensor, shard: Tensor) -> Placed:
    if not isinstance(value, Tensor) or (value.dim() and value.shape != shard.shape):
        raise ValueError(
            f"{name} must be a number or of its parameter's size to be saved, got another. Use AdamW."
        )
    if not value.dim():
        return Placed(value, P(), ())
    assert isinstance(p, DTensor)
    return Placed(value, placed(p), tuple(p.shape))


def _read(reader: Reader, name: str, p: Tensor, shard: Tensor) -> Tensor:
    if reader.index.tensors[name].shape == ():
        whole = reader.whole(name)
        assert whole is not None
        return whole
    assert isinstance(p, DTensor)
    return reader.shard(name, placed(p), tuple(p.shape), p.device_mesh).to(shard.device)
