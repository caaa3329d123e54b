"""Text files -> packed batches of token ids.

Each file is one document. The documents of an epoch are laid end to end in an order drawn from (seed, epoch)
and cut into rows of `seq_len` tokens, so that no row but the last of an epoch has padding. A document that
crosses the end of a row, or is longer than a row, becomes several pieces, and every piece is a document of
its own: `cu_seqlens` marks it, attention and the label shift stop at its borders, its positions start at 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from usp import Batch

IGNORED = -100
Ids = npt.NDArray[np.int32]


def find_files(paths: Sequence[Path], *, include: Sequence[str]) -> list[Path]:
    """The files to read, sorted within each folder, each once. Raises ValueError when there are none."""
    if not paths:
        raise ValueError("data= must name at least one file or folder, got none. Add paths after --data.")
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            matching = sorted(p for p in path.rglob("*") if p.suffix in include and p.is_file())
            if not matching:
                raise ValueError(
                    f"data={path} must hold text files, got none that end in {' '.join(include)}. "
                    "Give another folder, or the suffixes to read with --include."
                )
            found.update(dict.fromkeys(matching))
        elif path.is_file():
            found[path] = None
        else:
            raise ValueError(f"data={path} must exist, got no such file or folder. Correct the path.")
    return list(found)


def read_documents(files: Sequence[Path]) -> list[str]:
    """One text for each file that has some. Raises ValueError for a file that is not UTF-8, or no text."""
    texts = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as e:
            raise ValueError(
                f"data={path} must be UTF-8 text, got byte 0x{e.object[e.start]:02x} at offset {e.start}. "
                "Convert or leave out this file."
            ) from None
        except OSError as e:
            raise ValueError(
                f"data={path} must be readable, got: {e.strerror}. Correct its rights."
            ) from None
        if text:
            texts.append(text)
    if not texts:
        raise ValueError(f"data={files[0]} must hold text, got {len(files)} empty files. Give other files.")
    return texts


def encode(texts: Sequence[str], tokenizer: Any, *, vocab_size: int, progress: bool = False) -> list[Ids]:
    """Token ids of each text, with the marks the tokenizer itself puts around a text (BOS, EOS, or none).

    Raises ValueError for an id that the model has no embedding for.
    """
    docs = []
    for text in tqdm(texts, desc="tokenize", unit="file", disable=not progress, leave=False):
        ids = np.asarray(tokenizer(text, verbose=False)["input_ids"], dtype=np.int32)
        if ids.size and int(ids.max()) >= vocab_size:
            raise ValueError(
                f"token id={int(ids.max())} must be below the model's vocabulary, got "
                f"vocab_size={vocab_size}. Use the tokenizer that belongs to the model."
            )
        if ids.size:
            docs.append(ids)
    if not docs:
        raise ValueError("data must hold tokens, got none after tokenizing. Give other files.")
    return docs


class Row(NamedTuple):
    tokens: Ids  # [S]
    bounds: list[int]  # borders of the documents in it, from 0 to S
    length: int  # tokens that are not padding


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Documents as rows of `seq_len` tokens; every epoch can be read any number of times."""

    docs: Sequence[Ids]
    seq_len: int
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(doc) for doc in self.docs)

    @property
    def num_positions(self) -> int:
        """A piece of a document in a row has at most so many."""
        return min(self.seq_len, max(len(doc) for doc in self.docs))

    @property
    def rows_per_epoch(self) -> int:
        return -(-self.num_tokens // self.seq_len)

    def rows(self, epoch: int = 0) -> Iterator[Row]:
        """The rows of one epoch: every token of every document once."""
        pieces: list[Ids] = []
        room = self.seq_len
        for index in np.random.default_rng((self.seed, epoch)).permutation(len(self.docs)):
            rest = self.docs[index]
            while len(rest):
                pieces.append(rest[:room])
                rest = rest[room:]
                room -= len(pieces[-1])
                if room == 0:
                    yield _row(pieces, self.seq_len)
                    pieces, room = [], self.seq_len
        if pieces:
            yield _row(pieces, self.seq_len)

    def batches(self, num_rows: int, *, start: int = 0) -> Iterator[Batch]:
        """Batches of `num_rows` rows without end, from step `start` on; a batch may span two epochs.

        Every rank builds the same global batch; `shard_batch` gives each its part.
        """
        first, skipped = divmod(start * num_rows, self.rows_per_epoch)
        endless = (row for epoch in count(first) for row in self.rows(epoch))
        stream = islice(endless, skipped, None)
        while True:
            yield to_batch(list(islice(stream, num_rows)))


def _row(pieces: list[Ids], seq_len: int) -> Row:
    bounds = [0, *np.cumsum([len(p) for p in pieces]).tolist()]
    length = bounds[-1]
    if length < seq_len:  # the last row of an epoch: the padding is a document of its own
        pieces, bounds = [*pieces, np.zeros(seq_len - length, np.int32)], [*bounds, seq_len]
    return Row(np.concatenate(pieces), bounds, length)


def to_batch(rows: Sequence[Row]) -> Batch:
    """Rows -> one global batch: tokens, labels (padding ignored), borders and the mask of real tokens."""
    tokens = torch.from_numpy(np.stack([row.tokens for row in rows])).long()  # [B, S]
    lengths = torch.tensor([row.length for row in rows])
    valid = torch.arange(tokens.shape[1]) < lengths[:, None]
    return Batch(
        tokens=tokens,
        labels=tokens.masked_fill(~valid, IGNORED),
        cu_seqlens=tuple(torch.tensor(row.bounds, dtype=torch.int32) for row in rows),
        valid=valid,
    )


def num_tokens(batch: Batch) -> int:
    """Tokens of a global batch that are not padding."""
    return batch.tokens.numel() if batch.valid is None else int(batch.valid.sum())


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a Hugging Face directory, from its files alone. Raises ValueError when it has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as e:  # Transformers raises many kinds here, all of them about these files
        raise ValueError(
            f"model={path} must hold a tokenizer, got: {str(e).splitlines()[0]}. Add tokenizer.json and "
            "tokenizer_config.json."
        ) from None
