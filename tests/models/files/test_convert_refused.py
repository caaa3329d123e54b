"""Damaged input is named in one error, and nothing is left behind by a write that fails."""

import json
import os
import pickle
import re
import shlex
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.tiny import hf_model, save_hf
from usp.mesh import TABLES
from usp.models import from_hf, init, load, save, to_hf
from usp.models.config import LlamaConfig
from usp.models.files.stream import convert_checkpoint
from usp.models.files.writer import Entry, parse_size, plan_files

CFG = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=12, num_layers=1, num_heads=2)
WQ = "model.layers.0.self_attn.q_proj.weight"


def sharded(path: Path) -> Path:
    return save_hf(hf_model(), path, max_shard_size="60KB")


def last(path: Path) -> Path:
    return sorted(path.glob("model-*.safetensors"))[-1]


def reindex(path: Path, edit: Callable[[dict[str, str]], None]) -> None:
    index = path / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    edit(value["weight_map"])
    index.write_text(json.dumps(value))


def truncate(path: Path) -> None:
    os.truncate(last(path), last(path).stat().st_size - 8)


def remove_shard(path: Path) -> None:
    last(path).unlink()


def cut_header(path: Path) -> None:
    last(path).write_bytes(b"\x07")


def surplus_in_file(path: Path) -> None:
    held = load_file(last(path))
    save_file({**held, "model.stray": torch.ones(2)}, last(path))


def listed_only(path: Path) -> None:
    reindex(path, lambda m: m.update({"model.ghost": last(path).name}))


def outside(path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(60)}, path.parent / "evil.safetensors")
    reindex(path, lambda m: m.update({"model.norm.weight": "../evil.safetensors"}))


def absolute(path: Path) -> None:
    reindex(path, lambda m: m.update({"model.norm.weight": str(path / "model.safetensors")}))


def not_an_index(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text('{"weight_map": [1, 2]}')


def both_kinds(path: Path) -> None:
    save_file({"a": torch.ones(1)}, path / "model.safetensors")


def in_two_files(path: Path) -> None:
    held = load_file(last(path))
    first = sorted(path.glob("model-*.safetensors"))[0]
    save_file({**load_file(first), **held}, first)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated file": (truncate, "truncated or damaged"),
    "missing file": (remove_shard, "is missing"),
    "cut header": (cut_header, "truncated or damaged"),
    "tensor not in the index": (surplus_in_file, "model.stray"),
    "index names what is not there": (listed_only, "model.ghost"),
    "index leaves the directory": (outside, "'../evil.safetensors' must be a .safetensors file inside"),
    "absolute path in the index": (absolute, "must be a .safetensors file inside"),
    "index of another shape": (not_an_index, "must be an index with a weight_map"),
    "two checkpoints": (both_kinds, "got both model.safetensors and"),
    "tensor twice": (in_two_files, "is in both"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_files(case: str, tmp_path: Path) -> None:
    source = sharded(tmp_path / "hf")
    from_hf(source)
    damage, named = DAMAGE[case]
    damage(source)
    with pytest.raises(ValueError, match=r".") as error:
        from_hf(source)
    assert named in str(error.value)


def test_every_problem_in_one_error(tmp_path: Path) -> None:
    source = save_hf(hf_model(), tmp_path / "hf")
    tensors = load_file(source / "model.safetensors")
    tensors["stray.weight"] = torch.ones(3)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    tensors[WQ] = tensors[WQ].to(torch.int8)
    del tensors["lm_head.weight"]  # an untied model without its head is refused, never tied in silence
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing tensors: lm_head\.weight") as error:
        from_hf(source)
    message = str(error.value)
    assert "surplus tensors: stray.weight" in message
    assert "model.norm.weight (59,) instead of (60,)" in message
    assert f"{WQ} I8" in message


def test_many_names_are_shortened(tmp_path: Path) -> None:
    source = save_hf(hf_model(), tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"missing tensors: model\.layers\.2\..* and 3 more"):
        from_hf(source)


def test_every_kind_of_problem_in_one_error(tmp_path: Path) -> None:
    """Configuration, index, files and tensors; what a lost file holds is not called missing as well."""
    source = sharded(tmp_path / "hf")
    first, *_, end = sorted(source.glob("model-*.safetensors"))
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(first)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name].flatten(), "model.stray": torch.ones(1)}, first)
    end.unlink()
    outside(source)
    with pytest.raises(ValueError, match=r".") as error:
        from_hf(source)
    message = str(error.value)
    for part in ("evil.safetensors", f"file {end.name} is missing", "model.stray", "wrong shapes:"):
        assert part in message
    assert "missing tensors" not in message
    (source / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    with pytest.raises(ValueError, match=rf"hidden_act='gelu'.*evil.safetensors.*file {end.name} is missing"):
        from_hf(source)


class Bomb:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, ("exploded",)


def test_pickle_is_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = save_hf(hf_model(), tmp_path / "hf")
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match=r"only pickle checkpoints \(pytorch_model.bin\)"):
        from_hf(source)
    with pytest.raises(ValueError, match=r"only pickle checkpoints \(pytorch_model.bin\)"):
        convert_checkpoint(source, tmp_path / "out", to="usp")
    reindexed = {"metadata": {}, "weight_map": {WQ: "pytorch_model.bin"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(reindexed))
    with pytest.raises(ValueError, match=r"'pytorch_model.bin' must be a .safetensors file"):
        from_hf(source)
    assert not (tmp_path / "exploded").exists()


def test_the_command_that_is_named_converts_a_pickle(tmp_path: Path) -> None:
    model = hf_model()
    source = save_hf(model, tmp_path / "it's here")
    (source / "model.safetensors").unlink()
    torch.save(model.state_dict(), source / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"convert them first: (python -c .*)\. Correct") as error:
        from_hf(source)
    command = re.search(r"convert them first: python (-c .*?)\. Correct", str(error.value))
    assert command is not None
    flag, code = shlex.split(command[1])  # as a shell would, quotes in the path and all
    assert flag == "-c"
    exec(code, {})
    cfg, params = from_hf(f"{source}-safetensors")
    assert cfg.num_heads == 6
    assert torch.equal(params.embed, model.model.embed_tokens.weight)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"vocab_size": 1, "vocab_size": 2}', "[" * 10**5, "\xff"])
