"""Checkpoints there and back: same bytes, same keys, loadable by Transformers."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.batches import tokens_of
from tests.models.files.bytes_of import assert_same_bytes, tensors_of
from tests.models.tiny import EVERY, hf_model, load_hf, save_hf
from usp.models import Params, from_hf, init, load, named_leaves, save, to_hf
from usp.models.config import LlamaConfig
from usp.models.files.stream import convert_checkpoint


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("size", ["50GB", "20KB"])
def test_round_trip(name: str, size: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if size == "20KB" else torch.float32
    source = save_hf(hf_model(name).to(dtype), tmp_path / "hf", max_shard_size=size)
    assert len(list(source.glob("*.safetensors"))) == 1 or size == "20KB"
    cfg, params = from_hf(source)
    to_hf(params, cfg, tmp_path / "out", source=source, max_shard_size="30KB" if size == "20KB" else size)
    assert_same_bytes(tensors_of(tmp_path / "out"), tensors_of(source))

    model, info = load_hf(tmp_path / "out")
    assert not any(info.values()), info  # nothing missing, unexpected or mismatched
    tokens = tokens_of(1, 16)
    with torch.no_grad():
        again, _ = load_hf(source)
        assert model.dtype == again.dtype == dtype
        assert torch.equal(model(tokens).logits, again(tokens).logits)


def test_round_trip_without_a_source(tmp_path: Path) -> None:
    for name in EVERY:
        source = save_hf(hf_model(name), tmp_path / name / "hf")
        cfg, params = from_hf(source)
        to_hf(params, cfg, tmp_path / name / "out")
        assert_same_bytes(tensors_of(tmp_path / name / "out"), tensors_of(source))
        _, info = load_hf(tmp_path / name / "out")
        assert not any(info.values()), (name, info)


def test_awkward_bits_survive(tmp_path: Path) -> None:
    source = save_hf(hf_model(), tmp_path / "hf")
    tensors = tensors_of(source)
    norm = tensors["model.norm.weight"]
    norm[:5] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45, -float("nan")])
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"not finite, in model\.norm\.weight\. They are kept"):
        cfg, params = from_hf(source)
    to_hf(params, cfg, tmp_path / "out")
    assert_same_bytes(tensors_of(tmp_path / "out"), tensors)


def test_own_format_round_trip(tmp_path: Path) -> None:
    source = save_hf(hf_model("gqa 9/3 tied").to(torch.bfloat16), tmp_path / "hf")
    (source / "tokenizer.json").write_text("{}")
    cfg, params = from_hf(source)
    save(params, cfg, tmp_path / "own", source=source, max_shard_size="30KB")
    assert len(list((tmp_path / "own").glob("params-*.safetensors"))) > 2
    again_cfg, again = load(tmp_path / "own")
    assert again_cfg == cfg
    assert_same_bytes(dict(named_leaves(again)), dict(named_leaves(params)))
    to_hf(again, cfg, tmp_path / "out", source=tmp_path / "own")
    assert_same_bytes(tensors_of(tmp_path / "out"), tensors_of(source))
    assert (tmp_path / "out" / "tokenizer.json").exists()
    wide = load(tmp_path / "own", dtype=torch.float64)[1]
    assert wide.norm.dtype == torch.float64


def test_files_index_and_config_as_written(tmp_path: Path) -> None:
    source = save_hf(hf_model("llama3 rope"), tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "gguf"}, "custom": 3}
    config |= {"auto_map": {"AutoConfig": "configuration_custom.Config"}}
    for file in (
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
    ):
        (source / file).write_text(file)
    for file in ("modeling_custom.py", "training_args.bin", "tokenizer.py"):
        (source / file).write_text("never")
    cfg, params = from_hf(source)
    (source / "config.json").write_text(json.dumps(config))  # as a de-quantized checkpoint may leave it
    out = tmp_path / "out"
    to_hf(params, cfg, out, source=source, dtype=torch.float16, max_shard_size=30_000)

    assert {p.name for p in out.iterdir() if p.suffix != ".safetensors"} == {
        "config.json", "generation_config.json", "model.safetensors.index.json",
        "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja",
    }  # fmt: skip
    assert (out / "merges.txt").read_text() == "merges.txt"
    written = json.loads((out / "config.json").read_text())
    assert not {"quantization_config", "auto_map"} & written.keys()
    assert written["custom"] == 3
    assert written["dtype"] == written["torch_dtype"] == "float16"
    assert written["rope_parameters"] == config["rope_parameters"]
    assert written["rope_scaling"] | {"rope_theta": written["rope_theta"]} == config["rope_parameters"]

    index = json.loads((out / "model.safetensors.index.json").read_text())
    tensors = tensors_of(out)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for file in files:
        with safe_open(out / file, framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"}
            assert {n for n, f in index["weight_map"].items() if f == file} == set(handle.keys())
        held = load_file(out / file)
        assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= 30_000


def test_shared_and_viewed_memory_is_written(tmp_path: Path) -> None:
    """Leaves that are views of one buffer, as an optimizer may leave them, are no obstacle."""
    cfg = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=12, num_layers=1, num_heads=2)
    params = init(cfg, seed=0)
    flat = torch.cat([params.layers[0].wq.flatten(), params.layers[0].wk.flatten()])
    wq, wk = flat[:64].view(8, 8), flat[64:].view(8, 8).t().contiguous().t()
    params = params._replace(layers=(params.layers[0]._replace(wq=wq, wk=wk),), lm_head=params.embed)
    to_hf(params, cfg, tmp_path / "out")
    got = tensors_of(tmp_path / "out")
    assert torch.equal(got["model.layers.0.self_attn.k_proj.weight"], wk)
    assert torch.equal(got["lm_head.weight"], params.embed)


def edited(path: Path, edit: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = tensors_of(path)
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("kept", ["both", "head only"])
def test_tied_checkpoint_that_stores_the_head(kept: str, tmp_path: Path) -> None:
    source = save_hf(hf_model("gqa 9/3 tied"), tmp_path / "hf")

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        if kept == "head only":
            del tensors["model.embed_tokens.weight"]

    cfg, params = from_hf(edited(source, edit))
    assert cfg.tie_embeddings
    assert params.lm_head is None
    to_hf(params, cfg, tmp_path / "out", source=source)
    assert_same_bytes(tensors_of(tmp_path / "out"), tensors_of(source))

    save(params, cfg, tmp_path / "own", source=source)  # our format keeps one matrix and the names it had
    assert "lm_head" not in tensors_of(tmp_path / "own")
    to_hf(load(tmp_path / "own")[1], cfg, tmp_path / "again", source=tmp_path / "own")
    convert_checkpoint(tmp_path / "own", tmp_path / "streamed", to="hf")
    for path in (tmp_path / "again", tmp_path / "streamed"):
        assert_same_bytes(tensors_of(path), tensors_of(source))
        assert not any(load_hf(path)[1].values())
    to_hf(params, cfg, tmp_path / "plain")  # without a source: as Transformers writes it
    assert "lm_head.weight" not in tensors_of(tmp_path / "plain")


def test_tied_flag_with_two_different_matrices_is_untied(tmp_path: Path) -> None:
    source = save_hf(hf_model("gqa 9/3 tied"), tmp_path / "hf")
    edited(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.warns(UserWarning, match="differ; they are kept apart"):
        cfg, params = from_hf(source)
    assert not cfg.tie_embeddings
    to_hf(params, cfg, tmp_path / "out", source=source)
    assert_same_bytes(tensors_of(tmp_path / "out"), tensors_of(source))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert from_hf(tmp_path / "out")[0] == cfg


def test_stored_frequencies_are_ignored(tmp_path: Path) -> None:
    source = save_hf(hf_model(), tmp_path / "hf")
    edited(source, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}))
    cfg, params = from_hf(source)
    assert isinstance(params, Params)
    assert cfg.num_heads == 6


@pytest.mark.parametrize("name", EVERY)
def test_streamed_there_and_back(name: str, tmp_path: Path) -> None:
    """Directory to directory says the same as through memory, in both directions."""
    source = save_hf(hf_model(name).to(torch.bfloat16), tmp_path / "hf", max_shard_size="30KB")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    convert_checkpoint(source, tmp_path / "own", to="usp")
    convert_checkpoint(tmp_path / "own", tmp_path / "back", to="hf", max_shard_size="40KB")
    assert_same_bytes(tensors_of(tmp_path / "back"), tensors_of(source))
    cfg, params = from_hf(source)
    again_cfg, again = load(tmp_path / "own")
    assert again_cfg == cfg == from_hf(tmp_path / "back")[0]
    assert_same_bytes(dict(named_leaves(again)), dict(named_leaves(params)))
    to_hf(params, cfg, tmp_path / "out", source=source, max_shard_size="40KB")
    assert {p.name: p.read_bytes() for p in (tmp_path / "back").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()
    }


def test_parameters_have_memory_of_their_own(tmp_path: Path) -> None:
    source = save_hf(hf_model(), tmp_path / "hf")
    _, params = from_hf(source)
    before = params.embed.clone()
    file = source / "model.safetensors"
    with file.open("r+b") as handle:
        handle.seek(-file.stat().st_size // 2, 2)
        handle.write(b"\0" * (file.stat().st_size // 2))
    assert torch.equal(params.embed, before)
    assert not any("model.safetensors" in line for line in Path("/proc/self/maps").read_text().splitlines())
    params.norm.add_(1)
    assert params.layers[0].wq.untyped_storage().nbytes() == params.layers[0].wq.nbytes


def test_a_dtype_that_cannot_hold_the_values_is_refused(tmp_path: Path) -> None:
    source = save_hf(hf_model(), tmp_path / "hf")
    edited(source, lambda t: t["model.norm.weight"].__setitem__(3, 1e6))
    with pytest.raises(ValueError, match=r"dtype=torch.float16 must hold the values of model.norm.weight"):
        convert_checkpoint(source, tmp_path / "out", to="hf", dtype=torch.float16)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]
    convert_checkpoint(source, tmp_path / "out", to="hf", dtype=torch.bfloat16)
    want = {name: value.bfloat16() for name, value in tensors_of(source).items()}
    assert_same_bytes(tensors_of(tmp_path / "out"), want)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
