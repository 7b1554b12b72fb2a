"""``lq-lightning train`` and ``init``: a run by a YAML alone, and YAMLs to begin with."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

_NEEDS_JSONARGPARSE = (
    "YAMLs are read with jsonargparse: `pip install 'jsonargparse[signatures]'` (Lightning's "
    "LightningCLI needs it)."
)
_SUBCOMMANDS = ("fit", "validate", "test", "predict")


def missing_for_training(words: Sequence[str]) -> str:
    """Return what keeps :func:`train` from beginning, or nothing."""
    if not words:
        return "what should be trained? Give --config FILE (`lq-lightning init` writes one)."
    return "" if find_spec("jsonargparse") else _NEEDS_JSONARGPARSE


def train(words: Sequence[str]) -> None:
    """Run what a YAML says, as a ``LightningCLI`` does; classes may lie in the current folder.

    Args:
        words: ``--config FILE``, options that override it such as ``--trainer.max_steps=10``, and
            before them a subcommand other than ``fit``.
    """
    from lightning.pytorch.cli import LightningCLI  # the other commands need no jsonargparse

    arguments = [*words] if words and words[0] in _SUBCOMMANDS else ["fit", *words]
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as for a script there
    # Lightning starts further ranks by the words of this command, which therefore stay in sys.argv
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
    LightningCLI(save_config_kwargs={"overwrite": True}, args=arguments)


_HEAD = """\
# {text}.
#
#   {plan}
#   {start}
#
# Every option of Lightning's Trainer, the strategy and your classes may stand here or follow the
# command (--trainer.max_steps=10); `lq-lightning train --help` lists them.
seed_everything: 42
trainer:
  accelerator: gpu
  devices: auto
"""
_TAIL = """\
  max_steps: 1000
  gradient_clip_val: 1.0
  callbacks:
{callbacks}  - class_path: lightning.pytorch.callbacks.ModelCheckpoint
    init_args:
      every_n_train_steps: 200
      save_last: true  # `--ckpt_path=last` continues from the newest one
  default_root_dir: runs/{name}  # a folder that every host sees
model:
  class_path: {model}  # your LightningModule, MODULE.CLASS
data:
  class_path: {data}  # your LightningDataModule
"""
_TORCHRUN = (
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\\n"
    "#       --no-python lq-lightning train --config {file}   # on each host"
)
_ALONE = "lq-lightning train --config {file}"
_FEW_ACTIVATIONS = """\
  - class_path: lq_lightning.ActivationQuantization  # 5 bits for what backward needs
    init_args:
      recipe: agoq
"""
# what is asked for, how to plan and start it, the middle of the YAML, and further callbacks
GOALS: dict[str, tuple[str, str, str, str, str]] = {
    "one-host": (
        "Several GPUs of one host",
        "--gpu H100 --gpus-per-node 8",
        _ALONE,
        """\
  strategy:
    class_path: lq_lightning.QuantizedFSDPStrategy
    init_args:
      weights: auto  # 4-bit differences where no NVLink joins the GPUs
      gradients: auto
  precision: bf16-mixed
""",
        "",
    ),
    "two-hosts": (
        "Two hosts with 10 Gb/s or more between them",
        "--gpu H100 --nodes 2 --gpus-per-node 8 --network 25gbit",
        _TORCHRUN,
        """\
  num_nodes: 2
  strategy:
    class_path: lq_lightning.QuantizedFSDPStrategy
    init_args:
      weights: qWD  # 4-bit differences of the weights, once per step
      gradients: TLq-HS  # 8 bits within a host, 4 between hosts
      replica: auto  # node: one copy per host, where NVLink joins its GPUs
  precision: bf16-mixed
  accumulate_grad_batches: 4  # hosts exchange once per step, not per micro-batch
""",
        "",
    ),
    "two-hosts-1gb": (
        "Two hosts with 1 Gb/s or less between them, for a model that fits on one of them",
        "--gpu H100 --nodes 2 --gpus-per-node 8 --network 1gbit",
        _TORCHRUN,
        """\
  num_nodes: 2
  strategy:
    class_path: lq_lightning.QuantizedFSDPStrategy
    init_args:
      local_steps: 32  # hosts train alone for so many steps, and then exchange what they learned
  precision: bf16-mixed
""",
        "",
    ),
    "pipeline-1gb": (
        "Hosts with 1 Gb/s or less between them, for a model that fits on none of them",
        "--gpu H100 --nodes 2 --gpus-per-node 8 --network 1gbit",
        _TORCHRUN,
        """\
  num_nodes: 2
  strategy:
    class_path: lq_lightning.QuantizedPipelineStrategy
    init_args:
      pipeline_size: 2  # the hosts; those GPUs of a host that have the same layers shard them
      schedule: 1f1b
      forward_codec: tah5  # 5 bits for hidden states; their tiles of 64 divide the hidden size
      backward_codec: int5
  precision: bf16-mixed
""",
        "",
    ),
    "8b-one-gpu": (
        "A model of 8 billion parameters, all of them trained, on one GPU of 80 GB",
        "--gpu H100 --nodes 1 --gpus-per-node 1",
        _ALONE,
        """\
  plugins:  # in place of `precision`
    class_path: lq_lightning.QuantizedPrecision
    init_args:
      precision: bf16-true  # 2 bytes per weight; build the model under it, in configure_model
      optimizer_state:  # 2 bytes per weight for both moments of AdamW
        class_path: lq_lightning.OptimizerQuantization
        init_args:
          stochastic_rounding: true  # in place of fp32 weights
""",
        _FEW_ACTIVATIONS,
    ),
}


def write_config(goal: str, file: Path, model: str | None, data: str | None) -> str:
    """Write a commented YAML for a goal and return what to do with it.

    Raises:
        FileExistsError: The file exists.
    """
    text, machine, start, middle, callbacks = GOALS[goal]
    plan = f"lq-lightning plan {file} {machine}"
    start = start.format(file=file)
    head = _HEAD.format(text=text, plan=plan, start=start)
    classes = {"model": model or "my_module.Model", "data": data or "my_module.Data"}
    tail = _TAIL.format(name=goal, callbacks=callbacks, **classes)
    try:
        with file.open("x") as opened:
            opened.write(head + middle + tail)
    except FileExistsError as error:
        raise FileExistsError(f"'{file}' exists: give another name with --output.") from error
    unset = [f"`{name}`" for name, given in (("model", model), ("data", data)) if given is None]
    first = f"Set `class_path` of {' and '.join(unset)}, then plan" if unset else "Plan"
    start = start.replace("\n#", "\n")
    return f"Wrote {file}. {first} and train:\n  {plan}\n  {start}\n"
