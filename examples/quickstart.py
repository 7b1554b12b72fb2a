"""Train a small GPT in full precision and with 4-bit communication, and compare the two.

    python examples/quickstart.py

Both runs go through ``examples/pretrain.py`` with the configuration files in ``examples/configs``,
with the same seed, model and text: the sources of the running Python's standard library. On a CPU
two processes play two nodes of one rank each, so weights and gradients both take the 4-bit route.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from pretraining import report

EXAMPLES = Path(__file__).resolve().parent
NEEDED = ("torch", "lightning", "lq_lightning", "jsonargparse", "matplotlib")
FULL, QUANTIZED = "full_precision", "quantized_fsdp"
SLOWDOWN = 1.15  # a step of two ranks with communication against one step alone on one core
STARTUP_S = 20  # imports, checkpoint, text sample and plot of one run
FEWEST_STEPS = 60
VALIDATIONS = 6
VALIDATION_BATCHES = 16
# A validation batch is a forward pass, a third of a step.
VALIDATION_STEPS = VALIDATIONS * VALIDATION_BATCHES // 3


def main() -> None:
    """Run the quickstart."""
    started_s = time.monotonic()
    check_installed()
    arguments = parse_arguments()
    out = Path(arguments.out)
    prepare_text(out / "data")
    seconds_left = 60 * arguments.minutes - (time.monotonic() - started_s)
    steps = choose_steps(arguments.steps, seconds_left, arguments.accelerator)
    reports = {}
    for number, name in enumerate((FULL, QUANTIZED), start=1):
        what = "full precision" if name == FULL else "4-bit weights and gradients"
        print(f"\n[{number + 1}/3] Training {steps} steps with {what}", flush=True)
        run(name, out, steps, arguments)
        reports[name] = report.read(out / name / "report.json")
    print_comparison(reports[FULL], reports[QUANTIZED])
    print_next_steps(out, steps)
    print(f"\nThe quickstart took {time.monotonic() - started_s:.0f} s.")


def check_installed() -> None:
    """Name what is missing, before anything is imported that needs it.

    Raises:
        SystemExit: something is not installed.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"{sys.executable} cannot import {', '.join(missing)}. From the root of the checkout, "
            "install what the examples need:\n"
            "    python -m pip install -c constraints.txt -e '.[examples]'\n"
            "(without a GPU, first `python -m pip install torch --index-url "
            "https://download.pytorch.org/whl/cpu`, which saves gigabytes), or run "
            "`make quickstart`, which does this in .venv."
        )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    gpus = count_gpus()
    parser.add_argument(
        "--steps", type=int, default=300, help="optimizer steps of each run (default: 300)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=4.0,
        help="take fewer steps where all would need more than this on a CPU (default: 4)",
    )
    parser.add_argument(
        "--out", default="runs/quickstart", help="folder for everything (default: runs/quickstart)"
    )
    parser.add_argument(
        "--accelerator",
        choices=("cpu", "gpu"),
        default="gpu" if gpus > 1 else "cpu",
        help="default: gpu where there are two, cpu elsewhere",
    )
    parser.add_argument("--devices", type=int, default=2, help="ranks (default: 2)")
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.devices < 1 or arguments.minutes <= 0:
        parser.error("--steps and --devices must be at least 1 and --minutes positive.")
    if arguments.accelerator == "gpu" and gpus < arguments.devices:
        parser.error(
            f"--devices={arguments.devices} with --accelerator=gpu, but there are {gpus} GPUs. "
            "Use fewer devices, or --accelerator=cpu."
        )
    return arguments


def count_gpus() -> int:
    """Return the number of CUDA devices."""
    import torch

    return torch.cuda.device_count()


def prepare_text(cache_dir: Path) -> None:
    """Prepare the default text and say what it is."""
    from pretraining import text

    print("[1/3] Preparing text: the Python standard library's own sources", flush=True)
    corpus = text.prepare(text.CorpusSettings(), cache_dir)
    for split in ("train", "val"):
        print(f"      {split}: {len(corpus.tokens[split]) / 1e6:.1f} MB")


def choose_steps(wanted: int, seconds: float, accelerator: str) -> int:
    """Return how many steps both runs can take in the time there is.

    Args:
        wanted: Steps to take if there is time.
        seconds: Time for both runs.
        accelerator: GPUs are fast enough for any ``wanted``.

    Returns:
        Steps per run.
    """
    if accelerator == "gpu":
        return _evenly(wanted)
    step_s = SLOWDOWN * time_one_step()
    possible = int((seconds / 2 - STARTUP_S) / step_s) - VALIDATION_STEPS
    steps = _evenly(min(wanted, max(FEWEST_STEPS, possible)))
    if steps < _evenly(wanted):
        print(
            f"      This machine needs about {step_s:.2f} s a step, so each run takes {steps} "
            f"steps instead of {wanted} (--minutes changes that)."
        )
    return steps


def _evenly(steps: int) -> int:
    """Round down to what validations divide, so that the last one sees the last step."""
    return steps - steps % VALIDATIONS if steps > VALIDATIONS else steps


