"""Fill a module with pretrained weights from safetensors files; each rank reads its shards.

The files are memory-mapped, and a rank copies only its own part. A module on the meta device has no
memory to fill yet, so each of its layers gets a ``reset_parameters`` that fills it: FSDP2,
Lightning's strategies and ours call that method once there is memory.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lq_lightning._compat.modules import hugging_face_initializers
from lq_lightning._compat.tensors import local_tensor, shard_slices
from lq_lightning.foundation.parameters import clean_name

__all__ = ["load_pretrained"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_RESET = "reset_parameters"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_WHOLE_MODEL = (
    "transformers reads other formats (GGUF, `pytorch_model.bin`), the whole model on every rank: "
    "`from_pretrained(...)`; `safetensors.torch.save_model(model, file)` then writes one of these."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    """A tensor in a file."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def copy_to(self, tensor: Tensor) -> None:
        """Fill the part of a tensor that this rank holds, reading no more than that."""
        with _opened(self.file) as file:
            entry = file.get_slice(self.key)
            if tuple(entry.get_shape()) != tuple(tensor.shape):  # `copy_` would broadcast
                raise ValueError(
                    f"`{self.key}` has the shape {tuple(entry.get_shape())} in `{self.file}` and "
                    f"{tuple(tensor.shape)} in the module, though they fitted when "
                    "`load_pretrained` was called. Resize layers before it, and leave the files "
                    "as they are until the strategy has set up the module."
                )
            # `entry` is mapped memory: only this part is read
            local_tensor(tensor.detach()).copy_(entry[shard_slices(tensor)])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reset:
    """Stands in for ``reset_parameters`` of one module, once.

    Attributes:
        stored: Stored tensors by their names in the module.
        initialize: Function that fills the others; None if there are none.
        filled: Filled tensors and their sources, by id. The reference keeps an id from being used
            again.
    """

    owner: nn.Module
    stored: dict[str, _Stored]
    initialize: Callable[[], object] | None
    filled: dict[int, tuple[Tensor, _Stored]]

    def __call__(self) -> None:
        own = dict(_own_tensors(self.owner))
        if any(tensor.is_meta for tensor in own.values()):
            raise RuntimeError(
                f"`{type(self.owner).__name__}.reset_parameters()` was called on the meta device "
                "after `load_pretrained`: whether its values should come from the files is not "
                "known. For other values make the layer anew after `load_pretrained`, or call it "
                "in `on_fit_start`. If a module's `reset_parameters` called that of its child, "
                "leave that out: it is called for every module."
            )
        self.owner.__dict__.pop(_RESET, None)
        if self.initialize is not None:
            self.initialize()
        for name, tensor in own.items():
            before = self.filled.get(id(tensor), (tensor, None))[1]
            stored = self.stored.get(name, before)
            if stored is None:
                continue
            if before is not None and before != stored:
                raise ValueError(
                    f"`{before.key}` and `{stored.key}` are one tensor in the module now, but were "
                    "two when `load_pretrained` was called. Tie weights before it."
                )
            stored.copy_to(tensor)  # again if tied: `initialize` has overwritten it
            self.filled[id(tensor)] = tensor, stored


def load_pretrained(module: nn.Module, path: str | Path, strict: bool = True) -> None:
    """Fill a module with weights from safetensors files, as Hugging Face saves them.

    Call it in ``configure_model``, right after the module was made under ``torch.device("meta")``.
    The weights are read once the strategy has cut the module into stages and sharded it, and each
    rank reads its own part, before a checkpoint given as ``ckpt_path`` is loaded. Tensors that are
    not on the meta device are filled at once, sharded or not. Resize layers and tie weights before.

    Values are converted to the dtypes of the module. Of tied weights one name in the files is
    enough. Buffers that are in no file, such as the frequencies of rotary embeddings, are computed
    by transformers (5.0 or later) in modules of its models.

    Args:
        module: Its names are those in the files: ``self.model``, not the LightningModule around it.
        path: A folder with ``model.safetensors``, or with ``model.safetensors.index.json`` and the
            files that it lists; or one safetensors file. The same on all ranks.
        strict: Refuse tensors that only the module or only the files have. With False a warning
            names them; those that are missing keep their values, or are initialized as usual.

    Raises:
        FileNotFoundError: There is no such folder or file, or none of the above in the folder.
        ValueError: Names, shapes or dtypes do not fit, or a file is damaged.
        NotImplementedError: A rank's part of a parameter is not one block of it.
        ModuleNotFoundError: The package ``safetensors`` is missing.
    """
    stored = _read_headers(_find_files(Path(path)))
    persistent = {id(t) for t in module.state_dict(keep_vars=True).values()}
    names: dict[int, list[str]] = defaultdict(list)
    tensors: dict[int, Tensor] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, tensor in _own_tensors(owner):
            if id(tensor) in persistent:
                tensors[id(tensor)] = tensor
                names[id(tensor)].append(clean_name(f"{prefix}.{name}".lstrip(".")))
    named = [(names[key], tensor) for key, tensor in tensors.items()]
    _check_names(module, path, named, stored, strict)
    found = {}
    for every, tensor in named:
        own = [stored[name] for name in every if name in stored]
        if own:
            _check_values(path, tensor, own)
            found[id(tensor)] = own[0]
    initializers = hugging_face_initializers(module)
    filled: dict[int, tuple[Tensor, _Stored]] = {}
    for owner in module.modules():
        _fill(owner, found, initializers.get(owner), filled)


