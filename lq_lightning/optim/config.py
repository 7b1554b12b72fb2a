"""Options of quantized optimizer states, and the choice of parameters that they apply to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor, nn

from lq_lightning._compat.tensors import row_pieces, shard_slices
from lq_lightning.foundation.checks import check_choice, is_whole
from lq_lightning.foundation.parameters import embeddings
from lq_lightning.kernels.optimizer_step.formats import StateFormat, row_length, state_format

StateCode = Literal["expanded_fp8", "dynamic8", "float32"]

FORMAT_VERSION = 2
STAMP = "quantization"  # key in parameter groups
MOMENTUM_STAMP = f"{FORMAT_VERSION}/int8/32"  # of groups of Muon whose momentum is quantized
# With shorter rows, two states with three bytes of constants per group would take more than 2.2
# bytes per parameter.
MIN_ROW_LENGTH = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerQuantization:
    """How the states of an optimizer are stored.

    Groups of 128 elements along a row (all dimensions but the first, flattened) share a scale.
    Sharding on dimension 0 never cuts a group, so the codes do not depend on the world size. Where
    tensor parallelism cuts rows, each rank encodes its pieces as rows of their own.

    Attributes:
        first_moment: Format of ``exp_avg`` (AdamW, Adam, Lion) and of SGD's ``momentum_buffer``.
            ``"expanded_fp8"`` is FP8 with a dynamic range for every group, as in COAT;
            ``"dynamic8"`` the dynamic map of 8-bit optimizers (Dettmers et al.); ``"float32"``
            stores no codes. Muon's momentum is in ``"int8"`` instead of either, in groups of 32.
        second_moment: Format of ``exp_avg_sq``.
        min_numel: Parameters with fewer elements, counted before sharding, keep fp32 states.
        quantize_embeddings: Whether to quantize the states of embedding weights too. They are known
            only where the module is given.
        stochastic_rounding: Whether to round bf16 parameters stochastically, which replaces fp32
            master weights. Codes always are, except most of Muon's momentum.
        seed: Seed of the noise, which also depends on step, parameter and position, and where rows
            are cut on the number of pieces, but not on the world size.

    Raises:
        ValueError: A format is not listed above, or a number is negative.
    """

    first_moment: StateCode = "expanded_fp8"
    second_moment: StateCode = "expanded_fp8"
    min_numel: int = 4096
    quantize_embeddings: bool = False
    stochastic_rounding: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("first_moment", "second_moment"):
            check_choice("OptimizerQuantization", name, getattr(self, name), get_args(StateCode))
        for name in ("min_numel", "seed"):
            value = getattr(self, name)
            if not is_whole(value):
                raise ValueError(
                    f"OptimizerQuantization({name}={value!r}) is not an integer; give one."
                )
        if self.min_numel < 0:
            raise ValueError(
                f"OptimizerQuantization(min_numel={self.min_numel}) must be at least 0; use 0 to "
                "quantize matrices of any size."
            )

    def formats(self, num_states: int) -> list[StateFormat]:
        """Formats of the first ``num_states`` states."""
        first = state_format(self.first_moment, signed=True)
        second = state_format(self.second_moment, signed=False)
        return [first, second][:num_states]

    @property
    def stamp(self) -> str:
        """Version and formats of the codes in checkpoints: ``"2/expanded_fp8/expanded_fp8"``."""
        return f"{FORMAT_VERSION}/{self.first_moment}/{self.second_moment}"


def check_stamp(saved: str, own: str) -> None:
    """Raise ``ValueError`` for codes of a checkpoint in another version or format.

    Args:
        saved: Stamp of a saved group.
        own: Stamp of the group that is to take it.
    """
    if saved == own:
        return
    version, *formats = saved.split("/")
    known = get_args(StateCode)
    readable, reads = set(formats) <= {*known}, f"version {FORMAT_VERSION} of {', '.join(known)}"
    if own == MOMENTUM_STAMP:
        readable, reads = formats[0] == "float32", f"{own!r} for Muon's momentum"
    if saved != MOMENTUM_STAMP and not (readable and version == str(FORMAT_VERSION)):
        raise ValueError(
            f"the optimizer state was saved in quantization format {saved!r}; this version of "
            f"lq_lightning reads {reads}. Load it with the version that saved it, and save "
            "`full_precision_state_dict()` there."
        )
    raise ValueError(
        f"the optimizer state was saved in quantization format {saved!r}, but the optimizer uses "
        f"{own!r}. Use the same formats, or load it with those first, and then load "
        "`full_precision_state_dict()` of that optimizer into this one."
    )


def refuse_codes(state: Mapping[str, Any], optimizer: str) -> None:
    """Make sure that a saved state has no codes, which other optimizers would load unnoticed.

    ``optimizer`` is the class of the one that is to load it, for the message.

    Raises:
        ValueError: It has codes.
    """
    stamps = {group[STAMP] for group in state.get("param_groups", ()) if STAMP in group}
    if stamps:
        raise ValueError(
            f"the checkpoint's optimizer state is quantized ({', '.join(sorted(stamps))}), but "
            f"{optimizer} is not. Train on with the same `QuantizedPrecision(optimizer_state=...)` "
            "(without Lightning: `quantize_optimizer`), or load `full_precision_state_dict()` of "
            "the quantized optimizer."
        )


def reason_for_full_precision(
    param: Tensor, config: OptimizerQuantization, excluded: Mapping[Tensor, str]
) -> str | None:
    """Return why the states of a parameter stay in fp32, or None if they are quantized.

    The answer depends on the whole parameter and how many ranks cut its rows, not on this rank.

    Raises:
        NotImplementedError: The parameter would be quantized, but ranks have no contiguous parts.
    """
    if param in excluded:
        return excluded[param]
    if all(not fmt.quantized for fmt in config.formats(2)):
        return "all formats are float32"
    if param.dim() < 2:
        return f"{param.dim()}-D"
    if param.numel() < config.min_numel:
        return f"fewer than {config.min_numel} elements"
    pieces = row_pieces(param)
    if pieces.length < MIN_ROW_LENGTH:
        return f"rows of fewer than {MIN_ROW_LENGTH} elements"
    if pieces.dim > 1 or pieces.length * pieces.number != row_length(param.shape):
        return f"sharded on dimension {pieces.dim}" + (" unevenly" if pieces.dim == 1 else "")
    shard_slices(param)
    return None


def embedding_weights(module: nn.Module) -> dict[Tensor, str]:
    """Weights of ``nn.Embedding`` and ``nn.EmbeddingBag`` (also where a head is tied to them).

    8-bit states of embeddings are unstable in pretraining (Dettmers et al., section 2.3).
    """
    return {table.weight: "embedding" for table in embeddings(module)}
