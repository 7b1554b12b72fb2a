"""Turn a checkpoint directory into one file.

``python -m lq_lightning.checkpoint.consolidate CHECKPOINT OUTPUT`` writes a Lightning ``.ckpt``
that ``load_from_checkpoint``, ``trainer.fit(ckpt_path=...)`` and ``torch.load(weights_only=True)``
read without this package; ``--format safetensors --prefix model.`` writes only the weights of
``self.model``, named as in that model, for Hugging Face's ``from_pretrained`` and other programs.
Tied weights are written once. ``--averaged`` takes the averages of the callback ``EMA`` for the
weights, and leaves out what only the continued run needs. Tensors of a folder pass through files
beside the output, so that no model has to fit into memory.
"""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lq_lightning._compat.checkpoint import unflatten_checkpoint
from lq_lightning.checkpoint.checkpointer import (
    AVERAGE,
    EXTRA,
    EXTRA_TENSORS,
    TIES,
    is_replica_key,
)
from lq_lightning.checkpoint.files import is_sharded_checkpoint, write_in_place
from lq_lightning.checkpoint.folder import ShardedCheckpoint
from lq_lightning.checkpoint.single_file import AtomicCheckpointIO, load_full_checkpoint
from lq_lightning.checkpoint.state import by_position
from lq_lightning.foundation.parameters import clean_name

__all__ = ["consolidate_checkpoint", "main"]

_OF_THE_RUN = ("callbacks", "loops", "lr_schedulers", "optimizer_states", EXTRA)

log = logging.getLogger(__name__)

OutputFormat = Literal["lightning", "safetensors"]


def consolidate_checkpoint(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    format: OutputFormat = "lightning",
    prefix: str = "",
    weights_only: bool | None = None,
    verify: bool = True,
    averaged: bool = False,
) -> None:
    """Write a sharded (or full) checkpoint as one file. Needs no process group and no GPU.

    Args:
        checkpoint: A checkpoint directory or file.
        output: The file to write; it appears when it is complete.
        format: ``"lightning"`` keeps everything, ``"safetensors"`` the model's tensors.
        prefix: Keep only tensors whose name starts so, and cut it off (``"safetensors"`` only).
        weights_only: As in ``torch.load``; ``None`` means ``True``.
        verify: Compare the files with their checksums. A Lightning checkpoint holds the checksums
            of its records, safetensors have none.
        averaged: Write the averages of the callback ``EMA`` in place of the weights they are of,
            and leave out the state of the run, such as that of optimizers.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        ValueError: The checkpoint is incomplete or damaged, or an argument does not fit.
        pickle.UnpicklingError: It needs ``weights_only=False``.
        OSError: The output cannot be written.
        ModuleNotFoundError: The package ``safetensors`` is needed and missing.
    """
    if format not in get_args(OutputFormat):
        raise ValueError(f"`format={format!r}` is not supported: 'lightning' or 'safetensors'.")
    if prefix and format == "lightning":
        raise ValueError(
            f"`prefix={prefix!r}` applies to `format='safetensors'` only: a Lightning checkpoint "
            "keeps the names of the LightningModule. Leave it out or change the format."
        )
    source, target = Path(checkpoint), Path(output)
    _check_output(target, source)
    # before the writing below, whose errors are told as those of the output
    sharded = is_sharded_checkpoint(source)
    opened = ShardedCheckpoint(source, weights_only, verify=verify) if sharded else None
    content = {} if sharded else load_full_checkpoint(source, weights_only, verify=verify)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if opened is not None:
            content = _read_sharded(opened, format == "lightning", averaged, target.parent)
        if averaged:
            content = _with_averages(content, source)
        if format == "lightning":
            AtomicCheckpointIO().save_checkpoint(content, target)
        else:
            _save_safetensors(_select(content["state_dict"], prefix), target)
    except (OSError, RuntimeError) as error:  # torch raises the latter
        raise OSError(
            f"`{target}` could not be written ({error}). Give a file name in a folder that exists "
            "or can be made, on a disk with enough space."
        ) from error


def _check_output(target: Path, source: Path) -> None:
    if source.resolve() in (target.resolve(), *target.resolve().parents):
        raise ValueError(
            f"`output={target}` is or lies in the checkpoint itself: choose another name."
        )
    if target.is_dir():
        raise ValueError(f"`output={target}` is a directory: give the name of a file in it.")


def _with_averages(content: dict[str, Any], source: Path) -> dict[str, Any]:
    """A checkpoint whose weights are its averages, without the state of the run."""
    averages = content.get(EXTRA, {}).get(AVERAGE)
    if not averages:
        raise ValueError(
            f"`{source}` holds no averages: it was saved without the callback "
            "`lq_lightning.callbacks.EMA`, before its first update, or with weights only."
        )
    state = content["state_dict"]
    if missing := sorted(averages.keys() - {clean_name(key) for key in state}):
        raise ValueError(
            f"`{source}` has averages of {missing[:3]}, but no weights of these names: a hook of "
            "the module has renamed or removed them."
        )
    by_place = {  # of weights, as tied ones have one average
        state[key].data_ptr(): averages[clean_name(key)].to(state[key].dtype)
        for key in state
        if clean_name(key) in averages and state[key].numel()
    }

    def average(value: Any) -> Any:
        return by_place.get(value.data_ptr(), value) if isinstance(value, Tensor) else value

    kept = {k: v for k, v in content.items() if k not in _OF_THE_RUN}
    return {**kept, "state_dict": {key: average(value) for key, value in state.items()}}


