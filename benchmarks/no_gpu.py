"""Triton without a GPU: kernels are compiled for Hopper (sm_90), and launched to nowhere."""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Launcher:
    """Replaces the launcher of compiled kernels.

    Attributes:
        count: Launches so far, of all kernels.
    """

    count = 0

    def __init__(self, source: Any, metadata: Any) -> None:
        """Take what Triton gives to the launcher of a kernel."""

    def __call__(self, *arguments: Any) -> None:
        """Launch nothing."""
        Launcher.count += 1


class Utilities:
    """Replaces the library of the driver."""

    def load_binary(self, *arguments: Any) -> tuple[int, int, int, int, int]:
        """Return a module, a function, its registers, spills, and most threads."""
        return 1, 1, 32, 0, 1024

    def unload_module(self, module: Any) -> None:
        """Forget nothing."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return those of an H100 or H200 that Triton reads."""
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


class Hopper:
    """Replaces Triton's driver: names the target of compilation, and has no device."""

    launcher_cls = Launcher
    utils = Utilities()

    def get_current_device(self) -> int:
        """Return a number for Triton's tables."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """Return a number that nothing is launched on."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Return Hopper."""
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        """Return where the tensors are."""
        return torch.device("cpu")

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        """Return Hopper's."""
        return 9, 0

    def map_python_to_cpp_type(self, name: str) -> str:
        """Return a name that nothing reads."""
        return name

    def allocate_default_profile_scratch(self, *arguments: Any) -> None:
        """Allocate nothing."""


def use() -> None:
    """Let Triton compile for Hopper and launch nothing from now on."""
    driver.set_active(Hopper())
