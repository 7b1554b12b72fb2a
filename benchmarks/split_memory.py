"""What a client of split learning needs in memory for LoRA on a model of 8 billion parameters.

    python benchmarks/split_memory.py --json split_memory.json

The client is real: adapters, gradients, AdamW, codecs and gates, in the deployment ``adapters``. In
the place of the server stands one that answers every batch with gradients of zeros, since nothing
of the model itself is with the client. Every codec has a process of its own; memory is what that
has at most, less what it has once all is imported.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import table, write_report

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from split_learning import protocol
from split_learning.callbacks import peak_nbytes, resident_nbytes
from split_learning.model import SplitModel
from split_learning.models import read_config
from split_learning.settings import SplitSettings
from split_learning.sites import Site, site_shapes
from split_learning.wire.client import connect
from split_learning.wire.identity import NO_AUTHENTICATION
from split_learning.wire.messages import Message
from split_learning.wire.server import Server
from split_learning.wire.settings import parse_address
from split_sizes import LLAMA3_8B, ModelShape, packing

CODECS = ("bf16", "aq_sgd", "channel", "amaq")
SMALL = ModelShape(hidden=64, layers=2, heads=4, kv_heads=2, head=16, intermediate=128)


def save_config(folder: Path, model: ModelShape) -> None:
    """Save a config.json; there are no weights, and none are read."""
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head,
        vocab_size=128_256,
    ).save_pretrained(folder)


def train(settings: SplitSettings, address: str, args: argparse.Namespace) -> dict[str, int]:
    """Be the client; return its memory in bytes."""
    imported = resident_nbytes()
    torch.manual_seed(0)
    model = SplitModel(
        settings,
        lambda agreement: connect(parse_address(address), NO_AUTHENTICATION, agreement),
        **({"start_bits": settings.bits} if settings.codec == "amaq" else {}),
    )
    optimizer = torch.optim.AdamW(model.adapters.parameters(), lr=1e-4)
    ids = torch.randint(128_256, (args.batch, args.tokens))
    sent = 0
    for _ in range(args.steps):
        before = sent
        model(input_ids=ids, labels=ids).loss.backward()
        if model.gates is not None:
            model.gates.optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        sent = model.link.traffic.sent[protocol.ADAPTERS].nbytes
    model.close()
    # Linux counts both in batches of pages: the most may be a little less than what is there.
    return {"memory_bytes": max(0, peak_nbytes() - imported), "adapters_bytes": sent - before}


class Answers:
    """A server without a model.

    Args:
        settings: of both ends.
        model: the shape of the model that it pretends to have.
    """

    def __init__(self, settings: SplitSettings, model: ModelShape) -> None:
        adapters = packing(model, settings)
        shapes = site_shapes(settings, adapters, model.hidden)
        self._gradients = {
            name: Site(name, shapes[name], settings).encode_gradient(torch.zeros(shape))
            for name, shape in adapters.shapes.items()
        }

    def answer(self, message: Message) -> Iterator[Message]:
        """Answer a batch; other messages have no answer."""
        if message.kind == protocol.TOKENS:
            yield Message(protocol.LOSS, tensors={"loss": torch.tensor(1.0)})
            yield Message(protocol.ADAPTER_GRADIENTS, tensors=self._gradients)


def measure(settings: SplitSettings, model: ModelShape, args: argparse.Namespace) -> dict[str, Any]:
    """Return what a client in a process of its own says."""
    agreement = settings.agreement(read_config(settings.model), None)
    answers = Answers(settings, model)
    opened = ("127.0.0.1", 0), NO_AUTHENTICATION, lambda: answers.answer, agreement
    with Server(*opened) as server:
        address = f"127.0.0.1:{server.address[1]}"
        command = [sys.executable, __file__, "--client", address, json.dumps(asdict(settings))]
        command += ["--steps", str(args.steps), "--batch", str(args.batch)]
        command += ["--tokens", str(args.tokens)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"codec": settings.codec, "gradients": settings.gradients, **found}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codecs", default=",".join(CODECS), help="comma-separated")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=380)
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--json", help="write a report")
    parser.add_argument("--client", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client is not None:
        address, given = args.client
        options = json.loads(given)
        options["targets"] = tuple(options["targets"])
        print(json.dumps(train(SplitSettings(**options), address, args)))
        return
    model, rows = SMALL if args.small else LLAMA3_8B, []
    with tempfile.TemporaryDirectory() as folder:
        save_config(Path(folder), model)
        for codec in args.codecs.split(","):
            gradients = "bf16" if codec == "bf16" else "int4"
            settings = SplitSettings(model=folder, codec=codec, gradients=gradients)
            rows.append(measure(settings, model, args))
    shown = [
        [row["codec"], row["gradients"]]
        + [f"{row[key] / 1e6:.1f}" for key in ("adapters_bytes", "memory_bytes")]
        for row in rows
    ]
    print(table(shown, ["codec", "gradients", "MB of adapters", "memory, MB"]))
    setup = {"steps": args.steps, "batch": args.batch, "tokens": args.tokens}
    write_report(args.json, "split_memory", {"setup": setup, "rows": rows})


if __name__ == "__main__":
    main()
