"""Text and tasks to fine-tune a language model on, and scores of the tasks.

Text comes with every Python: the topics of ``pydoc`` and sources of the standard library. Tasks are
drawn: sorting words, sums, lengths in another unit, dates in words. A loss counts all tokens of
text, and the answers of tasks. An answer is right if greedy decoding writes exactly this answer,
its end included: each of its tokens is the most likely one behind the right ones before it.
"""

from __future__ import annotations

import argparse
import calendar
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pretrained import english
from torch import Tensor, nn

IGNORED = -100  # a target that no loss counts
Example = tuple[str, str, str]  # kind, question, answer


@dataclass(frozen=True, slots=True)
class Blocks:
    """N sequences of T tokens.

    Attributes:
        tokens: ``[N, T]`` int64.
        targets: ``[N, T]`` int64, next tokens, or ``IGNORED``.
        example: ``[N, T]`` int64, index of the example whose answer the target belongs to, or -1.
        kinds: Kind of each example.
    """

    tokens: Tensor
    targets: Tensor
    example: Tensor
    kinds: tuple[str, ...] = ()

    def to(self, device: torch.device) -> Blocks:
        """Move the sequences."""
        moved = (part.to(device) for part in (self.tokens, self.targets, self.example))
        return Blocks(*moved, self.kinds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Text and tasks, equally many sequences: to train on, and to validate on."""

    text: Blocks
    task: Blocks
    val_text: Blocks
    val_task: Blocks

    def to(self, device: torch.device) -> Data:
        """Move all of it."""
        return Data(**{name: getattr(self, name).to(device) for name in Data.__slots__})


def load_data(tokenizer: Any, seq: int, train: int, val: int) -> Data:
    """Return ``train`` sequences of text and of tasks, and ``val`` of each to validate on."""
    text = text_blocks(tokenizer, seq, train + val)
    order = torch.randperm(train + val, generator=torch.Generator().manual_seed(0))
    seen, unseen = order[:train], order[train:]
    return Data(
        text=Blocks(text.tokens[seen], text.targets[seen], text.example[seen]),
        task=task_blocks(tokenizer, seq, train, examples(seed=1)),
        val_text=Blocks(text.tokens[unseen], text.targets[unseen], text.example[unseen]),
        val_task=task_blocks(tokenizer, seq, val, examples(seed=2)),
    )


# --- text -----------------------------------------------------------------------------------------


def code() -> str:
    """Return sources of the standard library."""
    folder = Path(argparse.__file__).parent
    files = sorted(folder.glob("*.py"))
    random.Random(0).shuffle(files)
    return "\n\n".join(path.read_text(encoding="utf-8") for path in files[:60])


def text_blocks(tokenizer: Any, seq: int, count: int) -> Blocks:
    """Return sequences of text, half of them English and half code."""
    rows = []
    for source, wanted in ((english(), count // 2), (code(), count - count // 2)):
        enough = source[: 16 * wanted * (seq + 1)]  # about four times as much as needed
        ids = torch.tensor(tokenizer(enough)["input_ids"])
        blocks = ids[: len(ids) // (seq + 1) * (seq + 1)].view(-1, seq + 1)
        if len(blocks) < wanted:
            raise ValueError(
                f"the text has {len(blocks)} sequences of {seq} tokens, not {wanted}: give fewer "
                "or shorter ones"
            )
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))
        rows.append(blocks[order[:wanted]])
    rows_NT = torch.cat(rows)
    tokens, targets = rows_NT[:, :-1].contiguous(), rows_NT[:, 1:].contiguous()
    return Blocks(tokens, targets, torch.full_like(targets, -1))


# --- tasks ----------------------------------------------------------------------------------------


def examples(seed: int) -> Iterator[Example]:
    """Draw questions and their answers without end."""
    draw = random.Random(seed)
    words = sorted(set(re.findall(r"\b[a-z]{3,8}\b", english())))
    kinds = {"sort": _sort, "sum": _sum, "length": _length, "date": _date}
    while True:
        kind = draw.choice(list(kinds))
        yield kind, *kinds[kind](draw, words)


def _sort(draw: random.Random, words: list[str]) -> tuple[str, str]:
    chosen = draw.sample(words, draw.randint(2, 5))
    return f"Sort these words: {', '.join(chosen)}.\n", f" {', '.join(sorted(chosen))}.\n"


def _sum(draw: random.Random, words: list[str]) -> tuple[str, str]:
    thing = draw.choice(("apples", "books", "coins", "stamps", "stones", "tickets"))
    had, more = draw.randint(2, 60), draw.randint(2, 60)
    return f"Ann has {had} {thing} and gets {more} more. How many?\n", f" {had + more}.\n"


def _length(draw: random.Random, words: list[str]) -> tuple[str, str]:
    metres, rest = draw.randint(1, 30), draw.randint(1, 99)
    return f"How many cm are {metres} m and {rest} cm?\n", f" {100 * metres + rest}.\n"


def _date(draw: random.Random, words: list[str]) -> tuple[str, str]:
    year, month, day = draw.randint(1900, 2029), draw.randint(1, 12), draw.randint(1, 28)
    name = calendar.month_name[month]
    return f"Write {year}-{month:02}-{day:02} in words.\n", f" {day} {name} {year}.\n"


def task_blocks(tokenizer: Any, seq: int, count: int, drawn: Iterator[Example]) -> Blocks:
    """Return sequences of whole examples, with padding behind the last one of each."""
    rows_N1T = torch.full((count, seq + 1), tokenizer.eos_token_id)
    answers = torch.full((count, seq + 1), -1)  # of which example a token is an answer
    kinds: list[str] = []
    for row, owner in zip(rows_N1T, answers, strict=True):
        at = 0
        while True:
            kind, question, answer = next(drawn)
            asked = tokenizer(f"{question}Answer:")["input_ids"]
            ids = asked + tokenizer(answer)["input_ids"]
            if at + len(ids) > seq + 1:
                break
            row[at : at + len(ids)] = torch.tensor(ids)
            owner[at + len(asked) : at + len(ids)] = len(kinds)
            kinds.append(kind)
            at += len(ids)
        if at == 0:
            raise ValueError(f"{len(ids)} tokens of an example do not fit {seq}: give longer ones")
    example = answers[:, 1:].contiguous()
    targets = rows_N1T[:, 1:].masked_fill(example < 0, IGNORED)
    return Blocks(rows_N1T[:, :-1].contiguous(), targets, example, tuple(kinds))


# --- losses and scores ----------------------------------------------------------------------------


def losses(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean loss of each sequence over its counted tokens, ``[B]`` fp32."""
    each = nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1).float(),
        targets_BT.flatten(),
        ignore_index=IGNORED,
        reduction="none",
    )
    return each.view_as(targets_BT).sum(1) / (targets_BT != IGNORED).sum(1)


@torch.no_grad()
def evaluate(model: nn.Module, blocks: Blocks, batch: int) -> dict[str, float]:
    """Return the mean loss of sequences and, for tasks, percent of right answers, also by kind."""
    device = blocks.tokens.device
    wrong = torch.zeros(len(blocks.kinds) + 1, dtype=torch.int64, device=device)
    found = []
    for tokens, targets, example in zip(
        *(part.split(batch) for part in (blocks.tokens, blocks.targets, blocks.example)),
        strict=True,
    ):
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=tokens, use_cache=False).logits
        found.append(losses(logits, targets))
        missed = (logits.argmax(-1) != targets).long()
        wrong.index_add_(0, (example + 1).flatten(), missed.flatten())  # 0: of no example
    result = {"loss": float(torch.cat(found).double().mean())}
    if blocks.kinds:
        right = (wrong[1:] == 0).tolist()
        result["accuracy"] = 100 * sum(right) / len(right)
        for kind in sorted(set(blocks.kinds)):
            own = [is_right for is_right, of in zip(right, blocks.kinds, strict=True) if of == kind]
            result[kind] = 100 * sum(own) / len(own)
    return result
