"""The examples run as their docstrings say, and do on two ranks what they do on one."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tools.run_examples import EXAMPLES, ROOT, command_of, launch

# float32 sums of the same terms in another order, through two layers and three steps of AdamW
TOLERANCE = 1e-5
FASTER = ["--steps", "3", "--lr", "3e-3"]
CHOSEN: dict[str, list[str]] = {
    "any_model": FASTER,
    "functional": FASTER,
    "trainer": FASTER,
    "sft": ["--steps", "2"],
    "accelerate_loop": FASTER,
    "lora": FASTER,
    "dpo": ["--steps", "3", "--lr", "3e-3"],
    "deepspeed_engine": FASTER,
    "shard_map_module": [],
}
NOT_RUN_HERE = {"__init__", "docs", "start", "tp_sp"}
RESULTS = ROOT / "tools" / "bench" / "results" / "hf-curves.json"


@pytest.fixture(scope="module")
def results(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("examples")
    for name in ("two", "one"):
        shutil.copytree(model_dir, folder / name / "runs" / "quickstart" / "model")
    return folder, launch(folder, CHOSEN)


def test_two_ranks_as_one(results: Any) -> None:
    _, (first, second) = results
    one = first["one"] | second["one"]
    one["deepspeed_engine"] = one["accelerate_loop"]  # the same steps
    assert first["two"] == second["two"]  # every rank reports the same
    for name, losses in first["two"].items():
        if name == "shard_map_module":
            assert max(losses) < 1e-12  # compared with one rank inside, in float64
            continue
        assert losses == pytest.approx(one[name], rel=TOLERANCE), name
        if FASTER[2] in CHOSEN[name]:
            assert losses[-1] < losses[0] * 0.999, name


def test_what_they_leave_behind(results: Any) -> None:
    """Plain Hugging Face directories, equal to those of one process; one rank prints and saves."""
    from safetensors.torch import load_file

    folder, (first, second) = results
    saved = ["trainer/hf", "sft/hf", "accelerate/hf", "functional/hf", "lora/merged"]
    names = set(load_file(folder / "two/runs/quickstart/model/model.safetensors"))
    for path in saved:
        two, one = (load_file(folder / kind / "runs" / path / "model.safetensors") for kind in ("two", "one"))
        assert set(two) == names, path
        config = json.loads((folder / "two" / "runs" / path / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"], path
        assert "usp" not in json.dumps(config), path
        for name, value in one.items():
            assert (two[name] - value).abs().max() <= 1e-2 * value.abs().max(), (path, name)
    assert (folder / "two" / "runs" / "lora" / "adapter" / "adapter_model.safetensors").is_file()
    assert (folder / "two" / "runs" / "accelerate" / "state" / "model.safetensors").is_file()
    two_ranks = [log["log"].split("usp one process")[0] for log in (first, second)]
    assert "'loss':" in two_ranks[0]
    assert "'loss':" not in two_ranks[1]


def test_each_is_short_and_is_run_here() -> None:
    files = {file.stem: file for file in EXAMPLES.glob("*.py")}
    assert set(files) == set(CHOSEN) | NOT_RUN_HERE
    for name in CHOSEN:
        text = files[name].read_text(encoding="utf-8")
        assert len(text.splitlines()) < 60, name
        assert command_of(name)[0] == "2"


def test_named_in_the_readmes() -> None:
    """Every example is linked, every link leads somewhere, every command is that of a docstring."""
    readme, hf = (ROOT / "README.md", ROOT / "models" / "hf" / "README.md")
    for page in (readme, hf):
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / link).exists(), (page, link)
        for example, arguments in re.findall(r"-m usp\.tools\.examples\.(\w+)([^`\n]*)", text):
            assert arguments.split() == command_of(example)[1:], example
    linked = set(re.findall(r"tools/examples/(\w+)\.py", readme.read_text(encoding="utf-8")))
    assert linked >= set(CHOSEN) | {"tp_sp"}


def test_curves_are_one_curve() -> None:
    """The recorded runs by every entry point differ from Transformers' own by float32's rounding."""
    recorded = json.loads(RESULTS.read_text(encoding="utf-8"))
    largest = recorded["largest_difference"]
    assert len(largest) >= 13
    for name, found in largest.items():
        assert found["first step"] < 2.5e-7, name
        assert max(found.values()) < 1e-6, name


def test_tp_sp_equals_one_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "usp.tools.examples.tp_sp"],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    first, *rows, last = done.stdout.strip().splitlines()
    assert first.split() == ["ulysses", "tp_sp"]
    assert any(row.startswith("attn_x") for row in rows)
    assert not any(row.startswith("tokens") for row in rows)  # alike in both
    assert last.startswith("loss on 2 ranks")
