"""Train all weights of a Llama-3-8B-shaped model on 32k tokens at once or more, on one GPU.

A call trains one variant: `examples/pretrain.py` with `examples/configs/llama3_8b_32k.yaml`, the
same model, data, chunked loss and accumulation over two micro-batches. ``--json`` adds its row to a
report. ``ours`` is the configuration as it is, ``offload`` also moves codes to the host;
``bitsandbytes`` has bf16 weights, its 8-bit AdamW and full checkpointing; ``selective`` and
``save_on_cpu`` keep activations so, with our states. ``lora nf4`` trains adapters of rank 16 on a
frozen base in bitsandbytes' nf4, without accumulation. ``selective`` and ``lora nf4`` compile no
layers.

Tokens per second are of whole optimizer steps behind the warm-up. ``peak_gib`` is the most that the
allocator had handed out since training started. ``--trace`` writes a timeline of the last step, and
beside it ``offload_timeline.json`` for ``picture.py``.
``exposed_ms``, with a trace, is the time in which copies run and no kernel does. Example::

    for v in ours offload; do python benchmarks/long_context.py $v --seq 65536 --json l.json; done
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import lightning.pytorch as pl
import torch
from common import argument_parser, synchronize, table, write_report
from llama_layer import keep_products, on_cpu
from pretrain import PretrainCLI
from pretraining.data import TextDataModule
from pretraining.lightning_module import CausalLM
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "examples" / "configs" / "llama3_8b_32k.yaml"
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


class CheckpointedLM(CausalLM):
    """Recomputes each layer in backward, as Hugging Face does."""

    options: dict[str, Any] = {"use_reentrant": False}

    def configure_model(self) -> None:
        """Build the network and switch checkpointing on."""
        is_new = self.model is None
        super().configure_model()
        model: Any = self.model
        if is_new:
            model.gradient_checkpointing_enable(self.options)


class BitsAndBytesLM(CheckpointedLM):
    """The same with bitsandbytes' 8-bit AdamW."""

    def configure_optimizers(self) -> dict[str, Any]:
        """Return the optimizer and its schedule."""
        from bitsandbytes.optim import AdamW8bit

        made, c = super().configure_optimizers(), self.optimizer_config
        groups = [dict(group) for group in made["optimizer"].param_groups]
        made["optimizer"] = AdamW8bit(groups, lr=c.lr, betas=c.betas, eps=c.eps)
        made["lr_scheduler"]["scheduler"].optimizer = made["optimizer"]
        return made


class SelectiveLM(CheckpointedLM):
    """Keeps results of matrix products and attention, and recomputes the rest."""

    options = CheckpointedLM.options | {
        "context_fn": functools.partial(create_selective_checkpoint_contexts, keep_products)
    }


class OnCpuLM(CausalLM):
    """torch's ``save_on_cpu``, for all but weights."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss."""
        with on_cpu(self):
            return super().training_step(*args, **kwargs)


class Nf4LM(CausalLM):
    """Adapters on bitsandbytes' 4-bit layers."""

    def configure_model(self) -> None:
        """Build the network, and replace the layers below the adapters."""
        is_new = self.model is None
        super().configure_model()
        model: Any = self.model
        for layer in model.modules() if is_new else ():
            if isinstance(getattr(layer, "base_layer", None), nn.Linear):
                layer.base_layer = self.frozen(layer.base_layer)

    def frozen(self, layer: nn.Linear) -> nn.Module:
        """Return the layer of 4 bits that computes in place of a frozen one."""
        from bitsandbytes.nn import Linear4bit, Params4bit

        sizes = layer.in_features, layer.out_features
        made: Any = Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16, device="meta")
        made.weight = Params4bit(layer.weight.data, False, quant_type="nf4", module=made)
        moved: nn.Module = made.to(layer.weight.device)
        return moved


_CODES = "--trainer.callbacks.init_args."
_MOVED = f"{_CODES}offload=1.0"
_EAGER = "--model.compile_layers=false"
_LORA = ("--model.lora.rank=16", "--trainer.accumulate_grad_batches=1", _EAGER)
_PLAIN = ("--trainer.callbacks=null",)
_BF16 = ("--trainer.plugins=null", "--trainer.precision=bf16-true", *_PLAIN)
VARIANTS: dict[str, tuple[type[CausalLM], tuple[str, ...]]] = {
    "ours": (CausalLM, ()),
    "ours fp8-4bit": (CausalLM, (f"{_CODES}recipe=fp8-4bit",)),
    "offload": (CausalLM, (_MOVED,)),
    "offload fp8-4bit": (CausalLM, (_MOVED, f"{_CODES}recipe=fp8-4bit")),
    "checkpointing, offload": (CheckpointedLM, (_MOVED,)),
    "bitsandbytes": (BitsAndBytesLM, _BF16),
    "selective": (SelectiveLM, (*_PLAIN, _EAGER)),
    "save_on_cpu": (OnCpuLM, _PLAIN),
    "lora nf4": (Nf4LM, _LORA),
    "lora nf4, offload": (Nf4LM, (*_LORA, _MOVED)),
}


