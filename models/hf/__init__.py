"""Use with Hugging Face: the functional model as a module, and any Transformers model on shards.

Importing this needs Transformers alone; `usp.models.hf.trainer` and `.sft` ask for the extra `hf`, and
`.deepspeed` for the extra `deepspeed`.
"""

from usp.models.hf.bridge import BridgedCausalLM
from usp.models.hf.inputs import Weighted, shard_inputs, to_batch, weighted_inputs
from usp.models.hf.parallel import SequenceParallel, sequence_parallel
from usp.models.hf.reduce import reduce_module_grads, reported

__all__ = [
    "BridgedCausalLM",
    "SequenceParallel",
    "Weighted",
    "reduce_module_grads",
    "reported",
    "sequence_parallel",
    "shard_inputs",
    "to_batch",
    "weighted_inputs",
]
