"""Options of quantized communication."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from lq_lightning.codecs import CodecSpec, FloatingCode, named_codec
from lq_lightning.codecs.spec import GROUP_SIZES
from lq_lightning.foundation.checks import check_choice, is_number, is_whole
from lq_lightning.foundation.topology import Level

PORT = 29400  # of `lq-lightning meet`

WeightCode = Literal["auto", "int", FloatingCode]
GradientMethod = Literal["TLq-HS", "TLq", "ULq", "QuanGrad"]
ReplicaMode = Literal["full", "node"]
Rounding = Literal["nearest", "stochastic"]

_INTEGER_BITS = range(2, 9)
# Bits of `vocabulary_bits="auto"`. Only text depends on them, which `tests/test_docs.py` checks.
VOCABULARY_BITS = 6
# a scale per row would cover all parameters of a unit that are encoded as one run
_GROUP_SIZES = tuple(size for size in GROUP_SIZES if size != "row")
_DEFAULT_GROUP_SIZE = 128


def _check_bits(owner: str, field: str, bits: object, instead: str = "") -> None:
    if type(bits) is not int or bits not in _INTEGER_BITS:
        raise ValueError(
            f"`{owner}({field}={bits!r})` is not supported: integer codes have 2 to 8 "
            f"bits{instead}."
        )


def _check_group_size(owner: str, group_size: object) -> None:
    if type(group_size) is not int or group_size not in _GROUP_SIZES:
        raise ValueError(
            f"`{owner}(group_size={group_size!r})` is not supported: give a power of two from "
            f"{_GROUP_SIZES[0]} to {_GROUP_SIZES[-1]}."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightQuantization:
    """Format of the weight differences that ``weights="qWD"`` sends (SDP4Bit §3.1).

    The default is NF4 in groups of 128, 4.125 bits per value with scales. Integers in groups of
    2048 have 1.6 times the error and cost more loss at 110M parameters (``docs/accuracy.md``).

    Deviations from the paper: it has integers in groups of 2048, here
    ``code="int", group_size=2048``. Scales are bf16, rounded up, so that nothing is clipped. Values
    are rounded to the nearest code, which has the smaller error, and the next difference contains
    it; the reference implementation rounds stochastically.

    Attributes:
        bits: Bits of one code, 2 to 8.
        code: ``"int"`` for integers, ``"nf4"`` for 16 levels that follow the normal distribution
            (4 bits), or another code of ``CodecSpec`` with as many ``bits``. ``"auto"`` is NF4 with
            4 bits, else integers.
        group_size: Elements that share one scale, a power of two from 16 to 4096.
        replica: Placement of the replica that differences refer to. ``"full"``: every rank holds
            all weights (2 bytes per parameter in bf16), and forward and backward read them without
            traffic. ``"node"``: the ranks of a node share one replica
            (2/node_size bytes per parameter) and gather it inside the node.
    """

    bits: int = 4
    code: WeightCode = "auto"
    group_size: int = _DEFAULT_GROUP_SIZE
    replica: ReplicaMode = "full"

    def __post_init__(self) -> None:
        """Check every field."""
        owner = type(self).__name__
        check_choice(owner, "replica", self.replica, ("full", "node"))
        check_choice(owner, "code", self.code, get_args(WeightCode))
        _check_group_size(owner, self.group_size)
        _check_bits(owner, "bits", self.bits)
        if self.code not in ("auto", "int"):
            own = self.codec().message_format.bits
            if self.bits != own:
                raise ValueError(
                    f"`{owner}(code={self.code!r}, bits={self.bits})` is not supported: this code "
                    f'has {own} bits. Give `bits={own}`, or `code="int"`.'
                )

    def codec(self) -> CodecSpec:
        """Codec of the messages."""
        code: str = self.code
        if code == "auto":
            code = "nf4" if self.bits == 4 else "int"
        name = f"int{self.bits}" if code == "int" else code
        return named_codec(name, self.group_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientQuantization:
    """Format of gradients in the reduce-scatter (SDP4Bit §3.2).

    Attributes:
        method: ``"TLq-HS"`` two levels, ``intra_bits`` within a node and ``inter_bits`` between
            nodes, after a Hadamard transform that spreads outliers; ``"TLq"`` the same without the
            transform; ``"ULq"`` ``inter_bits`` on both levels, no transform (as in ZeRO++);
            ``"QuanGrad"`` 8 bits on both levels, no transform: the first half of AGoQ's all-reduce
            (its second half, an all-gather of gradients, is not needed where they stay sharded).
        intra_bits: Bits of one code within a node, 2 to 8 (``"TLq-HS"`` and ``"TLq"`` only).
        inter_bits: Bits of one code between nodes, 2 to 8 (not used by ``"QuanGrad"``).
        vocabulary_bits: Bits between nodes for embeddings and heads (see
            :func:`embedding_params`), where few bits cost most (``docs/accuracy.md``): 2 to 8, or
            ``None`` for ``inter_bits``. ``"auto"`` is 6, or ``inter_bits`` if that is more, with
            ``"TLq-HS"`` and ``"TLq"``, and ``None`` with ``"ULq"``, where a number also applies
            within nodes (not used by ``"QuanGrad"``).
        group_size: Elements that share one scale, a power of two from 16 to 4096.
        hadamard_size: Order of the Hadamard transform (``"TLq-HS"`` only): 16, 32, 64 or 128, not
            larger than ``group_size``.
        rounding: ``"nearest"`` has half the variance of error (``docs/accuracy.md``);
            ``"stochastic"``, as in the reference implementation, keeps the reduced gradient
            unbiased, which the paper's convergence proof needs.
    """

    method: GradientMethod = "TLq-HS"
    intra_bits: int = 8
    inter_bits: int = 4
    vocabulary_bits: int | Literal["auto"] | None = "auto"
    group_size: int = _DEFAULT_GROUP_SIZE
    hadamard_size: int = 32
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        """Check every field."""
        owner = type(self).__name__
        check_choice(owner, "method", self.method, get_args(GradientMethod))
        check_choice(owner, "rounding", self.rounding, get_args(Rounding))
        _check_bits(owner, "intra_bits", self.intra_bits)
        _check_bits(owner, "inter_bits", self.inter_bits)
        if self.vocabulary_bits not in ("auto", None):
            _check_bits(owner, "vocabulary_bits", self.vocabulary_bits, ', or give "auto" or None')
        _check_group_size(owner, self.group_size)
        check_choice(owner, "hadamard_size", self.hadamard_size, (16, 32, 64, 128))
        if self.method == "TLq-HS" and self.hadamard_size > self.group_size:
            raise ValueError(
                f"`{owner}(hadamard_size={self.hadamard_size}, group_size={self.group_size})` is "
                "not supported: the transform must divide the group. Give a `hadamard_size` of at "
                "most `group_size`."
            )

    def codec(self, level: Level, *, vocabulary: bool = False) -> CodecSpec:
        """Codec of the messages within a node (``"intra"``) or between nodes (``"inter"``).

        ``vocabulary``: the one for gradients of embeddings and heads.
        """
        bits = self.inter_bits
        if self.method == "QuanGrad":
            bits = 8
        elif level == "intra" and self.method != "ULq":
            bits = self.intra_bits
        elif vocabulary and self.vocabulary_bits == "auto" and self.method in ("TLq-HS", "TLq"):
            bits = max(VOCABULARY_BITS, bits)
        elif vocabulary and isinstance(self.vocabulary_bits, int):
            bits = self.vocabulary_bits
        return named_codec(
            f"int{bits}",
            self.group_size,
            hadamard_size=self.hadamard_size if self.method == "TLq-HS" else 0,
            rounding=self.rounding,
            scale_dtype="float32",
        )

    def separates_vocabulary(self, levels: Iterable[Level]) -> bool:
        """Whether embeddings and heads have a codec of their own at any of these levels."""
        return any(self.codec(level) != self.codec(level, vocabulary=True) for level in levels)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSteps:
    """Local steps of nodes, and the outer step that follows them (DiLoCo, arXiv:2311.08105).

    In an outer step nodes average their progress since the last one, and SGD with Nesterov's
    momentum takes this mean as its gradient.

    Attributes:
        every: Optimizer steps that nodes take alone.
        outer_lr: Learning rate of the outer SGD. With ``every`` below 16 less is better, such as
            0.5 (``docs/local_steps.md``).
        outer_momentum: Momentum of the outer SGD, 0 or more and less than 1.
        bits: Bits of one code of a node's progress, 2 to 8, in the format of gradients between
            nodes (see :class:`GradientQuantization`; 2 and 3 bits are asymmetric), embeddings and
            heads included; ``None`` sends fp32.
        fragments: Parts of the model, of whole units strided over its depth, that are sent in turn,
            each once in ``every`` steps (Streaming DiLoCo, arXiv:2501.18512).
        delay: Steps after which the mean of a fragment is merged, while its messages travel beside
            training; 0 waits for them. At most ``every // fragments``, when the next one is sent.
        error_feedback: Add what the codes of a message lost to the next message of the same
            parameters (MuLoCo, arXiv:2505.23725). Takes another byte per parameter / ranks per
            node.
        meet_at: ``"host:port"`` of ``lq-lightning meet``, for nodes that come and go: each is a run
            of its own, which joins those that train. None: the nodes of one run.
        max_nodes: With ``meet_at``, as many of them as may take part at a time. The data is divided
            by it.
        wait: With ``meet_at``, seconds that a node that is lost costs the others at most: half
            while they wait for it to come, half for a message of at most 8 MB in 4 bits.
    """

    every: int = 32
    outer_lr: float = 0.7
    outer_momentum: float = 0.6
    bits: int | None = 4
    fragments: int = 1
    delay: int = 0
    error_feedback: bool = False
    meet_at: str | None = None
    max_nodes: int = 8
    wait: float = 60.0

    def __post_init__(self) -> None:
        """Check every field."""
        owner = type(self).__name__
        every, lr, momentum = self.every, self.outer_lr, self.outer_momentum
        fragments, delay, feedback = self.fragments, self.delay, self.error_feedback
        most, wait = self.max_nodes, self.wait
        fits_momentum = is_number(momentum) and 0 <= momentum < 1
        for field, value, fits, allowed in (
            ("every", every, type(every) is int and every > 0, "1 step or more"),
            ("outer_lr", lr, is_number(lr) and 0 < lr < math.inf, "a number above 0"),
            ("outer_momentum", momentum, fits_momentum, "0 or more, but less than 1"),
            ("fragments", fragments, is_whole(fragments) and fragments > 0, "1 or more"),
            ("delay", delay, is_whole(delay) and delay >= 0, "0 steps or more"),
            ("error_feedback", feedback, isinstance(feedback, bool), "True or False"),
            ("max_nodes", most, is_whole(most) and most > 1, "2 or more"),
            ("wait", wait, is_number(wait) and 0 < wait < math.inf, "seconds, above 0"),
        ):
            if not fits:
                raise ValueError(f"`{owner}({field}={value!r})` is not supported: give {allowed}.")
        if fragments > every:
            raise ValueError(
                f"`{owner}(every={every}, fragments={fragments})` is not supported: at most one "
                "fragment is sent after each step. Give at most as many `fragments` as steps."
            )
        if delay > every // fragments:
            raise ValueError(
                f"`{owner}(every={every}, fragments={fragments}, delay={delay})` is not supported: "
                "a fragment is merged before the next one is sent. Give a `delay` of at most "
                f"{every // fragments}."
            )
        if self.meet_at is not None:
            split_address(self.meet_at)
            if fragments > 1 or delay:
                raise ValueError(
                    f"`{owner}(meet_at=..., fragments={fragments}, delay={delay})` is not "
                    "supported: nodes that come and go exchange the whole model, and wait for it. "
                    "Leave out `fragments` and `delay`, or `meet_at`."
                )
        if self.bits is not None:
            _check_bits(owner, "bits", self.bits)
        elif feedback:
            raise ValueError(
                f"`{owner}(bits=None, error_feedback=True)` is not supported: fp32 loses nothing "
                "that could be sent later. Leave one of them out."
            )

    def codec(self) -> CodecSpec | None:
        """Codec of the messages; None for fp32."""
        if self.bits is None:
            return None
        codec = GradientQuantization(inter_bits=self.bits).codec("inter")
        if self.bits > 3:
            return codec
        # levels over the range of a group: as many bytes, and a third less error in 2 bits
        return replace(codec, symmetric=False, scale_dtype="bfloat16")


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of ``"host:port"`` or ``"host"``.

    Raises:
        ValueError: It is neither.
    """
    host, separator, port = text.rpartition(":")
    if not separator:
        host, port = text, str(PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(
            f"`LocalSteps(meet_at={text!r})` is not supported: give the host and port of "
            f"`lq-lightning meet`, such as '10.0.0.1:{PORT}'."
        )
    return host.strip("[]"), int(port)