def _read_sharded(
    checkpoint: ShardedCheckpoint, everything: bool, averaged: bool, folder: Path
) -> dict[str, Any]:
    """Read a folder into memory-mapped, unlinked files in ``folder``."""
    ties = _read_ties(checkpoint)

    def is_wanted(path: tuple[Any, ...]) -> bool:
        if averaged and path[0] == AVERAGE:
            return True
        if everything and not averaged:
            return path[0] != TIES and not is_replica_key(path[0]) and path not in ties
        return path[0] in ("state_dict", "model") and path not in ties

    wanted = {key: path for key, path in checkpoint.paths.items() if is_wanted(path)}
    flat: dict[str, Any] = {}
    for key in wanted:
        described = checkpoint.tensor(key)
        flat[key] = None if described is None else _mapped(*described, folder)
    checkpoint.load(flat)
    state = unflatten_checkpoint(flat, wanted)
    content = checkpoint.read_meta() if everything else {}
    content["state_dict"] = state.pop("state_dict", None) or state.pop("model", {})
    for (_, name), first in ties.items():
        content["state_dict"][name] = content["state_dict"][first]
    for kind, key in EXTRA_TENSORS.items():
        if kind in state:
            content.setdefault(EXTRA, {})[key] = state.pop(kind)
    saved = (key for key in state if key.startswith("optimizer_"))
    optimizers = sorted(saved, key=lambda key: int(key.removeprefix("optimizer_")))
    if optimizers:
        states = [state.pop(key) for key in optimizers]
        content["optimizer_states"] = [
            by_position(found.get("state", {}), found["param_groups"]) for found in states
        ]
    return content


def _read_ties(checkpoint: ShardedCheckpoint) -> dict[tuple[str, str], str]:
    """Paths of tied weights, and the names under which the folder holds their values."""
    further = {key: name for key, (name,) in checkpoint.keys_under(TIES).items()}
    first: dict[str, Any] = dict.fromkeys(further)
    if first:
        checkpoint.load(first)
    paths = checkpoint.keys_under("state_dict").values()
    saved = {clean_name(path[0]): path[0] for path in paths if len(path) == 1}
    return {
        ("state_dict", saved[further[key]]): saved[name]
        for key, name in first.items()
        if further[key] in saved and name in saved
    }


def _mapped(size: torch.Size, dtype: torch.dtype, folder: Path) -> Tensor:
    """An uninitialized tensor on disk, freed with its last reference."""
    nbytes = size.numel() * dtype.itemsize
    if nbytes == 0:
        return torch.empty(size, dtype=dtype)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        # a full disk is an error here, but a SIGBUS once mapped memory is written
        os.posix_fallocate(file.fileno(), 0, nbytes)
        flat = torch.from_file(file.name, shared=True, size=nbytes, dtype=torch.uint8)
    return flat.view(dtype).view(size)


def _select(state: dict[str, Any], prefix: str) -> dict[str, Tensor]:
    """Tensors whose names start with ``prefix``, under the rest of their names."""
    tensors = {k: v for k, v in state.items() if isinstance(v, Tensor)}
    named = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    if not named:
        starts = sorted({key.split(".")[0] + "." for key in tensors})
        raise ValueError(f"no tensor's name starts with `{prefix}`: names start with {starts}.")
    if len(named) < len(tensors):
        others = [key for key in tensors if not key.startswith(prefix)]
        log.warning("left out %d tensors without `%s`: %s", len(others), prefix, others[:5])
    return named


def _save_safetensors(tensors: dict[str, Tensor], target: Path) -> None:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "`format='safetensors'` needs the package safetensors: `pip install safetensors`, or "
            "use `format='lightning'`."
        ) from error
    separate: dict[str, Tensor] = {}
    metadata = {"format": "pt"}
    names: dict[object, str] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and names.setdefault(place, name) != name:  # tied
            metadata[name] = names[place]  # as safetensors' `save_model` does
            continue
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        separate[name] = tensor.contiguous() if whole else tensor.contiguous().clone()
    try:
        write_in_place(target, lambda path: save_file(separate, path, metadata=metadata))
    except SafetensorError as error:
        raise OSError(str(error)) from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of :func:`consolidate_checkpoint`."""
    parser = argparse.ArgumentParser(
        prog="python -m lq_lightning.checkpoint.consolidate",
        description="Turn a checkpoint directory into one file.",
    )
    add = parser.add_argument
    add("checkpoint", help="checkpoint directory (or file)")
    add("output", help="file to write")
    scope = "everything for Lightning, or only the weights as safetensors (default: %(default)s)"
    add("--format", choices=get_args(OutputFormat), default="lightning", help=scope)
    add("--prefix", default="", help="keep only weights whose name starts so, and cut it off")
    averages = "take the averages of the callback EMA for the weights"
    add("--averaged", action="store_true", help=averages)
    objects = "also load arbitrary Python objects, which can run code; only for what you trust"
    add("--no-weights-only", action="store_true", help=objects)
    add("--no-verify", action="store_true", help="do not compare with the checksums first")
    options = parser.parse_args(arguments)
    try:
        consolidate_checkpoint(
            options.checkpoint,
            options.output,
            options.format,
            options.prefix,
            weights_only=False if options.no_weights_only else None,
            verify=not options.no_verify,
            averaged=options.averaged,
        )
    except (OSError, ValueError, ModuleNotFoundError, pickle.UnpicklingError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    written = Path(options.output).stat().st_size
    sys.stdout.write(f"Wrote {options.output} ({_shown_size(written)}).\n")


def _shown_size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.2f} MB"


if __name__ == "__main__":
    main()
