"""The console script ``lq-lightning``: ``init``, ``plan``, ``doctor``, ``train`` and ``meet``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lq_lightning.data_parallel.config import PORT
from lq_lightning.data_parallel.patient_store import keep_meeting_point

FITS, WRONG_INPUT, DOES_NOT_FIT = 0, 2, 3
_USAGE = "lq-lightning plan [CONFIG.yaml | SCRIPT.py] [OPTION ...] [--trainer.OPTION=VALUE ...]"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(prog="lq-lightning", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan = commands.add_parser(
        "plan",
        usage=_USAGE,
        allow_abbrev=False,
        help="memory, time, bytes and loss of a run, before any GPU is rented",
        description="Simulate a few steps of a run and print what it needs. Any other options, "
        "such as --trainer.strategy.weights=none, go on to the program that reads CONFIG.yaml.",
        epilog=f"Exit status: {FITS} fits, {DOES_NOT_FIT} does not fit, {WRONG_INPUT} wrong input.",
    )
    _add_plan_arguments(plan)
    doctor = commands.add_parser(
        "doctor",
        help="measure a machine and name what is wrong with it",
        description="Measure the machines of a run in half a minute, and name what is wrong. "
        "Alone or under torchrun.",
    )
    profile = Path("lq_lightning_profile.json")
    text = "JSON to write for `lq-lightning plan --profile FILE` (default: %(default)s)"
    doctor.add_argument("--profile", type=Path, default=profile, metavar="FILE", help=text)
    text = "where checkpoints will be written, whose free space is checked (default: here)"
    doctor.add_argument("--root-dir", type=Path, default=Path(), metavar="DIR", help=text)
    commands.add_parser(
        "train",
        add_help=False,
        help="run what a YAML says, without a script: --config run.yaml, or --help",
    )
    meet = commands.add_parser(
        "meet",
        help="keep the place where nodes that come and go meet, until it is interrupted",
        description="Give the address of this machine to `LocalSteps(meet_at=...)` on all nodes. "
        "One per run: it needs next to nothing, but has to outlive the nodes.",
    )
    meet.add_argument("--port", type=int, default=PORT, help="default: %(default)s")
    init = commands.add_parser("init", help="write a commented YAML for a goal")
    from lq_lightning.planning.train import GOALS

    known = "; ".join(f"{name}: {text}" for name, (text, *_) in GOALS.items())
    init.add_argument("goal", choices=GOALS, metavar="GOAL", help=known)
    init.add_argument("--output", type=Path, default=Path("run.yaml"), help="default: %(default)s")
    init.add_argument("--model", help="class of your LightningModule, MODULE.CLASS")
    init.add_argument("--data", help="class of your LightningDataModule")
    return parser


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the run").add_argument
    add("config", nargs="?", type=Path, help="YAML of your LightningCLI, or the script that trains")
    add("--program", type=Path, help="script that reads the YAML, if it is not found beside it")
    add("--model", help="config.json of a Hugging Face model, or its folder, to plan without data")
    add("--seq", type=int, default=4096, help="tokens of a sequence, with --model (%(default)s)")
    add("--micro-batch", type=int, default=1, help="sequences per rank, with --model (%(default)s)")
    add("--batch", help='shapes of a batch of one rank, such as "input_ids:int64[4,1024]"')
    add("--tokens", type=float, help="tokens of the whole run; default: those of max_steps")
    add = parser.add_argument_group("the machine").add_argument
    add("--gpu", help="such as H100, H200, A100-80, L40S; default: the profile's, else H100")
    add("--nodes", type=int, help="default: the profile's, else the Trainer's num_nodes")
    add("--gpus-per-node", type=int, help="default: the profile's, else the Trainer's devices")
    add("--network", help="rate of each node's link, such as 25gbit; needed for several nodes")
    add("--profile", type=Path, help="what `lq-lightning doctor --profile FILE` measured")
    add = parser.add_argument_group("results").add_argument
    add("--json", type=Path, metavar="FILE", help="write the plan; PlanCheck compares runs with it")
    add("--no-alternatives", action="store_true", help="leave out what else would work")
    add("--check", action="store_true", help="also train three real steps here, and compare")
    add("--debug", action="store_true", help="show the traceback of an error")


def main(words: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    words = sys.argv[1:] if words is None else words
    if words and words[0] == "train":
        from lq_lightning.planning.train import missing_for_training, train

        if missing := missing_for_training(words[1:]):
            sys.stderr.write(f"lq-lightning train: {missing}\n")
            return WRONG_INPUT
        train(words[1:])  # whose errors are the user's own
        return 0
    arguments, others = make_parser().parse_known_args(words)
    try:
        if others and arguments.command != "plan":
            raise ValueError(f"lq-lightning {arguments.command} has no option {others[0]}.")
        if arguments.command == "init":
            from lq_lightning.planning.train import write_config

            said = write_config(arguments.goal, arguments.output, arguments.model, arguments.data)
            sys.stdout.write(said)
            return 0
        if arguments.command == "meet":
            return _meet(arguments.port)
        if arguments.command == "doctor":
            from lq_lightning.planning import doctor

            return doctor.examine(arguments.profile, arguments.root_dir)
        return _plan(arguments, others)
    except Exception as error:
        if arguments.command == "plan" and arguments.debug:
            raise
        said = str(error)
        if not isinstance(error, (ValueError, NotImplementedError, OSError)):
            said = f"{type(error).__name__}: {said} (this is not expected; --debug shows where)"
        sys.stderr.write(f"lq-lightning {arguments.command}: {said}\n")
        return WRONG_INPUT


def _plan(arguments: argparse.Namespace, others: Sequence[str]) -> int:
    _silence()
    from lq_lightning.planning.config import find_program, hugging_face_program
    from lq_lightning.planning.plan import plan_run

    if arguments.model is not None:
        shape = arguments.seq, arguments.micro_batch
        run = hugging_face_program(arguments.model, *shape, arguments.config, others)
    elif arguments.config is None:
        raise ValueError("what should be planned? Give CONFIG.yaml, SCRIPT.py or --model.")
    else:
        run = find_program(arguments.config, arguments.program, others)
    machine = {
        name: getattr(arguments, name)
        for name in ("gpu", "nodes", "gpus_per_node", "network", "profile")
    }
    if not arguments.no_alternatives:
        sys.stderr.write("Simulating the run, then for up to two minutes what else works.\n")
    plan = plan_run(
        run,
        machine,
        batch=arguments.batch,
        tokens=arguments.tokens,
        alternatives=not arguments.no_alternatives,
    )
    sys.stdout.write(f"{plan}\n")
    if arguments.json is not None:
        plan.to_json(arguments.json)
    if arguments.check:
        from lq_lightning.callbacks.plan_check import checked_table
        from lq_lightning.planning.check import check_run

        note, lines = check_run(run, plan, machine, batch=arguments.batch)
        sys.stdout.write(f"\n{note}{checked_table(lines)}\n")
    return FITS if plan.fits else DOES_NOT_FIT


def _meet(port: int) -> int:
    store = keep_meeting_point(port)
    sys.stdout.write(f"nodes meet at port {store.port} of this machine, until Ctrl-C\n")
    sys.stdout.flush()
    with suppress(KeyboardInterrupt):
        threading.Event().wait()
    return 0


def _silence() -> None:
    """Leave out what Lightning says of a training that does not happen."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    raise SystemExit(main())
