"""Triton's interpreter: when kernels can run in it, and what makes it several times as fast."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from packaging.version import Version

__all__ = ["quick_interpreter", "skip_old_interpreter"]

# Of Triton 3.6 and 3.7 only the interpreter is at fault: what they compile for an H200 is right.
_OLD = Version(metadata.version("triton")) < Version("3.9")
skip_old_interpreter = pytest.mark.skipif(
    _OLD and not torch.cuda.is_available(),
    reason="the interpreter of Triton < 3.9 fails or computes other bits; run on a GPU",
)


def quick_interpreter(context: pytest.MonkeyPatch) -> None:
    """Let the interpreter do once what it does for every operation, for the life of ``context``.

    Values do not change: each patch answers from what the original returned for the same
    arguments, or makes the same operations in the same order on more elements at a time.
    """
    from triton.runtime import interpreter

    if hasattr(interpreter, "_LangPatchScope"):
        context.setattr(interpreter, "_patch_lang", _patch_once(interpreter))
    context.setattr(interpreter, "_get_np_dtype", _by_name(interpreter._get_np_dtype))
    context.setattr(interpreter.ReduceOps, "generic_reduce", _reduce_slices(interpreter.ReduceOps))
    _remember_types(context)
    _take_equal_types(context)


def _patch_once(interpreter: Any) -> Any:
    """Patch the language once per kernel, not for every device function.

    Once patched, it is no longer made of builtins.
    """
    import triton.language as tl

    original = interpreter._patch_lang

    @cache
    def modules(function: FunctionType) -> list[ModuleType]:
        known = function.__globals__.values()
        return [module for module in (tl, tl.core) if any(value is module for value in known)]

    def patch(function: FunctionType) -> object:
        if any(tl.core.is_builtin(module.load) for module in modules(function)):
            return original(function)
        return interpreter._LangPatchScope()

    return patch


def _by_name(original: Any) -> Any:
    """NumPy's type of each of Triton's: the name of a pointer or a block tells its elements."""
    known: dict[str, Any] = {}

    def np_dtype(dtype: Any) -> Any:
        found = known.get(dtype.name)
        if found is None:
            found = known[dtype.name] = original(dtype)
        return found

    return np_dtype


def _reduce_slices(reduce_ops: Any) -> Any:
    """Reductions by functions of our own: slices along the axis, not single elements, in order."""
    original = reduce_ops.generic_reduce

    def generic_reduce(self: Any, inputs: tuple[Any, ...]) -> Any:
        arrays = [tensor.handle.data for tensor in inputs]
        if self.axis is None or arrays[0].ndim == 1:
            return original(self, inputs)

        def tensors(values: Any) -> list[Any]:
            return [self.to_tensor(v, t.dtype) for v, t in zip(values, inputs, strict=True)]

        results = tensors(array.take(0, self.axis) for array in arrays)
        for i in range(1, arrays[0].shape[self.axis]):
            both = self.combine_fn.fn(
                *results, *tensors(array.take(i, self.axis) for array in arrays)
            )
            results = tensors(t.handle.data for t in (both if isinstance(both, tuple) else (both,)))
        if not self.keep_dims:
            return results
        return tensors(
            t.handle.data.reshape([*a.shape[: self.axis], 1, *a.shape[self.axis + 1 :]])
            for t, a in zip(results, arrays, strict=True)
        )

    return generic_reduce


def _remember_types(context: pytest.MonkeyPatch) -> None:
    """Block types and the shapes of tensors, made anew for each result: a third of the time."""
    from triton.language import core

    block_init, tensor_init = core.block_type.__init__, core.tensor.__init__
    blocks: dict[Any, Any] = {}
    shapes: dict[Any, Any] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        numbers = [s.value if isinstance(s, core.constexpr) else s for s in shape]
        key = (element_ty.name, *numbers)
        same = blocks.get(key)
        if same is None:
            block_init(self, element_ty, shape)
            blocks[key] = self
        else:
            self.element_ty, self.shape = element_ty, same.shape
            self.numel, self.name = same.numel, same.name

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = type.shape if type.is_block() else ()
        same = shapes.get(key)
        if same is None:
            tensor_init(self, handle, type)
            shapes[key] = (self.shape, self.numel)
        else:
            self.shape, self.numel = same
            self.handle, self.type, self.dtype = handle, type, type.scalar

    context.setattr(core.block_type, "__init__", block)
    context.setattr(core.tensor, "__init__", tensor)


def _take_equal_types(context: pytest.MonkeyPatch) -> None:
    """Operands of one type as they are, and no checks whose results nobody reads."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    unwrap, block_eq, checked, broadcast = (
        core._unwrap_if_constexpr,
        core.block_type.__eq__,
        TritonSemantic.binary_op_type_checking_impl,
        TritonSemantic.broadcast_impl_value,
    )
    plain = (core.tensor, core.dtype, core.block_type, core.pointer_type, int, bool, float, str)

    def unwrapped(o: Any) -> Any:
        if type(o) is core.constexpr:
            return o.value
        return o if type(o) in plain else unwrap(o)

    def equal(self: Any, other: Any) -> Any:
        return self is other or (
            self.name == other.name if type(other) is core.block_type else block_eq(self, other)
        )

    def same(lhs: Any, rhs: Any) -> bool:
        return type(lhs) is type(rhs) is core.tensor and lhs.type.name == rhs.type.name

    def check(self: Any, lhs: Any, rhs: Any, *options: bool, div_or_mod: bool = False) -> Any:
        known = same(lhs, rhs) and not lhs.dtype.is_ptr()
        divides = div_or_mod or options[3:] == (True,)
        if known and (not divides or lhs.dtype.primitive_bitwidth >= 32):
            return lhs, rhs
        options = options or (False, False, True, div_or_mod)
        return checked(self, lhs, rhs, *options)

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if same(lhs, rhs) else broadcast(self, lhs, rhs)

    context.setattr(core, "_unwrap_if_constexpr", unwrapped)
    context.setattr(core.block_type, "__eq__", equal)
    context.setattr(TritonSemantic, "binary_op_type_checking_impl", check)
    context.setattr(TritonSemantic, "broadcast_impl_value", broadcasted)
    # asserts are made in debug mode alone, which the interpreter has none of
    context.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None)
