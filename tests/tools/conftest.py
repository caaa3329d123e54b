"""A tiny Llama and a tiny byte-level tokenizer, made on the spot, and a launcher for real command lines."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.warm import Job, run_warm
from usp.models import LlamaConfig

ROOT = Path(__file__).resolve().parents[2]
TEXT = "A sequence is cut over ranks; heads are exchanged. Größe, 長さ, 🙂.\n"
Run = Callable[..., subprocess.CompletedProcess[str]]


def make_tokenizer(folder: Path) -> Any:
    """Byte-level BPE of 300 ids that puts <bos> before and <eos> after a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<bos>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([TEXT] * 20, trainer)
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    return tokenizer


def build_model(folder: Path, *, vocab_size: int = 300, num_heads: int = 4, num_kv_heads: int = 2) -> Path:
    """A two-layer Llama in float32 with its tokenizer, as a Hugging Face directory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=6,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def windowed_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json alone: four layers, all but the second with a sliding window of 100 tokens."""
    cfg = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=4, num_heads=4, num_kv_heads=2,
        windows=(100, None, 100, 100), qk_norm=True, model_type="qwen3",
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("windowed")
    (folder / "config.json").write_text(json.dumps(cfg.to_hf_dict()))
    return folder


@pytest.fixture
def make_model() -> Callable[..., Path]:
    return build_model


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of five UTF-8 documents of different lengths."""
    folder = tmp_path_factory.mktemp("corpus")
    for index, repeats in enumerate((3, 1, 7, 2, 5)):
        (folder / f"{index}.txt").write_text(f"{index}: " + TEXT * repeats, encoding="utf-8")
    return folder


def environment() -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """run(*words, ranks=1): `python -m words` or, with ranks > 1, `torchrun -m words`, from a warm start."""

    def go(
        *words: str, ranks: int = 1, logs: Path | None = None, restarts: int = 0
    ) -> subprocess.CompletedProcess[str]:
        said = tmp_path / f"said-{len(list(tmp_path.glob('said-*')))}"
        said.mkdir()
        job = Job(words, 0 if ranks == 1 else ranks, restarts, logs, tmp_path, environment(), said)
        return run_warm(job, timeout=240)

    return go
