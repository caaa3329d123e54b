"""Gloo ranks that live as long as the test session, and the model that most of them start from."""

from pathlib import Path

import pytest

from tests.forked import PRELOADED
from tests.models.hf.causal import causal_model
from tests.pool import pool_of

# Accelerate imports DeepSpeed where it is installed, and the first engine all that its optimizers need.
PRELOADED.extend(["tests.models.hf.run_deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer"])


two = pool_of(2, "session")


four = pool_of(4, "session")


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of Transformers: `causal_model("llama")`."""
    folder = tmp_path_factory.mktemp("start") / "llama"
    causal_model("llama").save_pretrained(folder)
    return folder
