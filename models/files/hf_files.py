"""The files beside a model's tensors: config.json and what travels with it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from usp.models.config import LlamaConfig
from usp.models.files.hf_names import HEAD, hf_map
from usp.models.files.reader import open_checkpoint
from usp.models.files.safefile import load_json

OWN = "usp.json"
FORMAT = 1

# What travels with a model: tokenizer, chat template, generation settings, licence. Never code or pickles.
_CARRIED = (
    "*.tiktoken",
    "*.model",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer*.json",
    "tekken.json",
    "vocab.*",
)
_DROPPED = ("auto_map", "quantization_config", "_name_or_path")  # of another directory, or no longer true
_CODE = (".py", ".bin", ".pt", ".pth", ".pkl", ".ckpt")


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = load_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must be a readable JSON file, got {error}. Check the directory.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}. Restore the file.")
    return value


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_source(source: str | os.PathLike[str] | None) -> tuple[dict[str, Any], set[str]]:
    """config.json of the source and the names under which it stores its tensors; empty where it has none."""
    if source is None:
        return {}, set()
    root = Path(source)
    if not root.is_dir():
        raise ValueError(f"source={str(source)!r} must be a model directory. Correct it, or leave it out.")
    base = read_json(root / "config.json") if (root / "config.json").exists() else {}
    if (root / OWN).exists():
        return base, stored_as(read_json(root / OWN))
    return base, set(open_checkpoint(root).tensors)  # side files are all that is needed: no matter if damaged


def stored_as(own: dict[str, Any]) -> set[str]:
    """Names under which the checkpoint that `usp.json` came from stored its embedding."""
    names = own.get("embed_stored_as", [])
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def merged_config(cfg: LlamaConfig, base: dict[str, Any], *, dtype: torch.dtype) -> dict[str, Any]:
    """The source's config.json with everything that describes the tensors replaced by cfg."""
    config = {key: value for key, value in base.items() if key not in _DROPPED}
    config.update(cfg.to_hf_dict(dtype=str(dtype).removeprefix("torch.")))
    if LlamaConfig.from_hf_dict(config) != cfg:
        raise ValueError(
            f"source's config.json must describe the same kind of model, got cfg={cfg}. "
            "Pass the directory that this model came from, or none."
        )
    return config


def write_hf_files(directory: Path, config: dict[str, Any], source: str | os.PathLike[str] | None) -> None:
    """Everything beside the tensors of a Hugging Face directory; what makes it one comes last."""
    carry(source, directory)
    write_json(directory / "config.json", config)


def write_own_files(
    directory: Path, cfg: LlamaConfig, stored: Iterable[str], source: str | os.PathLike[str] | None
) -> None:
    """Everything beside the tensors of a directory in the project's own format.

    The source's config.json comes along, so that the directory can be the `source` of a later export, and so
    do the names under which a tied embedding was stored, which may be two.
    """
    carry(source, directory)
    own: dict[str, Any] = {"format": FORMAT, "config": cfg.to_dict()}
    if cfg.tie_embeddings and HEAD in stored:
        own["embed_stored_as"] = hf_map(cfg, set(stored))["embed"]
    if source is not None and (Path(source) / "config.json").exists():
        shutil.copyfile(Path(source) / "config.json", directory / "config.json")
    write_json(directory / OWN, own)


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
