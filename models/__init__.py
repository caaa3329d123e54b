"""Functional Llama family and its conversion from and to Hugging Face checkpoints."""

if __name__ != "usp.models":
    raise ImportError(f"import {__name__!r} must be spelled 'usp.models'. Write `import usp.models`.")

from usp.models.block import block
from usp.models.config import LlamaConfig, Rope
from usp.models.evaluate import Evaluation, evaluate
from usp.models.files.convert import from_hf, load, save, to_hf
from usp.models.layout import check_layout
from usp.models.llama import hidden, logits, loss
from usp.models.params import Block, Leaf, Params, abstract, init, map_params, named_leaves, param_specs
from usp.models.plan.choose import choose_settings, longest
from usp.models.plan.memory import training_memory
from usp.models.plan.memory_parts import Memory
from usp.models.plan.settings import Settings
from usp.models.plan.traffic import model_traffic

__all__ = [
    "Block",
    "Evaluation",
    "Leaf",
    "LlamaConfig",
    "Memory",
    "Params",
    "Rope",
    "Settings",
    "abstract",
    "block",
    "check_layout",
    "choose_settings",
    "evaluate",
    "from_hf",
    "hidden",
    "init",
    "load",
    "logits",
    "longest",
    "loss",
    "map_params",
    "model_traffic",
    "named_leaves",
    "param_specs",
    "save",
    "to_hf",
    "training_memory",
]
