"""Formulas in a normal form: two that are equal as real functions by the rules here look alike.

A formula is a sum of products of powers of atoms, with numbers as coefficients. Atoms are the
input, parameters, and functions of formulas that no rule takes apart. All of it acts on rows:
``mean`` is that of the last dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

__all__ = ["ACTIVATIONS", "Atom", "Formula", "UnknownFormula", "atom", "mean", "number", "root"]

_MAX_TERMS = 64
_EMPTY: frozenset[tuple[Atom, int]] = frozenset()


class UnknownFormula(Exception):
    """No rule gives the formula."""


@dataclass(frozen=True, slots=True)
class Atom:
    """A function that is not taken apart.

    Attributes:
        name: of it.
        argument: a formula, or another value that tells it from atoms of the same name.
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
    """A sum of products. Immutable; equal if no coefficient differs by more than a millionth.

    Args:
        terms: Coefficients by products, which are sets of atoms with their exponents.
    """

    __slots__ = ("key", "terms")

    def __init__(self, terms: dict[frozenset[tuple[Atom, int]], float]) -> None:
        if len(terms) > _MAX_TERMS or not all(map(math.isfinite, terms.values())):
            raise UnknownFormula("too long, or not finite")
        self.terms = {product: value for product, value in terms.items() if value != 0.0}
        self.key = frozenset((p, float(f"{value:.6g}")) for p, value in self.terms.items())

    def __hash__(self) -> int:
        """Equal formulas have equal ones."""
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        """Whether no coefficient differs by more than a millionth."""
        return isinstance(other, Formula) and self.key == other.key

    def __add__(self, other: Formula) -> Formula:
        """Return the sum."""
        terms = dict(self.terms)
        for product, value in other.terms.items():
            before = terms.get(product, 0.0)
            terms[product] = before + value
            if abs(terms[product]) <= 1e-12 * abs(before):  # nothing but rounding errors
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
        """Return this to a power that is a multiple of a half.

        Raises:
            UnknownFormula: Any other power, or one above 4.
        """
        count, half = divmod(abs(exponent), 1.0)
        if half not in (0.0, 0.5) or count > 4:
            raise UnknownFormula(f"to the power of {exponent}")
        result = root(self) if half else number(1.0)
        for _ in range(int(count)):
            result = result * self
        return result.inverse() if exponent < 0 else result

    @property
    def constant(self) -> float:
        """The summand without atoms."""
        return self.terms.get(_EMPTY, 0.0)

    @property
    def is_of_rows(self) -> bool:
        """Whether it is one number per row."""
        return all(each.is_of_rows for product in self.terms for each, _ in product)

    def atoms(self) -> Iterator[Atom]:
        """Yield the atoms of all products, but no atoms nested in those."""
        for product in self.terms:
            for each, _ in product:
                yield each


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


def _gelu(x: Formula) -> Formula:
    return x.scaled(0.5) * (number(1.0) + atom("erf", x.scaled(math.sqrt(0.5))))


def _gelu_tanh(x: Formula) -> Formula:
    inner = (x + x.power(3).scaled(0.044715)).scaled(math.sqrt(2.0 / math.pi))
    return x.scaled(0.5) * (number(1.0) + tanh(inner))


ACTIVATIONS: dict[str, Callable[[Formula], Formula]] = {
    "silu": lambda x: x * sigmoid(x),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: atom("relu", x),
    "relu2": lambda x: atom("relu", x).power(2),
    "quick_gelu": lambda x: x * sigmoid(x.scaled(1.702)),
}