def test_unreadable_config(text: str, tmp_path: Path) -> None:
    source = save_hf(hf_model(), tmp_path / "hf")
    (source / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"config\.json"):
        from_hf(source)


def test_not_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"meta-llama/.*must be a checkpoint directory"):
        from_hf("meta-llama/Llama-3.2-1B")
    with pytest.raises(ValueError, match=r"usp.json"):
        load(tmp_path)
    save(init(CFG, seed=0), CFG, tmp_path / "own")
    (tmp_path / "own" / "usp.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format=99"):
        load(tmp_path / "own")


def test_existing_target_is_kept(tmp_path: Path) -> None:
    params = init(CFG, seed=0)
    target = tmp_path / "out"
    target.mkdir()
    to_hf(params, CFG, target)  # empty: fine
    before = {p.name: p.read_bytes() for p in target.iterdir()}
    for write in (to_hf, save):
        with pytest.raises(ValueError, match="must be new or an empty folder"):
            write(init(CFG, seed=1), CFG, target)
    assert {p.name: p.read_bytes() for p in target.iterdir()} == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="must be new or an empty folder"):
        to_hf(params, CFG, tmp_path / "file")


def test_failing_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = []

    def full_disk(file: FileIO, data: memoryview) -> None:
        saved.append(file.name)
        if len(saved) == 7:
            raise OSError("No space left on device")
        file.write(data)

    monkeypatch.setattr("usp.models.files.writer.write_all", full_disk)
    with pytest.raises(OSError, match="No space left"):
        to_hf(init(CFG, seed=0), CFG, tmp_path / "deep" / "out", max_shard_size=300)
    assert list((tmp_path / "deep").iterdir()) == []
    assert len(set(saved)) == 3  # it was the third file


def test_params_that_do_not_fit(tmp_path: Path) -> None:
    params = init(CFG, seed=0)
    wrong = params._replace(norm=torch.ones(9), lm_head=None)
    with pytest.raises(ValueError, match=r"lm_head is missing; norm has shape \(9,\) instead of \(8,\)"):
        to_hf(wrong, CFG, tmp_path / "out")
    with pytest.raises(ValueError, match="mesh=None must be given together"):
        to_hf(params, CFG, tmp_path / "out", table=TABLES["ulysses"])
    with pytest.raises(ValueError, match=r"source='.*nowhere' must be a model directory"):
        to_hf(params, CFG, tmp_path / "out", source=tmp_path / "nowhere")
    other = save_hf(hf_model("qwen2", use_sliding_window=True, max_window_layers=0), tmp_path / "qwen")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "final_logit_softcapping": 30.0}))
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        to_hf(params, CFG, tmp_path / "out", source=other)
    assert not (tmp_path / "out").exists()


def test_sizes() -> None:
    assert [parse_size(s) for s in (7, "7", "5GB", "1.5 kB", "2GiB")] == [7, 7, 5 * 10**9, 1500, 2**31]
    for bad in (0, -1, "5XB", "GB", "", "0.1"):
        with pytest.raises(ValueError, match="max_shard_size="):
            parse_size(bad)
    entries = [Entry(str(i), (n,), torch.uint8) for i, n in enumerate((4, 4, 3, 20, 1, 8))]
    files = plan_files(entries, stem="m", max_bytes=8)
    assert [[e.num_bytes for e in group] for group in files.values()] == [[4, 4], [3], [20], [1], [8]]
    assert list(plan_files(entries, stem="m", max_bytes=40)) == ["m.safetensors"]
