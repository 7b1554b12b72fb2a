"""Communication plan: the wire format of each parameter, fixed before step 1."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lq_lightning.data_parallel.all_gather import WeightDifferenceAllGather
from lq_lightning.data_parallel.config import GradientQuantization, WeightQuantization
from lq_lightning.data_parallel.reduce_scatter import TwoLevelReduceScatter
from lq_lightning.data_parallel.unit import Unit
from lq_lightning.foundation.topology import Topology

_MAX_REASONS = 6
# Of the elements that are trained. In a GPT of 128 channels norms and biases are one percent.
_USUAL_SHARE = 0.05


class TensorPlan(NamedTuple):
    """Wire format of one parameter.

    Attributes:
        name: Fully qualified parameter name.
        numel: Elements of the whole parameter.
        weights: Format of its weights: ``"quantized"``, ``"full"`` or ``"skipped"``.
        gradients: Format of its gradients: ``"quantized"``, ``"full"`` or ``"none"``.
        reason: Why something is not quantized; empty if all is.
        vocabulary: Whether its gradients are encoded in ``vocabulary_bits``.
        tied: Its other names.
    """

    name: str
    numel: int
    weights: str
    gradients: str
    reason: str
    vocabulary: bool = False
    tied: tuple[str, ...] = ()


class CommunicationPlan(NamedTuple):
    """The plan of a whole model.

    Attributes:
        tensors: One entry per parameter.
        weights: Description of the weight codec in use.
        gradients: Description of the gradient codecs in use.
    """

    tensors: tuple[TensorPlan, ...]
    weights: str
    gradients: str

    @property
    def trained(self) -> tuple[TensorPlan, ...]:
        """Parameters that are trained."""
        return tuple(t for t in self.tensors if t.gradients != "none")

    @property
    def frozen(self) -> tuple[TensorPlan, ...]:
        """Parameters that are not trained."""
        return tuple(t for t in self.tensors if t.gradients == "none")

    @property
    def full_precision(self) -> tuple[TensorPlan, ...]:
        """Trained parameters sent in full precision somewhere although a codec is on."""
        return tuple(t for t in self.trained if t.reason)

    @property
    def vocabulary(self) -> tuple[TensorPlan, ...]:
        """Embeddings and heads whose gradients have bits of their own."""
        return tuple(t for t in self.tensors if t.vocabulary)

    @property
    def leaves_out_much(self) -> bool:
        """Whether more is sent in full precision than norms and biases of a model usually are."""
        return _numel(self.full_precision) > _USUAL_SHARE * _numel(self.trained)

    def summary(self) -> str:
        """A few lines for people: what is quantized, what is not, why, and what to do about it."""
        lines = [f"weights: {self.weights}", f"gradients: {self.gradients}"]
        trained, exact = _numel(self.trained), _numel(self.full_precision)
        if trained:
            count = len(self.trained) - len(self.full_precision)
            lines.append(
                f"{_percent(trained - exact, trained)} of trained elements are sent quantized: "
                f"{count} of {len(self.trained)} tensors, {trained - exact:,} of {trained:,} "
                "elements"
            )
        if self.vocabulary:
            lines.append(
                "gradients in `vocabulary_bits`, as embeddings and heads or of their shape: "
                f"{_some_names(self.vocabulary, most=12)}; "
                "`GradientQuantization(vocabulary_bits=None)` sends them like all others"
            )
        if self.frozen:
            how = "sent once" if all(t.weights == "skipped" for t in self.frozen) else "not trained"
            lines.append(f"frozen, {how}: {_some_names(self.frozen)}")
        reasons = Counter(t.reason for t in self.full_precision).most_common()
        for reason, _ in reasons[:_MAX_REASONS]:
            found = [t for t in self.full_precision if t.reason == reason]
            lines.append(f"in full precision, {reason}: {_some_names(found)}")
        if len(reasons) > _MAX_REASONS:
            more = len(reasons) - _MAX_REASONS
            lines.append(f"and for {more} more reasons: `plan.tensors` has one entry per tensor")
        if exact == trained > 0:
            lines.append(
                "nothing is quantized: a smaller `min_quantized_numel` takes in smaller tensors of "
                "two or more dimensions"
            )
        return "\n".join(lines)


def _numel(tensors: Sequence[TensorPlan]) -> int:
    return sum(t.numel for t in tensors)


def _percent(part: int, whole: int) -> str:
    """Whole percent, of which 0 and 100 mean nothing and all."""
    if part in (0, whole):
        return f"{100 * part // whole}%"
    return f"{min(max(round(100 * part / whole), 1), 99)}%"


def _some_names(tensors: Sequence[TensorPlan], most: int = 3) -> str:
    """Number and names; names that differ only in numbers are one: ``6x blocks.*.up``."""
    alike: dict[str, list[TensorPlan]] = {}
    for tensor in tensors:
        alike.setdefault(re.sub(r"(?<![^.])\d+(?=\.)", "*", tensor.name), []).append(tensor)
    names = [
        f"{len(group)}x {pattern}" if len(group) > 1 else _name(group[0])
        for pattern, group in alike.items()
    ]
    shown = ", ".join(names[:most]) + (", ..." if len(names) > most else "")
    plural = "s" * (len(tensors) != 1)
    return f"{len(tensors)} tensor{plural}, {_numel(tensors):,} elements ({shown})"


def _name(tensor: TensorPlan) -> str:
    return f"{tensor.name} tied to {' and '.join(tensor.tied)}" if tensor.tied else tensor.name


def describe_weights(config: WeightQuantization | None) -> str:
    """One phrase about the weight codec."""
    if config is None:
        return "full precision"
    codec = config.codec()
    return (
        f"qWD: {config.bits}-bit differences ({codec.code}), groups of {codec.group_size}, "
        f"replica={config.replica}"
    )


def describe_gradients(
    config: GradientQuantization | None, topology: Topology, vocabulary: bool = False
) -> str:
    """One phrase about the gradient codecs and the levels that this topology has.

    ``vocabulary``: whether embeddings or heads were found that have a codec of their own.
    """
    if config is None:
        return "full precision"
    intra, inter = config.codec("intra").code, config.codec("inter").code
    words = ""
    if vocabulary:
        code = config.codec("inter", vocabulary=True).code
        words = f", {code} there for embeddings and heads"
    if topology.num_nodes == 1:
        levels = f"{intra} within the one node"
    elif topology.node_size == 1:
        levels = f"{inter} between {topology.num_nodes} nodes of one rank"
    else:
        levels = (
            f"{intra} within nodes of {topology.node_size}, {inter} between "
            f"{topology.num_nodes} nodes"
        )
    hadamard = f", Hadamard {config.hadamard_size}" if config.method == "TLq-HS" else ""
    return (
        f"{config.method}: {levels}{words}, {config.rounding} rounding, groups of "
        f"{config.group_size}{hadamard}"
    )


def plan_unit(
    unit: Unit,
    gather: WeightDifferenceAllGather | None,
    scatter: TwoLevelReduceScatter | None,
    tied: Mapping[str, tuple[str, ...]],
) -> Iterator[TensorPlan]:
    """Join the segments that a unit's two collectives have for each of its parameters."""
    weights = {s.name: s for s in gather.segments()} if gather else {}
    gradients = {s.name: s for s in scatter.segments()} if scatter else {}
    for name, param in zip(unit.names, unit.params(), strict=True):
        weight, gradient = weights.get(name), gradients.get(name)
        reasons = [s.reason for s in (weight, gradient) if s is not None and s.reason]
        sent = "full" if gradient is None else gradient.wire_format
        yield TensorPlan(
            name,
            param.numel,
            "full" if weight is None else weight.wire_format,
            sent if param.requires_grad else "none",
            "; ".join(dict.fromkeys(reasons)),
            gradient is not None and gradient.wire_format == "quantized" and gradient.codec > 0,
            tied[name],
        )
