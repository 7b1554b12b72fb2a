"""Which linear layers have FP8 products where a policy asks for them without naming layers.

As is usual in FP8 training (torchao's and NeMo's documentation recommend filters like these): the
layers of the repeated blocks, but not the head that predicts tokens, whose errors are those of the
loss, nor layers whose dimensions FP8 products would pad.
"""

from __future__ import annotations

from torch import Tensor, nn

from lq_lightning.foundation.parameters import embeddings

from .policy import ActivationPolicy, Matmul, SiteKind
from .recompute import find_recompute_units

__all__ = ["Float8Layers"]

_MULTIPLE = 16  # of what FP8 matrix products take


class Float8Layers:
    """Chooses the precision of products in a model.

    Args:
        model: The model.
        policy: Its rules are obeyed everywhere.
    """

    def __init__(self, model: nn.Module, policy: ActivationPolicy) -> None:
        self._policy = policy
        units = find_recompute_units(model).values()
        self._inside = {id(module) for unit in units for module in unit.modules()}
        tables = embeddings(model)
        self._tables = {id(table.weight) for table in tables}
        self._tokens = max((table.num_embeddings for table in tables), default=0)

    def matmul(
        self,
        kind: SiteKind,
        name: str,
        module: nn.Module,
        weight: Tensor | None,
        *,
        transposed: bool = False,
    ) -> tuple[Matmul, str]:
        """Return the precision of a layer's products, and why it is not what the policy says.

        Args:
            kind: ``"linear"``; also of an attention that has the projections itself.
            name: Of the layer in the model.
            module: The layer.
            weight: ``[O, K]``; None if it has none of its own.
            transposed: The weight is ``[K, O]``.

        Returns:
            The precision, and a reason, which is empty if the policy is followed.
        """
        named = self._policy.matmul_rule(kind, name)
        if named is not None or self._policy.matmul == "native" or weight is None:
            return self._policy.matmul_of(kind, name), ""
        rows, columns = weight.shape[:: -1 if transposed else 1]
        if id(weight) in self._tables or rows == self._tokens > columns:
            return "native", "predicts tokens"
        if not self._is_inside(module):
            return "native", "outside of the repeated blocks"
        if rows % _MULTIPLE or columns % _MULTIPLE:
            return "native", f"dimensions are no multiples of {_MULTIPLE}"
        return self._policy.matmul, ""

    def follow(self, kind: SiteKind, name: str, module: nn.Module) -> bool:
        """Return whether FP8 products are expected behind a norm, activation function or MLP."""
        if self._policy.matmul_of(kind, name) == "native":
            return False
        return self._policy.matmul_rule(kind, name) is not None or self._is_inside(module)

    def _is_inside(self, module: nn.Module) -> bool:
        """Whether a module is in a block; all are, if nothing in the model is repeated."""
        return not self._inside or id(module) in self._inside