def time_one_step() -> float:
    """Return the seconds of one forward and backward pass of the model on one core."""
    import torch
    import torch.nn.functional as F
    from pretraining.model import Decoder, DecoderConfig

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = Decoder(DecoderConfig(), vocab_size=264)
    block_BL = torch.randint(0, 256, (8, 129))
    times_s = []
    for _ in range(9):
        start_s = time.perf_counter()
        logits_BTV = model(block_BL[:, :-1])
        F.cross_entropy(logits_BTV.flatten(0, 1), block_BL[:, 1:].flatten()).backward()
        times_s.append(time.perf_counter() - start_s)
    torch.set_num_threads(threads)
    return sorted(times_s)[len(times_s) // 2]


def run(name: str, out: Path, steps: int, arguments: argparse.Namespace) -> None:
    """Train one configuration through the documented command line.

    Raises:
        SystemExit: the run failed; its own message stands above.
    """
    options = {
        "trainer.max_steps": steps,
        "trainer.val_check_interval": max(1, steps // VALIDATIONS),
        "trainer.accelerator": arguments.accelerator,
        "trainer.devices": arguments.devices,
        "trainer.default_root_dir": out / name,
        "trainer.limit_val_batches": VALIDATION_BATCHES,
        "trainer.enable_model_summary": "false",
        "data.cache_dir": out / "data",
    }
    if name == QUANTIZED:
        options["report.reference"] = out / FULL / "report.json"
    else:  # its curve is in the plot of the other run
        options |= {"report.plot": "false", "sample.max_new_tokens": 0}
    config = os.path.relpath(EXAMPLES / "configs" / f"{name}.yaml")
    script = os.path.relpath(EXAMPLES / "pretrain.py")
    command = [sys.executable, script, "fit", "--config", config]
    command += [f"--{option}={value}" for option, value in options.items()]
    print(f"      {shlex.join([program('python'), *command[1:]])}\n", flush=True)
    finished = subprocess.run(command, check=False)
    if finished.returncode:
        raise SystemExit(
            f"\nThe run '{name}' stopped with status {finished.returncode}; the message above says "
            "why. The command above repeats just that run."
        )


def program(name: str) -> str:
    """Return how to call a program of this Python's environment from the current folder."""
    path = Path(sys.executable).with_name(name)
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else name


def print_comparison(full: report.Report, quantized: report.Report) -> None:
    """Print what both runs measured."""
    rows = [("", full.name, quantized.name, "")]
    if full.val_loss is not None and quantized.val_loss is not None:
        change = f"{100 * (quantized.val_loss / full.val_loss - 1):+.2f} %"
        losses = (f"{full.val_loss:.4f}", f"{quantized.val_loss:.4f}")
        rows.append((f"validation loss ({full.unit})", *losses, change))
    wire = quantized.wire
    if wire is not None and wire.steps and wire.sent:
        per_step = (wire.baseline / wire.steps / 1e6, wire.sent / wire.steps / 1e6)
        less = f"{wire.baseline / wire.sent:.1f}x less"
        rows.append(("sent per rank and step (MB)", *(f"{mb:.2f}" for mb in per_step), less))
        for label, bits in (
            ("bits per weight on the wire", wire.bits_per_weight),
            ("bits per gradient on the wire", wire.bits_per_gradient),
        ):
            if bits is not None:
                rows.append((label, "32", f"{bits:.2f}", ""))
    if full.tokens_per_s and quantized.tokens_per_s:
        speeds = (f"{full.tokens_per_s:.0f}", f"{quantized.tokens_per_s:.0f}")
        rows.append(("tokens per second", *speeds, ""))
    rows.append(("training time (s)", f"{full.train_s:.0f}", f"{quantized.train_s:.0f}", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    print(f"\nComparison: {quantized.parameters / 1e6:.2f}M weights, {quantized.steps} steps")
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]  # noqa: B905
        print("  " + "   ".join(cells).rstrip())
    print(
        "  Losses of runs this short differ by 1 to 2 % from seed to seed, in either direction.\n"
        "  The ranks share one machine, where there is no network to save time on: look at the "
        "bytes."
    )


def print_next_steps(out: Path, steps: int) -> None:
    """Say where the results are and what to try next."""
    script = os.path.relpath(EXAMPLES / "pretrain.py")
    config = os.path.relpath(EXAMPLES / "configs" / f"{QUANTIZED}.yaml")
    folder = out / QUANTIZED
    last = folder / "checkpoints" / "last.ckpt"
    base = f"{program('python')} {script}"
    print(f"""
Where things are
    plot          {folder / "report.png"}
    results       {folder / "report.json"}
    sample        {folder / "sample.txt"}
    checkpoint    {last}
    logs          {program("tensorboard")} --logdir {out}

What to try next
    continue this run for {steps} more steps
        {base} fit --config {config} --ckpt_path={last} \\
            --trainer.max_steps={2 * steps} --trainer.default_root_dir={folder} \\
            --data.cache_dir={out / "data"} --report.reference={out / FULL / "report.json"}
    your own text
        {base} fit --config {config} --data.text=FOLDER
    another gradient recipe
        {base} fit --config {config} --trainer.strategy.gradients=TLq
    every option
        {base} fit --help
        {base} fit --trainer.strategy.help=lq_lightning.strategies.QuantizedFSDPStrategy""")


if __name__ == "__main__":
    main()
