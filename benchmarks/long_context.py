"""Train all weights of a Llama-3-8B-shaped model on 32k tokens at once, on one GPU.

Each variant is `examples/pretrain.py` with `examples/configs/llama3_8b_32k.yaml`, in a process of
its own: the same model, data, chunked loss and accumulation over two micro-batches.

* ``ours``: the configuration as it is. ``ours fp8-4bit`` and others change the recipe.
* ``bitsandbytes``: bf16 weights, bitsandbytes' 8-bit AdamW, Hugging Face's checkpointing of each
  layer; ``torchao`` has torchao's 8-bit AdamW. ``..., compiled`` also compiles the layers.
* ``checkpointing``: torch's AdamW on bf16 weights (so bf16 moments), checkpointed as above.
* ``plain`` and ``plain bf16-mixed``: Lightning's own precision and torch's AdamW, no checkpointing.

Tokens per second are of whole optimizer steps behind the warm-up. ``peak_gib`` is the most that the
allocator had handed out since training started, and before it ran out where it did. Example::

    python benchmarks/long_context.py --variants 'plain;bitsandbytes;ours' --json long_context.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as pl
import torch
from common import table, write_report
from pretrain import PretrainCLI, run
from pretraining.lightning_module import CausalLM

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "examples" / "configs" / "llama3_8b_32k.yaml"
RECIPES = ("agoq", "coat", "fp8-4bit")
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class CheckpointedLM(CausalLM):
    """Recomputes each layer in backward, as Hugging Face does, with an optimizer by name."""

    optimizer_name = "torch"

    def configure_model(self) -> None:
        """Build the network and switch checkpointing on."""
        is_new = self.model is None
        super().configure_model()
        model: Any = self.model
        if is_new:
            model.gradient_checkpointing_enable({"use_reentrant": False})

    def make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return the 8-bit AdamW of a library, or torch's AdamW."""
        config = self.optimizer_config
        if self.optimizer_name == "torch":
            return super().make_optimizer(groups)
        if self.optimizer_name == "bitsandbytes":
            from bitsandbytes.optim import AdamW8bit
        else:
            from torchao.optim import AdamW8bit
        made: torch.optim.Optimizer = AdamW8bit(
            groups, lr=config.lr, betas=config.betas, eps=config.eps
        )
        return made


class StepClock(pl.Callback):
    """Times whole optimizer steps.

    Args:
        warmup: Optimizer steps before those that count.
        steps: Optimizer steps that count.
    """

    def __init__(self, warmup: int, steps: int) -> None:
        self.warmup = warmup
        self.last = warmup + steps
        self.row: dict[str, Any] = {}
        self.losses: list[torch.Tensor] = []
        self._made_s = time.perf_counter()
        self._began_s: float | None = None
        self._tokens = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count the weights, and bytes from here on."""
        self.row["parameters"] = sum(p.numel() for p in pl_module.parameters())
        self.row["start_s"] = time.perf_counter() - self._made_s
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock behind the warm-up."""
        if trainer.global_step == self.warmup and self._began_s is None:
            _synchronize()
            self.row["warmup_s"] = time.perf_counter() - self._made_s - self.row["start_s"]
            self._began_s = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count tokens, and stop the clock."""
        self.losses.append(outputs["loss"].detach())
        if self._began_s is None:
            return
        self._tokens += batch[:, 1:].numel()
        if trainer.global_step == self.last:
            _synchronize()
            seconds = time.perf_counter() - self._began_s
            self.row["tokens_per_s"] = self._tokens / seconds
            self.row["step_s"] = seconds / (self.last - self.warmup)
            # Lightning divides by the micro-batches of a step
            losses = [float(loss) * trainer.accumulate_grad_batches for loss in self.losses]
            self.row["first_loss"], self.row["last_loss"] = losses[0], losses[-1]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to train.

    Attributes:
        model: Class of the LightningModule.
        options: More options of the command line.
        optimizer: Library of the optimizer of a checkpointed model.
    """

    model: type[CausalLM]
    options: tuple[str, ...] = ()
    optimizer: str = "torch"


_BF16 = ("--trainer.plugins=null", "--trainer.callbacks=null", "--trainer.precision=bf16-true")
_EAGER = "--model.compile_layers=false"
VARIANTS = {
    "ours": Variant(CausalLM),
    **{
        f"ours {recipe}": Variant(CausalLM, (f"--trainer.callbacks.init_args.recipe={recipe}",))
        for recipe in RECIPES[1:]
    },
    "bitsandbytes": Variant(CheckpointedLM, (*_BF16, _EAGER), "bitsandbytes"),
    "bitsandbytes, compiled": Variant(CheckpointedLM, _BF16, "bitsandbytes"),
    "torchao": Variant(CheckpointedLM, (*_BF16, _EAGER), "torchao"),
    "torchao, compiled": Variant(CheckpointedLM, _BF16, "torchao"),
    "checkpointing": Variant(CheckpointedLM, (*_BF16, _EAGER)),
    "plain": Variant(CausalLM, (*_BF16, _EAGER)),
    "plain bf16-mixed": Variant(CausalLM, (*_BF16[:2], "--trainer.precision=bf16-mixed", _EAGER)),
}


