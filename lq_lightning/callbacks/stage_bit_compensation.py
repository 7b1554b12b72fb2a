"""``Trainer(callbacks=[StageBitCompensation(), ActivationQuantization()])``: bits by stage."""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lq_lightning.pipeline.schedules import InFlight, compensated_bits, in_flight

from .activation_quantization import ActivationQuantization

_MEASURED_AFTER = 3  # batches: the first ones allocate, compile and tune
_GIB = 2**30


class StageBitCompensation(Callback):
    """Gives saved activations more bits on pipeline ranks that keep fewer micro-batches.

    The first ranks of a pipeline keep the most micro-batches between their forward and backward
    passes. They are counted from the schedule, and each rank's integer codes of
    ``ActivationQuantization`` get ``bits * N_1 / N_i`` bits: codes of ``bits`` bits or fewer; wider
    ones keep their width if it is larger. Transforms and groups stay as they are.
    (DBCA-PP; AGoQ, section 4.2.)

    Schedules that split backward passes (``"zero_bubble"``, ``"zbv"``) also keep micro-batches
    between the two halves: the inputs of weight gradients. How much that is, compared with what a
    micro-batch keeps before, is measured in the first batch, in which all ranks have ``bits``; a
    resumed run continues with the measurement.

    Args:
        bits: Bits of the rank that keeps the most; 5, as in the recipes, where the paper has 4.
        rounding: ``"floor"``, with which no rank's peak grows, or ``"nearest"``, as in the paper.
        cap: Most bits.
        half_size: For schedules that split backward passes: bytes that a micro-batch keeps between
            the halves, per byte that it keeps before, as the callback prints it. None measures it.

    Attributes:
        counts: Most micro-batches that each rank of the pipeline keeps; empty before ``fit``.
        half_size: The given or measured value; None before.
        stage_bits: Bits of each rank of the pipeline; empty before ``fit``.

    Raises:
        ValueError: A value that is not listed above; or, before training starts: the strategy has
            no pipeline, the Trainer has no ``ActivationQuantization``, or that has a budget or
            codes that are no integers.
    """

    def __init__(
        self,
        bits: int = 5,
        rounding: Literal["floor", "nearest"] = "floor",
        cap: int = 8,
        half_size: float | None = None,
    ) -> None:
        super().__init__()
        compensated_bits((1,), bits, rounding, cap, half_size or 0.0)  # checks the options
        self._options = (bits, rounding, cap)
        self._measures = half_size is None
        self.half_size = half_size
        self.counts: tuple[InFlight, ...] = ()
        self.stage_bits: tuple[int, ...] = ()
        self._steps = 0

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"half_size": self.half_size} if self._measures and self.half_size else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._measures:
            self.half_size = state_dict["half_size"]

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Count, and tell ``ActivationQuantization`` before it quantizes the model."""
        if stage != "fit":
            return
        name = type(self).__name__
        facts: Any = getattr(trainer.strategy, "pipeline", None)
        if not hasattr(facts, "schedule"):
            raise ValueError(
                f"`{name}` needs a pipeline, which `{type(trainer.strategy).__name__}` does not "
                'have: use strategy="quantized_pipeline" with more than one rank along the '
                "pipeline, or remove the callback."
            )
        self.counts = in_flight(
            facts.schedule, facts.pipeline_size, facts.num_microbatches, facts.stages_per_rank
        )
        self._steps = 0
        if self._measures:
            self.half_size = None
        self._choose(trainer, facts)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._measures and self._splits and self.half_size is not None:
            self._choose(trainer, trainer.strategy.pipeline)  # type: ignore[attr-defined]

    @property
    def _splits(self) -> bool:
        return any(count.halves for count in self.counts)

    def _choose(self, trainer: pl.Trainer, facts: Any) -> None:
        """Choose the bits of all ranks, and pass this rank's to ``ActivationQuantization``."""
        name, bits = type(self).__name__, self._options[0]
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        quantization = next((c for c in callbacks if isinstance(c, ActivationQuantization)), None)
        if quantization is None:
            raise ValueError(
                f"`{name}` says in how many bits `ActivationQuantization` keeps activations, but "
                "there is none in the Trainer: add it to the callbacks."
            )
        if self._splits and self.half_size is None:
            self.stage_bits = (bits,) * facts.pipeline_size
            said = f"{bits} bits on all ranks in the first batch, which is measured"
        else:
            self.stage_bits = compensated_bits(self.counts, *self._options, self.half_size or 0.0)
            said = self.summary()
        quantization.compensate(bits, self.stage_bits[facts.rank])
        rank_zero_info(f"{name}: {facts.schedule}\n{said}")

    def summary(self) -> str:
        """Return a table of ranks, micro-batches kept, bits, and their product, the peak."""
        size = self.half_size or 0.0
        ranks = list(zip(self.counts, self.stage_bits, strict=True))
        peaks = [bits * count.peak(size) for count, bits in ranks]
        lines = ["rank  micro-batches kept  bits  predicted peak"]
        for rank, ((count, bits), peak) in enumerate(zip(ranks, peaks, strict=True)):
            part = f"{peak:.4g} ({peak / max(peaks):.0%})"
            lines.append(f"{rank:>4}  {count!s:>18}  {bits:>4}  {part:>14}")
        if self._splits:
            lines.append(
                f"between the halves of a backward pass a micro-batch keeps {size:.3g} times what "
                f"it keeps before (half_size={size:.3g})"
            )
        return "\n".join(lines)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *unused: Any) -> None:
        self._steps += 1
        facts: Any = trainer.strategy.pipeline  # type: ignore[attr-defined]
        if self._splits and self.half_size is None:
            kept = torch.tensor(facts.kept_nbytes, dtype=torch.float64, device=pl_module.device)
            whole, half = pl_module.all_gather(kept).view(-1, 2).sum(0).tolist()
            self.half_size = half / whole if whole else 0.0
            self._choose(trainer, facts)
        if self._steps == _MEASURED_AFTER and trainer.strategy.root_device.type == "cuda":
            self._say_peaks(pl_module, facts)

    def _say_peaks(self, pl_module: pl.LightningModule, facts: Any) -> None:
        peak = torch.tensor(
            [float(facts.rank), torch.cuda.max_memory_allocated() / _GIB], device=pl_module.device
        )
        peaks: dict[int, float] = {}
        for rank, size in pl_module.all_gather(peak).view(-1, 2).tolist():  # type: ignore[union-attr]
            peaks[int(rank)] = max(size, peaks.get(int(rank), 0.0))
        measured = ", ".join(f"{peaks[rank]:.2f}" for rank in sorted(peaks))
        rank_zero_info(
            f"{type(self).__name__}: measured peak of all memory by rank, GiB: {measured}"
        )
