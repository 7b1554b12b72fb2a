"""Whether a checkpointed region is a continuous function of its input.

A region that is computed again from a rounded input has to take the same path. Where values decide
on one (experts that a router chooses, a branch on ``x.mean() > 0``), rounding gives other outputs
and gradients, or tensors of other shapes. Only regions of operators that are known to be continuous
may have a rounded input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lq_lightning._compat.modes import OperatorMode
from lq_lightning._compat.saved_tensors import (
    has_storage,
    storage_key,
    storage_reference,
)
from lq_lightning.foundation.nested import tensors_in

__all__ = ["RegionWatch"]

# ATen operators, without the underscore of in-place ones. A mask or index that they take does not
# depend on the region's input, or else the operator that made it is not listed here.
_VIEWS = """
    alias as_strided _conj detach diagonal expand imag lift_fresh movedim narrow permute real
    _reshape_alias resolve_conj resolve_neg reshape select slice split split_with_sizes squeeze t
    transpose unbind unflatten unfold _unsafe_view unsqueeze view view_as_complex view_as_real
"""
_MOVES = """
    cat clone constant_pad_nd contiguous copy _to_copy embedding fill flip gather index index_add
    index_copy index_put _index_put_impl index_select masked_fill pixel_shuffle pixel_unshuffle
    reflection_pad1d reflection_pad2d repeat repeat_interleave replication_pad2d roll scatter
    scatter_add select_scatter slice_scatter stack tril triu where zero
"""
_FUNCTIONS = """
    abs add addcdiv addcmul celu clamp clamp_max clamp_min cos div elu erf exp expm1 gelu glu
    hardsigmoid hardswish hardtanh leaky_relu lerp log log1p log2 logaddexp log_sigmoid_forward
    maximum minimum mish mul neg pow _prelu_kernel reciprocal relu rsqrt rsub sigmoid silu sin
    softplus sqrt sub tanh
"""
_REDUCTIONS = """
    _adaptive_avg_pool2d amax amin avg_pool2d _batch_norm_with_update cudnn_batch_norm cumsum
    _fused_rms_norm linalg_vector_norm _log_softmax logcumsumexp logsumexp max_pool2d_with_indices
    mean native_batch_norm _native_batch_norm_legit native_dropout native_group_norm
    native_layer_norm norm prod _safe_softmax _softmax std sum upsample_bilinear2d
    upsample_nearest2d var var_mean
"""
_PRODUCTS = """
    addbmm addmm addmv baddbmm bmm convolution dot _grouped_mm linear mm mv _scaled_mm
    _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_fused_attention_overrideable
"""
# These take a shape from a tensor, and no value.
_SHAPES = """
    full_like new_full new_ones new_zeros ones_like rand_like randn_like zeros_like
"""
# These replace all values by random ones.
_RANDOM = "exponential normal uniform"
_CONTINUOUS = frozenset(
    " ".join((_VIEWS, _MOVES, _FUNCTIONS, _REDUCTIONS, _PRODUCTS, _RANDOM)).split()
)
# Operators of other libraries: our codes, which are only saved, and collectives.
_LIBRARIES = ("lq_lightning::", "_c10d_functional::", "c10d::", "c10d_functional::", "fsdp::")
_LIKE = frozenset(_SHAPES.split())
_EMPTY = ("empty", "new_empty")  # their names begin so
_TO_PYTHON = {  # by which values leave without an operator
    Tensor.tolist: "tolist",
    Tensor.numpy: "numpy",
    Tensor.__array__: "__array__",
    Tensor.__dlpack__: "__dlpack__",
}


class _Operators(OperatorMode):
    """Tracks which values depend on tensors, operator by operator.

    Memory that is not initialized is followed, too, and that whose address is asked for: a library
    may fill it without an operator.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[Tensor], note: Callable[[str], None]) -> None:
        super().__init__()
        self._followed: dict[int, Any] = {}  # storages; references keep others out of their places
        self._note = note
        for tensor in tensors:
            self.follow(tensor)

    def follow(self, tensor: Tensor) -> None:
        if has_storage(tensor):
            self._followed[storage_key(tensor)] = storage_reference(tensor)

    def _is_followed(self, tensor: Tensor) -> bool:
        return not has_storage(tensor) or storage_key(tensor) in self._followed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name, _, overload = str(func.name()).partition(".")
        short = name.removeprefix("aten::").removesuffix("_")
        if short.startswith(_EMPTY):
            self.follow(result)
            return result
        if short in _LIKE or not any(map(self._is_followed, tensors_in((args, kwargs)))):
            return result
        if not _is_continuous(name, short, overload, args, kwargs):
            self._note(name)
        written = args[:1] if name.endswith("_") else ()
        for tensor in tensors_in((result, written, kwargs.get("out"))):
            self.follow(tensor)
        return result


def _is_continuous(
    name: str, short: str, overload: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    if name.startswith(_LIBRARIES):
        return True
    if short == "_to_copy":
        return not _rounds(args[0].dtype, kwargs.get("dtype"))
    if short == "copy":
        return not _rounds(args[1].dtype, args[0].dtype)
    if short == "bernoulli":
        return overload in ("float", "p")  # else with the tensor's values as probabilities
    return short in _CONTINUOUS and "mode" not in overload  # modes of division round


def _rounds(before: torch.dtype, after: torch.dtype | None) -> bool:
    """Whether a cast rounds to integers or booleans."""
    exact = after is None or after.is_floating_point or after.is_complex
    return before.is_floating_point and not exact


class _ToPython(TorchFunctionMode):
    """Sees functions that read a tensor's values without an operator."""

    def __init__(self, operators: _Operators, note: Callable[[str], None]) -> None:
        super().__init__()
        self._operators, self._note = operators, note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _TO_PYTHON:
            self._note(_TO_PYTHON[func])
        elif func is Tensor.data_ptr:
            self._operators.follow(args[0])
        return func(*args, **(kwargs or {}))


class RegionWatch:
    """Looks at the operators of one forward, inside of a ``with`` block.

    Takes several times as long as the forward on the host: done for the first call only.

    Args:
        tensors: all tensors in the region's input.

    Attributes:
        found: name of the first operator on values that depend on these tensors and that is not
            known to be continuous; empty if there was none.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.found = ""
        operators = _Operators(tensors, self._note)
        self._modes: tuple[Any, ...] = (_ToPython(operators, self._note), operators)

    def _note(self, name: str) -> None:
        self.found = self.found or name

    def __enter__(self) -> RegionWatch:
        """Begin to look."""
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Look no longer."""
        for mode in reversed(self._modes):
            mode.__exit__(*error)
