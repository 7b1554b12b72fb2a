"""Formulas in a normal form, and the ATen operators that build them.

Two formulas that are equal as real functions by the rules here look alike. A formula is a sum of
products of powers of atoms, with numbers as coefficients. Atoms are the input, parameters, and
functions of formulas that no rule takes apart. Everything acts on rows: ``mean`` is over the last
dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MAX_TERMS = 64
_EMPTY: frozenset[tuple[Atom, int]] = frozenset()
_EPS = torch.finfo(torch.float32).eps  # default of `rms_norm`


class UnknownFormula(Exception):
    """No rule gives the formula."""


@dataclass(frozen=True, slots=True)
class Atom:
    """A function that is not taken apart, of a formula or of another value that tells it from
    others.
    """

    name: str
    argument: Hashable = None

    @property
    def is_of_rows(self) -> bool:
        """Whether it is one number per row."""
        if self.name == "mean":
            return True
        return isinstance(self.argument, Formula) and self.argument.is_of_rows


class Formula:
    """A sum of products, sets of atoms with exponents, by coefficient.

    Immutable; equal if no coefficient differs by more than a millionth.
    """

    __slots__ = ("key", "terms")

    def __init__(self, terms: dict[frozenset[tuple[Atom, int]], float]) -> None:
        if len(terms) > _MAX_TERMS or not all(map(math.isfinite, terms.values())):
            raise UnknownFormula("too long, or not finite")
        self.terms = {product: value for product, value in terms.items() if value != 0.0}
        self.key = frozenset((p, float(f"{value:.6g}")) for p, value in self.terms.items())

    def __hash__(self) -> int:
        """Hash of the rounded coefficients."""
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        """Return whether no coefficient differs by more than a millionth."""
        return isinstance(other, Formula) and self.key == other.key

    def __add__(self, other: Formula) -> Formula:
        """Return the sum."""
        terms = dict(self.terms)
        for product, value in other.terms.items():
            before = terms.get(product, 0.0)
            terms[product] = before + value
            if abs(terms[product]) <= 1e-12 * abs(before):  # only rounding errors
                del terms[product]
        return Formula(terms)

    def __mul__(self, other: Formula) -> Formula:
        """Return the product."""
        terms: dict[frozenset[tuple[Atom, int]], float] = {}
        for first, a in self.terms.items():
            for second, b in other.terms.items():
                exponents = dict(first)
                for each, exponent in second:
                    exponents[each] = exponents.get(each, 0) + exponent
                product = frozenset((k, n) for k, n in exponents.items() if n)
                terms[product] = terms.get(product, 0.0) + a * b
        return Formula(terms)

    def scaled(self, factor: float) -> Formula:
        """Return ``factor`` times this."""
        return Formula({product: factor * value for product, value in self.terms.items()})

    def inverse(self) -> Formula:
        """Return one over this."""
        if len(self.terms) == 1:
            ((product, value),) = self.terms.items()
            return Formula({frozenset((k, -n) for k, n in product): 1.0 / value})
        return Formula({frozenset([(Atom("sum", self), -1)]): 1.0})

    def power(self, exponent: float) -> Formula:
        """Return this to a power that is a multiple of a half, up to 4."""
        count, half = divmod(abs(exponent), 1.0)
        if half not in (0.0, 0.5) or count > 4:
            raise UnknownFormula(f"to the power of {exponent}")
        result = root(self) if half else number(1.0)
        for _ in range(int(count)):
            result = result * self
        return result.inverse() if exponent < 0 else result

    @property
    def constant(self) -> float:
        """The term without atoms."""
        return self.terms.get(_EMPTY, 0.0)

    @property
    def is_of_rows(self) -> bool:
        """Whether it is one number per row."""
        return all(each.is_of_rows for product in self.terms for each, _ in product)

    def atoms(self) -> Iterator[Atom]:
        """Yield the atoms of all products, but no nested ones."""
        yield from (each for product in self.terms for each, _ in product)


def number(value: float) -> Formula:
    """Return a constant."""
    return Formula({_EMPTY: float(value)})


def atom(name: str, argument: Hashable = None) -> Formula:
    """Return a formula that is an atom."""
    return Formula({frozenset([(Atom(name, argument), 1)]): 1.0})


def root(x: Formula) -> Formula:
    """Return the square root."""
    return atom("root", x)


def mean(x: Formula) -> Formula:
    """Return the mean of each row."""
    result = Formula({})
    for product, value in x.terms.items():
        outside = frozenset(factor for factor in product if factor[0].is_of_rows)
        inside = Formula({product - outside: 1.0})
        averaged = inside if product == outside else atom("mean", inside)
        result = result + Formula({outside: value}) * averaged
    return result


def sigmoid(x: Formula) -> Formula:
    """Return ``1 / (1 + exp(-x))``."""
    return (number(1.0) + atom("exp", x.scaled(-1.0))).inverse()


def tanh(x: Formula) -> Formula:
    """Return ``2 * sigmoid(2 * x) - 1``."""
    return sigmoid(x.scaled(2.0)).scaled(2.0) + number(-1.0)


def _gelu_tanh(x: Formula) -> Formula:
    inner = (x + x.power(3).scaled(0.044715)).scaled(math.sqrt(2.0 / math.pi))
    return x.scaled(0.5) * (number(1.0) + tanh(inner))


ACTIVATIONS: dict[str, Callable[[Formula], Formula]] = {
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x.scaled(0.5) * (number(1.0) + atom("erf", x.scaled(math.sqrt(0.5)))),
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: atom("relu", x),
    "relu2": lambda x: atom("relu", x).power(2),
    "quick_gelu": lambda x: x * sigmoid(x.scaled(1.702)),
}


Of = Callable[[Any], Formula]  # formula of a known tensor, or of a number
Result = Formula | Sequence[Formula | None]


def _is_last(x: Tensor, dim: Any) -> bool:
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    return [d % x.dim() for d in dims] == [x.dim() - 1]


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise UnknownFormula(what)


def _add(of: Of, x: Any, y: Any, alpha: Any = 1) -> Formula:
    return of(x) + of(y).scaled(alpha)


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


# By name without overload; in-place operators share the rule of the name without `_`.
OPERATORS: dict[str, Callable[..., Result]] = {
    "add": _add,
    "sub": lambda of, x, y, alpha=1: _add(of, x, y, -alpha),
    "rsub": lambda of, x, y, alpha=1: _add(of, y, x, -alpha),
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
    "detach": _itself,  # by autograd; in the code itself it is refused before
    "slice": _slice,
    "split": _split,
    "split_with_sizes": _split,
}
