"""Read the ``.metadata`` of a checkpoint directory without running what somebody put into it.

torch.distributed.checkpoint describes its files in a pickle, and reads that without restriction.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lq_lightning._compat.checkpoint import LAYOUT_BY_NAME, METADATA_CLASSES
from lq_lightning.checkpoint.checksums import HOW_TO_TRUST, REMEDY

if TYPE_CHECKING:  # torch.distributed.checkpoint takes 0.1 s to import: not before it is needed
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["METADATA_FILENAME", "needed_nbytes", "read_metadata"]

METADATA_FILENAME = ".metadata"

# Where the checkpoint was written: pure paths, so that another system or Python can read them.
_PATHS = {
    "Path": pathlib.PurePosixPath,
    "PosixPath": pathlib.PurePosixPath,
    "PurePosixPath": pathlib.PurePosixPath,
    "WindowsPath": pathlib.PureWindowsPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}
_PATH_MODULES = ("pathlib", "pathlib._local")  # Python 3.13 has moved the classes
_VALUES = (torch.dtype, torch.layout, torch.memory_format)
_CAN_BE_CHANGED = 1 << 9  # Py_TPFLAGS_HEAPTYPE; other classes refuse new attributes
_OF_CLASSES = ("__name__", "__qualname__", "__bases__")  # attributes that `vars` does not show


class _RefusedError(Exception):
    """The pickle asks for something that no metadata needs."""


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the classes of DCP's metadata and nothing else."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._attributes: dict[int, tuple[Any, dict[str, Any]]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class or value.

        Raises:
            _RefusedError: It is not one.
        """
        found = self._find(module, name)
        if isinstance(found, type) and found.__flags__ & _CAN_BE_CHANGED:
            for shared in (found, *getattr(found, "__members__", {}).values()):
                self._attributes.setdefault(id(shared), (shared, _attributes(shared)))
        return found

    def _find(self, module: str, name: str) -> Any:
        if module in _PATH_MODULES and name in _PATHS:
            return _PATHS[name]
        if module == "torch" and isinstance(getattr(torch, name, None), _VALUES):
            return getattr(torch, name)
        if (module, name) == LAYOUT_BY_NAME:  # torch's own function has a cache to write to
            layouts = {str(v): v for v in vars(torch).values() if isinstance(v, torch.layout)}
            return layouts.__getitem__
        if (module, name) in METADATA_CLASSES:
            return super().find_class(module, name)
        raise _RefusedError(f"`{module}.{name}`")

    def check_classes(self) -> None:
        """Undo what was done to classes and members of enums, whose attributes a pickle can set.

        Raises:
            _RefusedError: Something was.
        """
        found = []
        for shared, before in self._attributes.values():
            after = _attributes(shared)
            changed = [key for key in after if key not in before or after[key] is not before[key]]
            for key in changed:
                if key in before:
                    setattr(shared, key, before[key])
                else:
                    delattr(shared, key)
                found.append(f"an attribute `{key}` of `{shared}`")
        if found:
            raise _RefusedError(found[0])


def _attributes(shared: Any) -> dict[str, Any]:
    attributes = dict(vars(shared))
    if isinstance(shared, type):
        attributes |= {key: getattr(shared, key) for key in _OF_CLASSES}
    return attributes


def _restricted(content: bytes) -> Any:
    unpickler = _MetadataUnpickler(io.BytesIO(content))
    try:
        return unpickler.load()
    finally:
        unpickler.check_classes()


def read_metadata(folder: Path, weights_only: bool) -> Metadata:
    """Read DCP's description of a checkpoint directory.

    Args:
        folder: The directory.
        weights_only: Build nothing but the description. False runs whatever the file says.

    Raises:
        pickle.UnpicklingError: It needs ``weights_only=False``.
        ValueError: It is cut off, damaged or something else.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    path = folder / METADATA_FILENAME
    content = path.read_bytes()
    try:
        metadata = _restricted(content) if weights_only else pickle.loads(content)
    except _RefusedError as error:
        raise pickle.UnpicklingError(
            f"`{path}` asks for {error}, which the description of a checkpoint does not need: it "
            f"may be an attack. Nothing was run. If you trust the whole folder, {HOW_TO_TRUST}."
        ) from error
    except Exception as error:  # a damaged pickle raises nearly everything
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"`{path}` is cut off or damaged ({reason}). {REMEDY}") from error
    if not isinstance(metadata, Metadata):
        kind = type(metadata).__name__
        raise ValueError(f"`{path}` holds a {kind} instead of DCP's Metadata. {REMEDY}")
    return metadata


def needed_nbytes(folder: Path, metadata: Metadata) -> dict[str, int]:
    """How long each data file must at least be, by name.

    Raises:
        ValueError: The description does not have its usual form, or refers to other folders.
    """
    needed: dict[str, int] = {}
    try:
        for info in (metadata.storage_data or {}).values():
            end = info.offset + info.length
            needed[info.relative_path] = max(end, needed.get(info.relative_path, 0))
        outside = [name for name in needed if Path(name).name != name]
        for part in (metadata.state_dict_metadata, metadata.planner_data or {}):
            part.items()
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"`{folder / METADATA_FILENAME}` is damaged or was not written by "
            f"torch.distributed.checkpoint ({error}). {REMEDY}"
        ) from error
    if outside:
        raise ValueError(
            f"`{folder / METADATA_FILENAME}` refers to `{outside[0]}`: data files lie in the "
            f"folder itself. {REMEDY}"
        )
    return needed
