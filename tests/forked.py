"""Processes forked from one that has imported everything slow and done nothing else: a start costs little."""

import multiprocessing as mp
from typing import Any

PRELOADED = [
    "torch",
    "torch.distributed.launcher.api",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "usp.models.hf",
    "usp.tools.cli",
    "usp.tools.eval",
    "usp.tools.train",
    "tests.models.hf.run_bridge",
    "tests.models.hf.run_sft",
    "tests.tools.run_examples",
]


def forked() -> Any:
    """A context whose processes come from the one server of this session; the first use decides what it has
    imported."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
