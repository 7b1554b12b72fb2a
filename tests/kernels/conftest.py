"""Kernel tests run the Triton code: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import FunctionType, ModuleType

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _patch_language_once() -> Iterator[None]:
    """Patch the language once per kernel, not for every device function: a third of the time.

    Once patched, it is no longer made of builtins.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._patch_lang

    @cache
    def modules(function: FunctionType) -> list[ModuleType]:
        known = function.__globals__.values()
        return [module for module in (tl, tl.core) if any(value is module for value in known)]

    def patch(function: FunctionType) -> object:
        if any(tl.core.is_builtin(module.load) for module in modules(function)):
            return original(function)
        return interpreter._LangPatchScope()

    with pytest.MonkeyPatch.context() as context:
        if hasattr(interpreter, "_LangPatchScope"):
            context.setattr(interpreter, "_patch_lang", patch)
        yield


@pytest.fixture
def device() -> torch.device:
    """Where the Triton kernels of a test run; the reference always runs on the CPU."""
    from triton import knobs

    if torch.cuda.is_available():
        return torch.device("cuda")
    if not knobs.runtime.interpret:
        pytest.fail("without a GPU these tests need TRITON_INTERPRET=1 before triton is imported")
    return torch.device("cpu")