def _fill(
    owner: nn.Module,
    found: dict[int, _Stored],
    initialize: Callable[[], object] | None,
    filled: dict[int, tuple[Tensor, _Stored]],
) -> None:
    """Fill a module's own tensors; those on the meta device are filled later.

    ``found`` are stored tensors by the id of a tensor in the module.
    """
    later = {}
    complete = True
    for name, tensor in _own_tensors(owner):
        stored = found.get(id(tensor))
        if stored is None:
            complete &= not tensor.is_meta
        elif tensor.is_meta:
            later[name] = stored
        else:
            stored.copy_to(tensor)
    usual = owner.__dict__.get(_RESET) or initialize or getattr(owner, _RESET, None)
    rest = usual if not complete and callable(usual) else None
    if later or (rest is not None and rest is initialize):
        owner.__dict__[_RESET] = _Reset(owner=owner, stored=later, initialize=rest, filled=filled)


def _own_tensors(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from owner.named_parameters(recurse=False)
    yield from owner.named_buffers(recurse=False)


# --- files ----------------------------------------------------------------------------------------


def _find_files(path: Path) -> list[Path]:
    if path.is_dir():
        there = [path / name for name in (_SINGLE, _INDEX) if (path / name).is_file()]
        if not there:
            raise FileNotFoundError(
                f"`{path}` has neither `{_SINGLE}` nor `{_INDEX}`. Give a folder that "
                f"`save_pretrained` wrote, or a safetensors file. {_WHOLE_MODEL}"
            )
        path = there[0]
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no `{path}`. Give a local folder or file; "
            "`huggingface_hub.snapshot_download(name)` downloads a model and returns its folder."
        )
    if path.suffix != ".json":
        return [path]
    try:
        listed = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        files = [path.parent / name for name in listed]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"`{path}` is no index of safetensors files: {error!r}.") from error
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise FileNotFoundError(
            f"`{path}` lists files that are not beside it: {', '.join(absent[:5])}. The download "
            "is not complete."
        )
    return files


def _read_headers(files: list[Path]) -> dict[str, _Stored]:
    """Describe the tensors of some files, by name."""
    found = {}
    for file in files:
        with _opened(file) as opened:
            for key in opened.keys():  # noqa: SIM118 (not a dictionary)
                entry = opened.get_slice(key)
                shape = tuple(entry.get_shape())
                dtype = entry[tuple(slice(0, 0) for _ in shape)].dtype
                found[key] = _Stored(file=file, key=key, shape=shape, dtype=dtype)
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Map a file into memory; nothing of it is read before it is used."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "`load_pretrained` needs the package safetensors: `pip install safetensors`."
        ) from error
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(
            f"`{path}` is no safetensors file, or damaged: {error}. {_WHOLE_MODEL}"
        ) from error


# --- checks ---------------------------------------------------------------------------------------


def _check_names(
    module: nn.Module,
    path: str | Path,
    named: list[tuple[list[str], Tensor]],
    stored: dict[str, _Stored],
    strict: bool,
) -> None:
    known = {name for names, _ in named for name in names}
    missing = [names[0] for names, _ in named if not any(name in stored for name in names)]
    unexpected = [name for name in stored if name not in known]
    if not missing and not unexpected:
        return
    sides = ((missing, "only the module has"), (unexpected, "only the files have"))
    texts = [
        f"{len(found)} that {where} (`{'`, `'.join(found[:5])}`{', ...' if found[5:] else ''})"
        for found, where in sides
        if found
    ]
    text = f"the tensors of `{path}` do not fit `{type(module).__name__}`: {' and '.join(texts)}."
    if strict or len(missing) == len(named):
        raise ValueError(
            f"{text} Pass the module that was saved, such as `self.model`, made from the same "
            "configuration. `strict=False` loads what has the same name, if there is any. Where "
            "transformers renames or merges tensors as it loads them, use its `from_pretrained`."
        )
    rank_zero_warn(f"{text} The former are initialized as usual, the latter left out.")


def _check_values(path: str | Path, tensor: Tensor, stored: list[_Stored]) -> None:
    """Refuse stored tensors that a tensor of the module cannot take, or that differ if tied."""
    for each in stored:
        if each.shape != tuple(tensor.shape):
            raise ValueError(
                f"`{each.key}` has the shape {each.shape} in `{path}` and {tuple(tensor.shape)} in "
                "the module. Make the module from the configuration that was saved with it."
            )
        if each.dtype != tensor.dtype and not {each.dtype, tensor.dtype} <= set(_FLOATS):
            raise ValueError(
                f"`{each.key}` is stored as {each.dtype} in `{path}`, which does not convert to "
                f"the {tensor.dtype} of the module. Quantized files load with the library that "
                "made them; save the weights in a floating-point dtype first."
            )
    first, *others = stored
    for other in others:
        with _opened(first.file) as one, _opened(other.file) as two:
            equal = torch.equal(one.get_tensor(first.key), two.get_tensor(other.key))
        if not equal:
            raise ValueError(
                f"`{first.key}` and `{other.key}` differ in `{path}`, but are one tensor in the "
                "module (tied weights). Make the module with `tie_word_embeddings=False`."
            )
