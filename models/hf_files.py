"""The files beside a model's tensors: config.json and what travels with it."""

from __future__ import annotations

import json
import os
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from usp.models.config import LlamaConfig
from usp.models.reader import open_checkpoint

# What travels with a model: tokenizer, chat template, generation settings, licence. Never code or pickles.
_CARRIED = (
    "*.tiktoken",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer*.json",
    "tokenizer.model",
    "vocab.*",
)
_CODE = (".py", ".bin", ".pt", ".pth", ".pkl", ".ckpt")


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must be a readable JSON file, got {error}. Check the directory.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}. Restore the file.")
    return value


def read_source(source: str | os.PathLike[str] | None) -> tuple[dict[str, Any], set[str]]:
    """config.json and tensor names of the source; empty where it has none."""
    if source is None:
        return {}, set()
    root = Path(source)
    if not root.is_dir():
        raise ValueError(f"source={str(source)!r} must be a model directory. Correct it, or leave it out.")
    base = read_json(root / "config.json") if (root / "config.json").exists() else {}
    try:
        return base, set(open_checkpoint(root).tensors)
    except ValueError:  # side files are all that is needed: the weights may be elsewhere
        return base, set()


def merged_config(cfg: LlamaConfig, base: dict[str, Any], *, dtype: str) -> dict[str, Any]:
    """The source's config.json with everything that describes the tensors replaced by cfg."""
    dropped = ("quantization_config", "_name_or_path")
    config = {key: value for key, value in base.items() if key not in dropped}
    config.update(cfg.to_hf_dict(dtype=dtype))
    if LlamaConfig.from_hf_dict(config) != cfg:
        raise ValueError(
            f"source's config.json must describe the same kind of model, got cfg={cfg}. "
            "Pass the directory that this model came from, or none."
        )
    return config


def carry(source: str | os.PathLike[str] | None, directory: Path) -> None:
    if source is None:
        return
    for file in sorted(Path(source).iterdir()):
        carried = any(fnmatch(file.name, pattern) for pattern in _CARRIED) and file.suffix not in _CODE
        if carried and file.is_file():
            shutil.copyfile(file, directory / file.name)
    templates = Path(source) / "additional_chat_templates"
    if templates.is_dir():
        (directory / templates.name).mkdir()
        for file in sorted(templates.glob("*.jinja")):
            shutil.copyfile(file, directory / templates.name / file.name)
