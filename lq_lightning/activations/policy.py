"""Rules, as plain data, for the number of bits in which each activation is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, cast, get_args

from lq_lightning.codecs import CodecSpec, FloatingCode, named_codec
from lq_lightning.codecs.spec import Code
from lq_lightning.foundation.checks import check_choice

SiteKind = Literal["norm", "activation", "linear", "checkpoint", "other"]
Matmul = Literal["native", "float8", "int8_forward"]


def _named_codecs() -> dict[str, CodecSpec]:
    codecs: dict[str, CodecSpec] = {}
    for code in ("int2", "int3", "int4", "int5", "int6", "int7", "int8"):
        plain = named_codec(code, 128, symmetric=code == "int8")
        codecs[code] = plain
        codecs[f"{code}_hadamard"] = replace(plain, hadamard_size=128)
    codecs["int5_g64"] = replace(codecs["int5"], group_size=64)
    groups = {"nf4": 64, "fp8_e4m3": 16}
    for code in get_args(FloatingCode):
        codecs[code] = named_codec(code, groups.get(code, 128))
    return codecs


# By name, so that a policy is short in YAML. Groups shrink where they do not divide a row. Bits per
# value with scales: int4, int4_hadamard and nf4 4.25, int5_g64 5.5, int8 8.125, fp8_e4m3 9.
CODECS: dict[str, CodecSpec] = _named_codecs()
_MIN_GROUP = 16
_WORTH_A_CODE = 256  # rows of so many values are smaller as codes in any format


_NO_ATTENTION = (
    "attention has no code. Its backward uses the exact sum of exponentials: with rounded queries "
    "and keys, gradients would be up to thousands of times too large. Leave it out: it keeps full "
    "precision. To save its memory, recompute it: "
    "`ActivationRule(module='*attn*', recompute=True)`."
)


def _codec(owner: str, name: str, value: CodecSpec | str | None) -> CodecSpec | None:
    if isinstance(value, str):
        check_choice(owner, name, value, (*CODECS, None), CodecSpec)
        value = CODECS[value]
    if value is None:
        return None
    if not isinstance(value, CodecSpec):
        raise ValueError(
            f"`{owner}({name}={value!r})` is not supported: give the name of a codec "
            f"({', '.join(CODECS)}), a `CodecSpec`, or None to keep full precision."
        )
    if value.rounding != "nearest" or value.group_size == "row":
        raise ValueError(
            f"`{owner}({name}={value!r})` is not supported: saved activations are rounded to "
            "nearest, with a scale per group. Use rounding='nearest' and a group_size of 16 to "
            "4096."
        )
    return value


@dataclass(frozen=True, kw_only=True)  # no slots: jsonargparse reads defaults with vars()
class ActivationRule:
    """An exception from a policy, for modules by name.

    Args:
        module: Pattern of module names as in ``model.named_modules()``, with ``*`` (any characters,
            dots included), ``?`` and ``[...]``. It is compared with whole names: ``"layers.0.*"``
            is everything in ``layers.0``. A pattern that matches nothing is refused.
        kind: Only modules of this kind, one of the fields of ``ActivationPolicy`` that take codecs:
            ``"norm"``, ``"activation"`` (MLPs too), ``"linear"``, ``"checkpoint"`` or
            ``"other"``. Leave empty for all kinds, including those that the policy leaves in full
            precision.
        codec: Codec of what these modules keep: a name (``"int4"``, ``"int8"``, ``"nf4"``, ...), a
            ``CodecSpec``, or ``None`` for full precision: then they run as without this package.
        matmul: Precision of their matrix products, whatever these modules are; leave empty for that
            of the policy, which excludes some.
        recompute: Keep only the inputs of these modules, such as attentions, MLPs or whole blocks,
            and compute them again in backward. Activations inside keep full precision then, for as
            long as their own backward takes.

    Raises:
        ValueError: A value that is not listed above.
    """

    module: str
    kind: SiteKind | None = None
    codec: CodecSpec | str | None = None
    matmul: Matmul | None = None
    recompute: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        if not self.module:
            raise ValueError("`ActivationRule(module='')` matches nothing: give a pattern.")
        if str(self.kind) == "attention":
            raise ValueError(
                f"`ActivationRule(kind='attention')` is not supported: {_NO_ATTENTION}"
            )
        check_choice("ActivationRule", "kind", self.kind, (*get_args(SiteKind), None))
        _codec("ActivationRule", "codec", self.codec)
        if self.recompute and self.kind is not None:
            raise ValueError(
                f"`ActivationRule(module={self.module!r}, kind={self.kind!r}, recompute=True)`: "
                "modules are recomputed whatever they are; leave out `kind`."
            )
        if self.recompute and self.codec is not None:
            raise ValueError(
                f"`ActivationRule(module={self.module!r}, codec={self.codec!r}, recompute=True)` "
                "keeps nothing that could have a code: leave out one of both."
            )
        check_choice("ActivationRule", "matmul", self.matmul, (*get_args(Matmul), None))


@dataclass(frozen=True, kw_only=True)
class ActivationPolicy:
    """How each kind of saved activation is kept, and how matrix products are computed.

    Codecs are given by name (``"int4"``, ``"int8"``, ``"nf4"``, ``"fp8_e4m3"``, ...) or as
    ``CodecSpec``; ``None`` leaves a kind as it is. Where a group does not divide a row, the largest
    power of two that does is taken instead.

    Args:
        norm: Inputs of normalization layers. Their outputs are rebuilt from them, also for the
            weight gradients of the linear layers behind them, which save no input then.
        activation: Inputs of activation functions and the two factors of a gated MLP. The products
            are rebuilt for the down projection.
        linear: Inputs of linear layers that neither a normalization nor an activation function
            made. Careful: the attention's output projection shares its input with the attention,
            which keeps it anyway; a code of it would only add memory.
        checkpoint: Inputs of layers that are checkpointed (Hugging Face's
            ``gradient_checkpointing_enable()``, torch's ``CheckpointWrapper``), which are still
            recomputed. Kept exactly, with a warning, in layers with an operator that is not known
            to be continuous, as where a router chooses experts: there the second run might take
            another path.
        other: Tensors saved by blocks that are not fully recognized: floating-point tensors of 1024
            values or more, saved by operators that bear rounding (products, convolutions, norms,
            smooth activation functions), through saved-tensor hooks. Weights, statistics, masks,
            indices, probabilities and what unknown operators and custom functions save are kept
            exactly. In compiled models such blocks run eagerly, a graph break (an error with
            ``fullgraph=True``). ``None`` leaves them as they are.
        attention: Only ``None``: tensors saved by attention cannot be encoded.
        matmul: ``"native"``, or ``"float8"``: products of linear layers in FP8 with one scale per
            tensor (COAT), all operands in E4M3. With ``"int8_forward"`` the products of the forward
            pass are in INT8 instead, with a scale per row after a Hadamard transform, and the first
            four rows of each sequence (``[..., S, K]``, from 32 on) in two terms: a third of the
            error or less on pretrained models. Needs a GPU of compute capability 8.9 or newer to be
            fast, INT8 a Hopper; a CPU computes the same slowly. Layers outside of the repeated
            blocks, such as the output head, layers with an embedding's weight or as many rows,
            and layers whose dimensions are no multiples of 16 stay native, unless a rule names
            them with their precision.
        rules: Exceptions by module name; the last one that matches counts.

    Raises:
        ValueError: A value that is not listed above.
    """

    norm: CodecSpec | str | None = "int5_hadamard"
    activation: CodecSpec | str | None = "int5_g64"
    linear: CodecSpec | str | None = None
    checkpoint: CodecSpec | str | None = "int8"
    other: CodecSpec | str | None = "int8"
    attention: CodecSpec | str | None = None
    matmul: Matmul = "native"
    rules: tuple[ActivationRule, ...] = field(default=())

    def __post_init__(self) -> None:
        """Check the values."""
        if self.attention is not None:
            raise ValueError(
                f"`ActivationPolicy(attention={self.attention!r})` is not supported: "
                f"{_NO_ATTENTION}"
            )
        for kind in get_args(SiteKind):
            _codec("ActivationPolicy", kind, getattr(self, kind))
        check_choice("ActivationPolicy", "matmul", self.matmul, get_args(Matmul))
        if not isinstance(self.rules, (list, tuple)):
            raise ValueError(
                f"`ActivationPolicy(rules={self.rules!r})` is not supported: give a list of rules."
            )
        object.__setattr__(self, "rules", tuple(self.rules))
        for rule in self.rules:
            if not isinstance(rule, ActivationRule):
                raise ValueError(
                    f"`ActivationPolicy(rules=[{rule!r}])` is not supported: give "
                    "`ActivationRule(module=..., codec=...)` objects."
                )

    def with_bits(self, at_most: int, bits: int) -> ActivationPolicy:
        """Return this policy with other widths of its integer codes.

        Args:
            at_most: Codes of so many bits or fewer change; wider ones keep their width if it is
                more than ``bits``.
            bits: The new width.

        Raises:
            ValueError: A code is no integer, or there is none.
        """

        def changed(owner: str, value: CodecSpec | str | None) -> CodecSpec | None:
            codec = _codec("ActivationPolicy", owner, value)
            if codec is None:
                return None
            if not codec.code.startswith("int"):
                raise ValueError(
                    f"`ActivationPolicy({owner}={codec.code!r})` is no integer code, which alone "
                    "come in 2 to 8 bits. Use the recipe 'agoq', or integer codes everywhere."
                )
            width = int(codec.code.removeprefix("int"))
            width = bits if width <= at_most else max(width, bits)
            return replace(codec, code=cast(Code, f"int{width}"))

        kinds = {kind: changed(kind, getattr(self, kind)) for kind in get_args(SiteKind)}
        rules = tuple(replace(rule, codec=changed("rules", rule.codec)) for rule in self.rules)
        if not any((*kinds.values(), *(rule.codec for rule in rules))):
            raise ValueError(
                "`ActivationPolicy` keeps nothing as codes that could have other bits: give some "
                "kind an integer code."
            )
        return replace(self, rules=rules, **cast(dict[str, Any], kinds))

    @property
    def quantizes(self) -> bool:
        """Whether anything is quantized without a rule for it."""
        codecs = [getattr(self, kind) for kind in get_args(SiteKind)]
        return self.matmul != "native" or any(codec is not None for codec in codecs)

    def _rule(self, name: str, kind: SiteKind | None) -> ActivationRule | None:
        """The rule that counts for a module; kind None: the one for all kinds."""
        matching = [rule for rule in self.rules if rule.kind in (None, kind)]
        matching = [rule for rule in matching if fnmatchcase(name, rule.module)]
        return matching[-1] if matching else None

    def codec(self, kind: SiteKind, name: str) -> CodecSpec | None:
        """Return the codec of a module before it is fitted to a row (``fit_codec``), or None."""
        if self.is_recomputed(name):
            return None
        rule = self._rule(name, kind)
        value = getattr(self, kind) if rule is None else rule.codec
        return _codec("ActivationPolicy", kind, value)

    def is_recomputed(self, name: str) -> bool:
        """Return whether a rule recomputes a module, or one that it is part of."""
        parts = name.split(".")
        names = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        rules = (self._rule(each, None) for each in names if each)
        return any(rule is not None and rule.recompute for rule in rules)

    def matmul_rule(self, kind: SiteKind, name: str) -> Matmul | None:
        """Return the precision that a rule sets for a module's products, None if none does."""
        rule = self._rule(name, kind)
        return None if rule is None else rule.matmul


def is_worth_a_code(codec: CodecSpec, numel: int) -> bool:
    """Return whether a code of rows of ``numel`` values is no larger than they are in bf16:
    sections of a message take 16 bytes or more each.
    """
    if numel >= _WORTH_A_CODE:
        return True
    fitted = fit_codec(codec, numel)
    return numel > 0 and (numel % fitted.block_multiple == 0 or fitted.nbytes(numel) <= 2 * numel)


def fit_codec(codec: CodecSpec, numel: int) -> CodecSpec:
    """Return a codec whose groups, and transform, divide rows of ``numel`` values.

    A tensor whose rows are whole groups is one message, without padding. Rows that no group from 16
    on divides (widths such as 100) stay messages of their own, in the smallest groups if they are
    shorter than one.
    """
    size = codec.group_size
    if size == "row" or numel % size == 0:
        return codec
    max_size = size
    while size > _MIN_GROUP and numel % size:
        size //= 2
    if numel % size and numel > max_size:
        return codec
    hadamard = min(codec.hadamard_size, size)
    return replace(codec, group_size=size, hadamard_size=hadamard)


# Chosen by errors of gradients on a pretrained model (benchmarks/pretrained.py): not the FP4 and
# FP8 of the papers. A transform spreads the outliers of the residual stream that norms read. Behind
# an activation function it would spread the errors of large gates to small ones, which carry the
# gradient; smaller groups confine them. Errors there come evenly from all blocks and from
# many tokens: exact rows or channels would help little, a fifth bit halves them. INT8 has less than
# half of the error of E4M3, in fewer bytes.
_FIVE_BITS = ActivationPolicy()
# "auto" starts with four bits, and widens sites that need more in the first batch.
RECIPES: Mapping[str, ActivationPolicy] = {
    "agoq": _FIVE_BITS,
    "auto": ActivationPolicy(norm="int4_hadamard", activation="int4"),
    "coat": ActivationPolicy(norm="int8_hadamard", activation="int8", matmul="float8"),
    "fp8-4bit": replace(_FIVE_BITS, matmul="float8"),
}


def resolve_policy(recipe: str | ActivationPolicy) -> ActivationPolicy:
    """Return a policy from itself or the name of a recipe."""
    if isinstance(recipe, ActivationPolicy):
        return recipe
    check_choice("ActivationQuantization", "recipe", recipe, tuple(RECIPES), ActivationPolicy)
    return RECIPES[recipe]
