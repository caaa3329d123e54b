"""Conversion on several ranks: each reads its part, rank 0 writes, a failure is everybody's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.models.batches import ONE
from tests.models.files.bytes_of import assert_same_bytes, tensors_of
from tests.models.files.run_convert import LENGTHS, four, logits_of, two
from tests.models.tiny import hf_model, save_hf
from tests.ranks import run_ranks
from usp.models import from_hf, load, named_leaves, save

HEADERS = 100_000  # bytes a rank reads beside tensors: headers, twice in places, config and index


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model with a vocabulary that no mesh divides; again with its head stored too; and ours."""
    folder = tmp_path_factory.mktemp("sources")
    model = hf_model("gqa 9/3 tied", vocab_size=9001, num_hidden_layers=8).to(torch.bfloat16)
    save_hf(model, folder / "hf", max_shard_size="300KB")
    save_hf(model, folder / "twice")
    tensors = tensors_of(folder / "twice")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "twice" / "model.safetensors", metadata={"format": "pt"})
    cfg, params = from_hf(folder / "hf")
    save(params, cfg, folder / "own")
    for name in LENGTHS:
        save_hf(hf_model(name), folder / name)
    return folder


@pytest.fixture(scope="module")
def of_two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    out = tmp_path_factory.mktemp("two")
    return run_ranks(two, 2, folder, out, timeout=400), out


@pytest.fixture(scope="module")
def of_four(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    out = tmp_path_factory.mktemp("four")
    return run_ranks(four, 4, folder, out, timeout=400), out


def total_of(path: Path) -> int:
    return sum(t.nbytes for t in tensors_of(path).values())


@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_reads_its_part_and_rank_0_writes(
    world: int, folder: Path, request: pytest.FixtureRequest
) -> None:
    results, out = request.getfixturevalue({2: "of_two", 4: "of_four"}[world])
    total = total_of(folder / "hf")
    for result in results:
        assert total / world * 0.97 < result["read"] < total / world * 1.03 + HEADERS
    assert_same_bytes(tensors_of(out / "hf"), tensors_of(folder / "hf"))
    assert_same_bytes(dict(named_leaves(load(out / "own")[1])), dict(named_leaves(from_hf(folder / "hf")[1])))


def test_two_copies_of_a_tied_matrix_are_compared_in_parts(
    folder: Path, of_two: tuple[list[dict[str, Any]], Path]
) -> None:
    matrix = 9001 * 72 * 2
    for result in of_two[0]:  # its part of the model, and half of each copy
        assert result["twice"] < total_of(folder / "hf") / 2 * 1.03 + matrix + HEADERS


def test_a_failure_is_raised_on_every_rank(of_two: tuple[list[dict[str, Any]], Path]) -> None:
    results, out = of_two
    for messages in (result["refused"] for result in results):
        kinds = [m.split(":")[0] for m in messages]
        assert kinds == ["ValueError", "ValueError", "OSError", "ValueError", "ValueError"]
        assert messages[0].startswith("ValueError: rank 0: path=")
        assert "must be new or an empty folder" in messages[0]
        assert "rank 1: params must be the tree of cfg: norm has shape" in messages[1]
        assert messages[2] == "OSError: rank 0: No space left on device"
        assert "rank 0: path=" in messages[3]
        assert "; rank 1: path=" in messages[3]
        assert "must hold the same checkpoint for every rank, got another one on ranks [1]" in messages[4]
    assert {path.name for path in out.iterdir()} == {"hf", "own", "shared"}  # no target, no scratch folder


def test_files_are_dealt_over_ranks(folder: Path, of_two: tuple[list[dict[str, Any]], Path]) -> None:
    results, out = of_two
    assert len(list((out / "shared").glob("params-*.safetensors"))) > 2
    assert_same_bytes(tensors_of(out / "shared"), tensors_of(folder / "own"))
    reads = [result["shared"] for result in results]
    assert sum(reads) < total_of(folder / "hf") + 2 * HEADERS  # no tensor is read twice
    assert min(reads) > 100_000  # and none does it all


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_and_windows_are_those_of_the_whole_sequence(
    name: str, folder: Path, of_two: tuple[list[dict[str, Any]], Path]
) -> None:
    want = logits_of(folder / name, ONE)
    for result in of_two[0]:
        # float64: the same products, summed over heads in another order
        torch.testing.assert_close(result["logits"][name], want, atol=1e-10, rtol=0)


def test_another_mesh_reads_it(folder: Path, of_four: tuple[list[dict[str, Any]], Path]) -> None:
    assert_same_bytes(tensors_of(of_four[1] / "reloaded"), tensors_of(folder / "hf"))


def test_one_error_for_all(of_two: tuple[list[dict[str, Any]], Path]) -> None:
    mine = " (cause known)"
    for rank, result in enumerate(of_two[0]):
        assert result["agree"] == [
            "fine",
            f"ValueError: rank 1: one{mine if rank == 1 else ''}",
            f"OSError: rank 0: disk; rank 1: full{mine}",
            f"ValueError: same{mine}",
            f"RuntimeError: rank 0: 'bug'{mine if rank == 0 else ''}",
            f"RuntimeError: rank 0: a; rank 1: b{mine}",
            "alone",
        ]


def test_agreement_of_a_part_of_the_ranks(of_four: tuple[list[dict[str, Any]], Path]) -> None:
    for rank, result in enumerate(of_four[0]):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        said = f"rank {pair[0]}: integer division or modulo by zero"
        assert result["agree"] == ((rank, 4), [0, 1, 2, 3], (rank % 2, 2), pair, said)
