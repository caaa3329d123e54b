"""Text files -> packed rows: what is read, what is kept apart, what an epoch is."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from usp.tools import text
from usp.tools.text import Packed


def packed(lengths: list[int], *, seq_len: int, seed: int = 0) -> Packed:
    """Document d holds the ids 100 * d, 100 * d + 1, ...: an id tells where it came from."""
    docs = [np.arange(100 * d, 100 * d + n, dtype=np.int32) for d, n in enumerate(lengths)]
    return Packed(docs=docs, seq_len=seq_len, seed=seed)


def real_ids(data: Packed, epoch: int) -> list[int]:
    return [int(t) for row in data.rows(epoch) for t in row.tokens[: row.length]]


def test_epoch_holds_every_token_once() -> None:
    data = packed([5, 1, 13, 2, 7], seq_len=8)
    assert sorted(real_ids(data, 0)) == sorted(int(t) for doc in data.docs for t in doc)
    assert data.rows_per_epoch == len(list(data.rows())) == 4
    assert [row.length for row in data.rows()] == [8, 8, 8, 4]


def test_second_epoch_is_not_empty_and_has_its_own_order() -> None:  # case H60, case D40
    data = packed([5, 1, 13, 2, 7], seq_len=8)
    assert sorted(real_ids(data, 1)) == sorted(real_ids(data, 0))
    assert real_ids(data, 1) != real_ids(data, 0)
    assert real_ids(data, 0) == real_ids(data, 0)  # the first epoch can be read again
    steps = list(islice(data.batches(3), 9))  # 27 rows of 4 an epoch
    assert all(batch.tokens.shape == (3, 8) for batch in steps)
    assert all(text.num_tokens(batch) > 0 for batch in steps)


def test_steps_follow_the_epochs() -> None:  # case H61
    data = packed([5, 1, 13, 2, 7], seq_len=8)
    rows = [row.tokens for epoch in (0, 1, 2) for row in data.rows(epoch)]
    got = [t for batch in islice(data.batches(2), 6) for t in batch.tokens.numpy()]
    np.testing.assert_array_equal(np.stack(got), np.stack(rows))
    later = next(data.batches(2, start=4)).tokens
    assert torch.equal(later, list(islice(data.batches(2), 5))[4].tokens)


def test_order_depends_on_the_seed_alone() -> None:  # case H58: every rank builds the same batch
    lengths = [5, 1, 13, 2, 7]
    assert real_ids(packed(lengths, seq_len=8), 0) == real_ids(packed(lengths, seq_len=8), 0)
    assert real_ids(packed(lengths, seq_len=8), 0) != real_ids(packed(lengths, seq_len=8, seed=1), 0)


def test_documents_are_kept_apart() -> None:  # case H34
    for row in packed([5, 1, 13, 2, 7], seq_len=8).rows():
        assert row.bounds[0] == 0
        assert row.bounds[-1] == 8
        for begin, end in zip(row.bounds, row.bounds[1:], strict=False):
            piece = row.tokens[begin:end]
            if begin < row.length:  # one piece: consecutive ids of one document
                np.testing.assert_array_equal(piece, np.arange(piece[0], piece[0] + len(piece)))


def test_long_document_is_cut_into_pieces() -> None:
    rows = list(packed([19], seq_len=8).rows())
    assert [row.bounds for row in rows] == [[0, 8], [0, 8], [0, 3, 8]]
    assert [row.length for row in rows] == [8, 8, 3]


def test_padding_is_masked_and_has_no_label() -> None:
    batch = next(packed([3], seq_len=8).batches(1))
    assert batch.valid is not None
    assert batch.labels is not None
    assert batch.cu_seqlens is not None
    assert batch.valid.tolist() == [[True] * 3 + [False] * 5]
    assert batch.labels.tolist() == [[0, 1, 2] + [-100] * 5]
    assert [int(edge) for edge in batch.cu_seqlens[0]] == [0, 3, 8]
    assert text.num_tokens(batch) == 3


def test_multi_byte_text_survives(model_dir: Path, tmp_path: Path) -> None:
    words = "Größe 長さ 🙂 — end"
    (tmp_path / "a.txt").write_text(words, encoding="utf-8")
    tokenizer = text.load_tokenizer(model_dir)
    (ids,) = text.encode(text.read_documents([tmp_path / "a.txt"]), tokenizer, vocab_size=300)
    assert (ids[0], ids[-1]) == (0, 1)  # <bos> and <eos>, as this tokenizer defines them
    assert tokenizer.decode(ids[1:-1].tolist()) == words


def test_folders_are_read_recursively_by_suffix(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("z.txt", "a/b/c.md", "a/skip.bin", "a/empty.txt"):
        (tmp_path / name).write_text("" if "empty" in name else name, encoding="utf-8")
    found = text.find_files([tmp_path, tmp_path / "z.txt", tmp_path / "a/skip.bin"], include=(".txt", ".md"))
    assert [p.relative_to(tmp_path).as_posix() for p in found] == [
        "a/b/c.md",
        "a/empty.txt",
        "z.txt",
        "a/skip.bin",
    ]
    assert text.read_documents(found) == ["a/b/c.md", "z.txt", "a/skip.bin"]


def test_bad_data_is_refused(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("Größe".encode("latin-1"))
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"latin\.txt must be UTF-8 text, got byte 0xf6 at offset 2"):
        text.read_documents([tmp_path / "latin.txt"])
    with pytest.raises(ValueError, match=r"empty\.txt must hold text, got 1 empty files"):
        text.read_documents([tmp_path / "empty.txt"])
    with pytest.raises(ValueError, match="must exist"):
        text.find_files([tmp_path / "none"], include=(".txt",))
    with pytest.raises(ValueError, match=r"must hold text files, got none that end in \.md"):
        text.find_files([tmp_path], include=(".md",))
    with pytest.raises(
        ValueError, match=r"token id=\d+ must be below the model's vocabulary, got vocab_size=9"
    ):
        text.encode(["some text"], text.load_tokenizer(model_dir), vocab_size=9)
    with pytest.raises(ValueError, match="must hold a tokenizer"):
        text.load_tokenizer(tmp_path)