def train(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train one variant in this process; return its row."""
    warnings.filterwarnings("ignore")
    clock = StepClock(args.warmup, args.steps)

    class Timed(PretrainCLI):
        def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
            trainer = super().instantiate_trainer(**kwargs)
            trainer.callbacks.append(clock)
            return trainer

    variant = VARIANTS[name]
    CheckpointedLM.optimizer_name = variant.optimizer
    row = clock.row
    try:
        run(Timed, variant.model, [*_options(args), *variant.options, *args.options])
    except torch.OutOfMemoryError as error:
        row["failed"] = "out of memory" + f": {str(error).split('.')[1].strip()}" * args.verbose
    except Exception as error:  # of any library: it is this row's result
        if args.verbose:
            raise
        row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"[:300]
    if torch.cuda.is_available():
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        row["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return row


def _options(args: argparse.Namespace) -> list[str]:
    options = {
        "config": args.config,
        "trainer.max_steps": args.warmup + args.steps,
        "trainer.logger": "false",
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
        "trainer.default_root_dir": args.work / "run",
        "data.cache_dir": args.work / "data",
        "data.block_size": args.seq,
    }
    if args.tiny:
        options |= {"trainer.accelerator": "cpu", "model.hf_overrides": json.dumps(TINY)}
        options["data.text"] = ROOT / "benchmarks"
    return ["fit", *(f"--{name}={value}" for name, value in options.items())]


def train_apart(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train one variant in a process of its own, which gives all its memory back."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        row = Path(folder, "row.json")
        words = sys.argv[1:] + ["--one", name, "--row", str(row)]
        with Path(args.work, "log.txt").open("a") as log:
            try:
                subprocess.run(
                    [sys.executable, __file__, *words],
                    timeout=args.seconds,
                    stdout=log,
                    stderr=log,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return {"failed": f"took longer than {args.seconds:g} s"}
        found = {"failed": f"ended without a result: see {args.work}/log.txt"}
        if row.is_file():
            found = json.loads(row.read_text())
    return found | {"total_s": time.monotonic() - began}


def main() -> None:
    """Train the variants one after the other; print and write their rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "plain;bitsandbytes;ours"
    parser.add_argument("--variants", default=default, help=f"of {'; '.join(VARIANTS)}")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--seq", type=int, default=32768, help="tokens of a sequence")
    parser.add_argument("--warmup", type=int, default=1, help="optimizer steps that do not count")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps that count")
    parser.add_argument("--seconds", type=float, default=150, help="limit of a variant")
    parser.add_argument("--work", type=Path, default=Path("outputs/long_context"))
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--one", help="train this variant here, and show its errors")
    parser.add_argument("--row", type=Path, help="where --one writes its row")
    parser.add_argument("options", nargs="*", help="behind `--`: options of examples/pretrain.py")
    args = parser.parse_args()
    args.verbose = args.one is not None and args.row is None
    args.work.mkdir(parents=True, exist_ok=True)
    names = [args.one] if args.one else [name.strip() for name in args.variants.split(";")]
    if unknown := [name for name in names if name not in VARIANTS]:
        parser.error(f"unknown variants {unknown}: choose among {'; '.join(VARIANTS)}")
    if args.one:
        row = train(args.one, args)
        if args.row is not None:
            args.row.write_text(json.dumps(row))
        print(json.dumps(row))
        return
    rows: list[dict[str, Any]] = []
    for name in names:
        rows.append({"variant": name, "seq": args.seq} | train_apart(name, args))
        print(shown(rows[-1:]), flush=True)
        write_report(args.json, "long_context", {"steps": args.steps, "rows": rows})
    print(shown(rows))


def shown(rows: list[dict[str, Any]]) -> str:
    """Lay out rows."""
    keys = ("tokens_per_s", "step_s", "peak_gib", "start_s", "first_loss", "last_loss")
    lines = [
        [r["variant"], *(f"{r[k]:.4g}" if k in r else "-" for k in keys), r.get("failed", "")]
        for r in rows
    ]
    return table(lines, ["variant", *keys, ""])


if __name__ == "__main__":
    main()
