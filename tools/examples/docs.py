"""Data for the examples that every machine has: what Python says about functions of its own."""

from __future__ import annotations

import inspect
import os
import shutil
import string
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import torch

from usp import Batch

CHAT_TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% else %}\
{{ m.content + '<|im_end|>' }}{% endif %}
{% endfor %}"""


class Doc(NamedTuple):
    question: str
    answer: str
    other: str
    """The answer to another question."""


def docs(num: int = 24) -> list[Doc]:
    """Questions and answers, the same in every process; answers are a few words to a few lines long."""
    found = {}
    for module in (os, os.path, shutil, string, textwrap, inspect):
        for name, value in sorted(vars(module).items()):
            text = inspect.getdoc(value) if inspect.isroutine(value) and name[0] != "_" else None
            if text:
                found[name] = text.split("\n\n")[0]
    chosen = list(found.items())[:: max(1, len(found) // num)][:num]
    answers = [answer for _, answer in chosen]
    return [
        Doc(f"What does {name} do?", answer, other)
        for (name, answer), other in zip(chosen, answers[1:] + answers[:1], strict=True)
    ]


def micro_batches(model: Path | None, *, num_docs: int = 4) -> list[dict[str, Any]]:
    """Collated batches of documents laid end to end: tokens and labels [1, S], and the documents' borders.

    Tokens are those of the model's tokenizer; bytes without a model.
    """
    from transformers import AutoTokenizer, DataCollatorWithFlattening

    tokenizer: Any = None if model is None else AutoTokenizer.from_pretrained(model)
    texts = [f"{doc.question}\n{doc.answer}" for doc in docs()]
    tokens = [list(text.encode()) if model is None else tokenizer(text)["input_ids"] for text in texts]
    Flattening: Any = DataCollatorWithFlattening
    collate = Flattening(return_flash_attn_kwargs=True)
    rows = [{"input_ids": ids} for ids in tokens]
    made = [collate(rows[i : i + num_docs]) for i in range(0, len(rows), num_docs)]
    return [
        {"input_ids": batch["input_ids"], "labels": batch["labels"], "cu_seqlens": batch["cu_seq_lens_q"]}
        for batch in made
    ]


def pairs(model: Path, num: int = 6) -> Batch:
    """One row of documents: to each question the right answer, then a wrong one. Questions are no targets."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokens, labels, edges = [], [], [0]
    for doc in docs(num):
        for answer in (doc.answer, doc.other):
            texts = (f"{doc.question}\n", answer)
            prompt, said = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
            tokens += prompt + said
            labels += [-100] * len(prompt) + said
            edges.append(len(tokens))
    return Batch(torch.tensor([tokens]), torch.tensor([labels]), [edges])
