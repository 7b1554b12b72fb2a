"""What the codec of gradients costs in split learning: loss after fine-tuning, by codec and seed.

    python benchmarks/split_gradients.py --text docs --json split_gradients.json

A small Llama is pretrained on the Python standard library; then a client fine-tunes LoRA on other
text at a server in the same process, once per codec of gradients and seed. Seeds choose adapters
and batches, the same for all codecs, so losses are compared by pairs: the mean difference to
gradients in full precision, and its standard error.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import table, write_report
from corpus import standard_library
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from split_learning.frozen import FrozenModel
from split_learning.model import SplitModel
from split_learning.models import read_config
from split_learning.session import Session
from split_learning.settings import SplitSettings
from split_learning.wire.client import connect
from split_learning.wire.identity import NO_AUTHENTICATION
from split_learning.wire.server import Server

CODECS = ("none", "bf16", "int8", "int6", "int5", "int4", "int3")


def read_text(folder: Path, tokens: int) -> tuple[Tensor, Tensor]:
    """Return blocks of bytes ``[N, tokens]`` to train on, and others of other files."""
    files = sorted(path for path in folder.rglob("*.md") if path.is_file())
    if len(files) < 4:
        raise ValueError(f"{folder} has {len(files)} .md files; at least 4 are needed")
    held_out = files[::4]
    parts = []
    for chosen in ([path for path in files if path not in held_out], held_out):
        text = np.frombuffer(b"".join(path.read_bytes() for path in chosen), dtype=np.uint8)
        blocks = len(text) // tokens
        parts.append(torch.from_numpy(text[: blocks * tokens].reshape(blocks, tokens).copy()))
    return parts[0].long(), parts[1].long()


def pretrain(folder: Path, args: argparse.Namespace) -> None:
    """Save a Llama that has seen Python."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(read_config("small"))
    blocks = standard_library(args.tokens - 1).train
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    drawn = np.random.default_rng(0)
    for step in range(args.pretrain_steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 50)
        ids = torch.from_numpy(
            blocks[drawn.integers(len(blocks), size=args.batch)].astype(np.int64)
        )
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"pretrained to {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)


def fine_tune(
    settings: SplitSettings, seed: int, data: tuple[Tensor, Tensor], args: argparse.Namespace
) -> float:
    """Return the loss on held-out text after fine-tuning."""
    frozen = FrozenModel(settings, torch.device("cpu"))
    with Server(
        ("127.0.0.1", 0),
        NO_AUTHENTICATION,
        lambda: Session(frozen).answer,
        frozen.agreement(),
    ) as server:
        torch.manual_seed(seed)
        model = SplitModel(
            settings, lambda agreement: connect(server.address, NO_AUTHENTICATION, agreement)
        )
        trained = list(model.adapters.parameters())
        optimizer = torch.optim.AdamW(trained, lr=args.learning_rate)
        drawn = torch.Generator().manual_seed(seed)
        for _ in range(args.steps):
            ids = data[0][torch.randint(len(data[0]), (args.batch,), generator=drawn)]
            model(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            if model.gates is not None:
                model.gates.optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            losses = [
                model(input_ids=ids, labels=ids).loss.item()
                for ids in data[1][: 8 * args.batch].split(args.batch)
            ]
        model.close()
    return statistics.fmean(losses)


def summarize(losses: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return a row per codec: the mean loss, and by how much it is above full precision."""
    rows = []
    for codec, found in losses.items():
        above = [100 * (one / best - 1) for one, best in zip(found, losses["none"], strict=True)]
        error = statistics.stdev(above) / len(above) ** 0.5 if len(above) > 1 else None
        row = {"gradients": codec, "loss": statistics.fmean(found)}
        rows.append(row | {"above_percent": statistics.fmean(above), "error_percent": error})
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="folder with .md files")
    parser.add_argument("--deployment", choices=("adapters", "everything"), default="everything")
    parser.add_argument("--codec", default="bf16", help="of adapters and activations")
    parser.add_argument("--gradients", default=",".join(CODECS), help="codecs, comma-separated")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--pretrain-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", help="write a report")
    args = parser.parse_args()
    codecs = args.gradients.split(",")
    if codecs[0] != "none":
        parser.error("the first of --gradients must be none, which the others are compared with")
    data = read_text(args.text, args.tokens)
    losses: dict[str, list[float]] = {codec: [] for codec in codecs}
    with tempfile.TemporaryDirectory() as folder:
        pretrain(Path(folder), args)
        for seed in range(args.seeds):
            for codec in codecs:
                settings = SplitSettings(
                    model=folder, deployment=args.deployment, codec=args.codec, gradients=codec
                )
                losses[codec].append(fine_tune(settings, seed, data, args))
                print(f"seed {seed}, {codec}: {losses[codec][-1]:.4f}", flush=True)
    rows = summarize(losses)
    shown = [
        [row["gradients"], f"{row['loss']:.4f}", f"{row['above_percent']:+.2f}%"]
        + [f"{row['error_percent']:.2f}%" if row["error_percent"] is not None else "-"]
        for row in rows
    ]
    print(table(shown, ["gradients", "loss", "above full precision", "standard error"]))
    setup = {key: str(value) for key, value in vars(args).items() if key != "json"}
    write_report(args.json, "split_gradients", {"setup": setup, "rows": rows, "losses": losses})


if __name__ == "__main__":
    main()