class StepClock(pl.Callback):
    """Times whole optimizer steps, and traces the last one.

    Args:
        args: Of the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.warmup, self.last, self.trace = args.warmup, args.warmup + args.steps, args.trace
        self.row: dict[str, Any] = {}
        self._began_s = self._tokens = 0.0
        self._profile: Any = None

    def on_train_start(self, *unused: Any) -> None:
        """Count bytes from here on."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_start(self, trainer: pl.Trainer, *unused: Any) -> None:
        """Start the clock behind the warm-up; a traced step more does not count."""
        if trainer.global_step == self.warmup and not self._began_s:
            synchronize()
            self._began_s = time.perf_counter()
        if self.trace and trainer.global_step == self.last and self._profile is None:
            self._profile = torch.profiler.profile()
            self._profile.start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, out: Any, batch: Any, index: int
    ) -> None:
        """Count tokens, and stop the clock."""
        self._tokens += batch[:, 1:].numel() if self._began_s else 0
        if trainer.global_step == self.last and "step_s" not in self.row:
            synchronize()
            seconds = time.perf_counter() - self._began_s
            self.row |= {"tokens_per_s": self._tokens / seconds}
            self.row |= {"step_s": seconds / (self.last - self.warmup)}
            self.row["last_loss"] = float(out["loss"]) * trainer.accumulate_grad_batches

    def on_train_end(self, *unused: Any) -> None:
        """Write the trace."""
        if self._profile is not None:
            synchronize()
            self._profile.stop()
            self._profile.export_chrome_trace(str(self.trace))
            trace = json.loads(self.trace.read_text())
            self.row["exposed_ms"] = exposed_us(trace) / 1e3
            write_timeline(self.trace.with_name("offload_timeline.json"), trace)


def lanes(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the kernels of a trace, and its copies to and from the host."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    copies = [e for e in events if e.get("cat") == "gpu_memcpy"]
    return {
        "kernels": [e for e in events if e.get("cat") == "kernel"],
        "to the host": [e for e in copies if "DtoH" in e["name"]],
        "from the host": [e for e in copies if "HtoD" in e["name"]],
    }


def busy(events: Iterable[dict[str, Any]], gap_us: float = 0.0) -> list[list[float]]:
    """Return when any of these run, without gaps up to ``gap_us``; in microseconds."""
    spans: list[list[float]] = []
    for event in sorted(events, key=lambda e: e["ts"]):
        start, stop = event["ts"], event["ts"] + event["dur"]
        if spans and start <= spans[-1][1] + gap_us:
            spans[-1][1] = max(spans[-1][1], stop)
        else:
            spans.append([start, stop])
    return spans


def exposed_us(trace: dict[str, Any]) -> float:
    """Return the microseconds in which copies between host and device run and no kernel does."""
    kernels, out, back = lanes(trace).values()
    together, alone = busy([*kernels, *out, *back]), busy(kernels)
    return sum(b - a for a, b in together) - sum(b - a for a, b in alone)


def write_timeline(path: Path | None, trace: dict[str, Any]) -> None:
    """Write a report of when each lane is busy, to 0.5 ms, for ``picture.py``."""
    spans = [(name, *span) for name, events in lanes(trace).items() for span in busy(events, 500.0)]
    begin = min(start for _, start, _ in spans)
    rows = [
        {"lane": name, "start_ms": (start - begin) / 1e3, "stop_ms": (stop - begin) / 1e3}
        for name, start, stop in spans
    ]
    write_report(path, "offload_timeline", {"rows": rows})


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train a variant; return its row."""
    clock = StepClock(args)

    class Timed(PretrainCLI):
        def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
            trainer = super().instantiate_trainer(**kwargs)
            trainer.callbacks.append(clock)
            return trainer

    work = Path("outputs/long_context")
    quiet = ("logger", "enable_progress_bar", "enable_model_summary")
    options = {f"trainer.{name}": "false" for name in quiet} | {"config": args.config}
    options |= {"trainer.max_steps": args.warmup + args.steps + bool(args.trace)}
    options |= {"trainer.default_root_dir": work / "run", "data.cache_dir": work / "data"}
    options |= {"data.block_size": args.seq}
    if args.tiny:
        options |= {"trainer.accelerator": "cpu", "model.hf_overrides": json.dumps(TINY)}
        options |= {"data.text": ROOT / "benchmarks", "model.compile_layers": "false"}
    model, more = VARIANTS[args.variant]
    given = [f"--{name}={value}" for name, value in sorted(options.items())]
    try:
        words = ["fit", *given, *more, *args.options]
        never = {"auto_configure_optimizers": False, "save_config_callback": None}
        Timed(model, TextDataModule, seed_everything_default=42, args=words, **never)
    except torch.OutOfMemoryError:
        clock.row["failed"] = "out of memory"
    if torch.cuda.is_available():
        clock.row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return {"variant": args.variant, "seq": args.seq, "steps": args.steps} | clock.row


def main() -> None:
    """Train one variant; print its row and add it to the report."""
    parser = argument_parser(__doc__)
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--seq", type=int, default=32768, help="tokens of a sequence")
    parser.add_argument("--warmup", type=int, default=2, help="optimizer steps that do not count")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps that count")
    parser.add_argument("--trace", type=Path, help="write a timeline of one step more here")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("options", nargs="*", help="behind `--`: options of examples/pretrain.py")
    args = parser.parse_intermixed_args()
    warnings.filterwarnings("ignore")
    rows = [train(args)]
    if args.json and Path(args.json).is_file():
        rows = json.loads(Path(args.json).read_text())["results"]["rows"] + rows
    write_report(args.json, "long_context", {"rows": rows})
    keys = [key for key in rows[-1] if key != "variant"]
    print(table([[args.variant, *(str(rows[-1][key]) for key in keys)]], ["variant", *keys]))


if __name__ == "__main__":
    main()
