"""What each operator does to formulas; what is not here is not known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .algebra import ACTIVATIONS, Formula, UnknownFormula, atom, mean, number, root, sigmoid, tanh

__all__ = ["OPERATORS", "Of", "Result"]

Of = Callable[[Any], Formula]  # of a tensor that was made before, or of a number
Result = Formula | Sequence[Formula | None]

_EPS = torch.finfo(torch.float32).eps  # of `rms_norm`, if it is given none


def _is_last(x: Tensor, dim: Any) -> bool:
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    return [d % x.dim() for d in dims] == [x.dim() - 1]


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise UnknownFormula(what)


def _add(of: Of, x: Any, y: Any, alpha: Any = 1) -> Formula:
    return of(x) + of(y).scaled(alpha)


def _sub(of: Of, x: Any, y: Any, alpha: Any = 1) -> Formula:
    return of(x) + of(y).scaled(-alpha)


def _rsub(of: Of, x: Any, y: Any, alpha: Any = 1) -> Formula:
    return of(y) + of(x).scaled(-alpha)


def _pow(of: Of, x: Any, exponent: Any) -> Formula:
    _check(isinstance(exponent, (int, float)), "a power that is a tensor")
    return of(x).power(float(exponent))


def _mean(
    of: Of, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Formula:
    _check(_is_last(x, dim) and keepdim and dtype in (None, x.dtype), "a mean of something else")
    return mean(of(x))


def _sum(
    of: Of, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Formula:
    return _mean(of, x, dim, keepdim, dtype=dtype).scaled(x.shape[-1])


def _variance(
    of: Of, x: Tensor, dim: Any, *, correction: Any = 1, keepdim: bool = False
) -> Formula:
    _check(_is_last(x, dim) and keepdim and correction == 0, "a variance of something else")
    centered = of(x) + mean(of(x)).scaled(-1.0)
    return mean(centered * centered)


def _layer_norm(
    of: Of, x: Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> Sequence[Formula | None]:
    _check(list(shape) == [x.shape[-1]], "a norm of several dimensions")
    centered = of(x) + mean(of(x)).scaled(-1.0)
    y = centered * (root(mean(centered * centered) + number(eps))).inverse()
    y = y if weight is None else y * of(weight)
    return [y if bias is None else y + of(bias), None, None]


def _rms_norm(
    of: Of, x: Tensor, shape: Sequence[int], weight: Any, eps: float | None
) -> Sequence[Formula | None]:
    _check(list(shape) == [x.shape[-1]], "a norm of several dimensions")
    under = mean(of(x).power(2)) + number(_EPS if eps is None else eps)
    y = of(x) * root(under).inverse()
    return [y if weight is None else y * of(weight), None]


def _gelu(of: Of, x: Any, approximate: str = "none") -> Formula:
    return ACTIVATIONS["gelu" if approximate == "none" else "gelu_tanh"](of(x))


def _clamp(of: Of, x: Any, low: Any = None, high: Any = None) -> Formula:
    _check(isinstance(low, (int, float)) and low == 0 and high is None, "clamped")
    return atom("relu", of(x))


def _same_rows(of: Of, x: Tensor, shape: Sequence[int], **_: Any) -> Formula:
    """A view that neither splits nor joins rows."""
    _check(bool(shape) and shape[-1] in (x.shape[-1], -1), "a view of parts of rows")
    _check(shape[-1] != -1 or list(shape[:-1]) == list(x.shape[:-1]), "a view of parts of rows")
    return of(x)


def _expand(of: Of, x: Tensor, shape: Sequence[int], **_: Any) -> Formula:
    _check(list(shape) == list(x.shape), "expanded")
    return of(x)


def _itself(of: Of, x: Any, **_: Any) -> Formula:
    return of(x)


def _part(of: Of, x: Tensor, start: int, stop: int) -> Formula:
    whole = start == 0 and stop >= x.shape[-1]
    return of(x) if whole else atom("part", (start, stop, of(x)))


def _slice(
    of: Of, x: Tensor, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1
) -> Formula:
    width = x.shape[dim]
    first, last, _ = slice(start, stop).indices(width)
    whole = (first, last, step) == (0, width, 1)
    _check(whole or (_is_last(x, dim) and step == 1), "some rows")
    return of(x) if whole else _part(of, x, first, last)


def _split(of: Of, x: Tensor, size: Any, dim: int = 0) -> Sequence[Formula]:
    _check(_is_last(x, dim), "split by rows")
    width = x.shape[-1]
    sizes = size if isinstance(size, (list, tuple)) else [size] * -(-width // size)
    ends = [min(width, sum(sizes[: i + 1])) for i in range(len(sizes))]
    return [_part(of, x, start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _product(of: Of, x: Tensor, matrix: Any) -> Formula:
    _check(isinstance(matrix, torch.nn.Parameter), "a product of something else")
    return atom("product", (of(x), of(matrix)))


def _unary(function: Callable[[Formula], Formula]) -> Callable[..., Formula]:
    return lambda of, x: function(of(x))


# By name without overload; those that change their first argument have the rule without `_`.
OPERATORS: dict[str, Callable[..., Result]] = {
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "mul": lambda of, x, y: of(x) * of(y),
    "div": lambda of, x, y: of(x) * of(y).inverse(),
    "pow": _pow,
    "neg": _unary(lambda x: x.scaled(-1.0)),
    "reciprocal": _unary(Formula.inverse),
    "sqrt": _unary(root),
    "rsqrt": _unary(lambda x: root(x).inverse()),
    "mean": _mean,
    "sum": _sum,
    "var": _variance,
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _rms_norm,
    "sigmoid": _unary(sigmoid),
    "tanh": _unary(tanh),
    "exp": _unary(lambda x: atom("exp", x)),
    "erf": _unary(lambda x: atom("erf", x)),
    "relu": _unary(lambda x: atom("relu", x)),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "silu": _unary(ACTIVATIONS["silu"]),
    "gelu": _gelu,
    "mm": _product,
    "addmm": lambda of, bias, x, matrix: of(bias) + _product(of, x, matrix),
    "view": _same_rows,
    "_unsafe_view": _same_rows,
    "expand": _expand,
    "_to_copy": _itself,
    "clone": _itself,
    "alias": _itself,
    "detach": _itself,  # autograd's own; those of the code itself are refused before
    "slice": _slice,
    "split": _split,
    "split_with_sizes": _split,
}
