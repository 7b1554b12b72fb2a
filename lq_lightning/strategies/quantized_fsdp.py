"""``Trainer(strategy="quantized_fsdp")``: FSDP2 with quantized communication."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, get_args

from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lq_lightning.data_parallel import (
    GradientQuantization,
    LocalSteps,
    QuantizedCommunication,
    WeightQuantization,
    quantize_communication,
)
from lq_lightning.foundation.checks import check_choice
from lq_lightning.foundation.reporting import QuantizationReport
from lq_lightning.strategies.choose_quantization import (
    WeightOption,
    choose_quantization,
    nvlink_inside_nodes,
)
from lq_lightning.strategies.fully_sharded import DEFAULT_TIMEOUT
from lq_lightning.strategies.nodes import NodesStrategy
from lq_lightning.strategies.options import check_count, warn_without_effect

__all__ = ["QuantizedFSDPStrategy"]

WeightName = Literal["auto", "qWD", "qW", "none"]
GradientName = Literal["auto", "TLq-HS", "TLq", "ULq", "QuanGrad", "none"]
ReplicaName = Literal["auto", "full", "node"]


def _check_name(option: str, value: object, allowed: tuple[object, ...], *configs: type) -> None:
    check_choice("QuantizedFSDPStrategy", option, value, allowed, *configs)


def _weight_option(
    weights: WeightName | WeightQuantization, replica: ReplicaName
) -> WeightOption | WeightQuantization | None:
    if isinstance(weights, WeightQuantization):
        return weights
    _check_name("weights", weights, get_args(WeightName), WeightQuantization)
    if weights == "none":
        return None
    if "auto" in (weights, replica):
        return WeightOption(weights, replica)
    return WeightQuantization(method=weights, replica=replica)  # type: ignore[arg-type]


def _gradient_option(
    gradients: GradientName | GradientQuantization,
) -> Literal["auto"] | GradientQuantization | None:
    if isinstance(gradients, GradientQuantization):
        return gradients
    _check_name("gradients", gradients, get_args(GradientName), GradientQuantization)
    if gradients == "auto":
        return "auto"
    return None if gradients == "none" else GradientQuantization(method=gradients)


def _warn_of_options_without_effect(
    config: GradientQuantization, communication: QuantizedCommunication
) -> None:
    if not isinstance(config.vocabulary_bits, int) or communication.plan.vocabulary:
        return
    if config.separates_vocabulary(communication.topology.levels):
        why = "no trained embedding or head of `min_quantized_numel` elements was found"
    else:
        why = f'with `method="{config.method}"` other gradients have the same bits on this topology'
    rank_zero_warn(f"`vocabulary_bits={config.vocabulary_bits}` has no effect: {why}.")


class QuantizedFSDPStrategy(NodesStrategy):
    """FSDP2 for any LightningModule, sending 4-bit weights and 8/4-bit gradients (SDP4Bit).

    All ranks shard the model and see different data. On one rank nothing is sharded or quantized
    and the run is an ordinary single-device run.

    Args:
        weights: How weights are gathered: ``"qWD"`` sends 4-bit differences to what every rank
            already holds, once per optimizer step; ``"qW"`` sends 4-bit weights at every gather
            (loses accuracy, for comparison); ``"none"`` is FSDP2's own gather. ``"auto"`` is
            ``"none"`` on one node whose GPUs are all linked by NVLink, ``"qWD"`` anywhere else. Or
            a full ``WeightQuantization``.
        gradients: How gradients are reduced: ``"TLq-HS"`` in 8 bits within a node and 4 bits
            between nodes (more for embeddings and heads) after a Hadamard transform; ``"TLq"``
            without the transform; ``"ULq"`` 4 bits everywhere; ``"QuanGrad"`` 8 bits everywhere
            (AGoQ); ``"none"`` is FSDP2's own reduction. ``"auto"`` is ``"none"`` on one node whose
            GPUs are all linked by NVLink, ``"TLq-HS"`` anywhere else. Or a full
            ``GradientQuantization``.
        replica: Where ``weights="qWD"`` keeps the weights that differences refer to: ``"full"`` on
            every rank (2 bytes per parameter, no other weight traffic) or ``"node"`` shared by the
            ranks of a node (2/node_size bytes, gathered inside the node when used). ``"auto"`` is
            ``"node"`` on several nodes with NVLink inside, else ``"full"``. A
            ``WeightQuantization`` brings its own.
        node_size: Ranks per node; ``None`` takes it from Lightning. A smaller number emulates
            nodes.
        local_steps: Let nodes train alone and bring them together every so many optimizer steps
            (DiLoCo), for slow networks between nodes: a number, or a full ``LocalSteps``. The model
            is then sharded within each node, where all other options apply. What brings nodes
            together takes another 8/node_size bytes per parameter.
        min_quantized_numel: Smaller tensors travel in full precision.
        units: Names of modules that are gathered as one piece, or of their classes, or a function
            that says so of a module. ``None`` finds them: what ``configure_model`` sharded, else
            Hugging Face's ``_no_split_modules``, else repeated blocks.
        reshard_after_forward: Free a unit's weights between forward and backward.
        reduce_every_microbatch: With ``accumulate_grad_batches``, reduce gradients in every
            micro-batch (less memory) instead of once per optimizer step (less traffic).
        skip_nonfinite_steps: Leave out optimizer steps with infinite or NaN gradients, on all ranks
            together, and count them in ``num_skipped_steps``.
        check_replicas_every_n_steps: Compare checksums of the weight replicas of all ranks every
            that many optimizer steps; 0 never does.
        on_drift: What to do if replicas differ: ``"resync"`` refreshes the unit in full precision
            and warns, ``"raise"`` stops.
        compile_units: ``torch.compile`` the forward of each unit.
        save_distributed_checkpoint: On several ranks write checkpoint directories with one file per
            rank; otherwise, and always on one rank, single files.
        verify_checkpoints: Compare checkpoints with their checksums before anything is loaded.
        process_group_backend: ``None`` for NCCL on GPUs and gloo on CPUs.
        timeout: How long a collective waits for the other ranks before the run fails; a number is
            seconds.
        seed: Base of the seeds of stochastic rounding.

    Raises:
        ValueError: An option has a value outside its choices.
        TypeError: An option does not exist.
    """

    strategy_name = "quantized_fsdp"

    def __init__(
        self,
        weights: Literal["auto", "qWD", "qW", "none"] | WeightQuantization = "auto",
        gradients: Literal["auto", "TLq-HS", "TLq", "ULq", "QuanGrad", "none"]
        | GradientQuantization = "auto",
        replica: Literal["auto", "full", "node"] = "auto",
        node_size: int | None = None,
        local_steps: int | LocalSteps | None = None,
        min_quantized_numel: int = 4096,
        units: list[str] | Callable[[nn.Module], bool] | None = None,
        reshard_after_forward: bool = True,
        reduce_every_microbatch: bool = False,
        skip_nonfinite_steps: bool = False,
        check_replicas_every_n_steps: int = 100,
        on_drift: Literal["resync", "raise"] = "resync",
        compile_units: bool = False,
        save_distributed_checkpoint: bool = True,
        verify_checkpoints: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
        seed: int = 0,
    ) -> None:
        """Check the options; nothing is started."""
        super().__init__(
            local_steps=local_steps,
            node_size=node_size,
            min_quantized_numel=min_quantized_numel,
            units=units,
            reshard_after_forward=reshard_after_forward,
            reduce_every_microbatch=reduce_every_microbatch,
            skip_nonfinite_steps=skip_nonfinite_steps,
            compile_units=compile_units,
            save_distributed_checkpoint=save_distributed_checkpoint,
            verify_checkpoints=verify_checkpoints,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        _check_name("replica", replica, get_args(ReplicaName), WeightQuantization)
        _check_name("on_drift", on_drift, ("resync", "raise"))
        for name, value, least in (
            ("check_replicas_every_n_steps", check_replicas_every_n_steps, 0),
            ("seed", seed, 0),
        ):
            check_count(type(self).__name__, name, value, least)
        self._weights = _weight_option(weights, replica)
        self._gradients = _gradient_option(gradients)
        self._check_every = check_replicas_every_n_steps
        self._on_drift: Literal["resync", "raise"] = on_drift
        self._seed = seed

    def quantization_report(self) -> QuantizationReport | None:
        """What the quantized collectives send and lose, and how many steps were skipped."""
        if self.communication is None and self._outer is None:
            return None
        report = QuantizationReport()
        if self.communication is not None:
            report = self.communication.quantization_report()
        totals = {"skipped_steps": self.num_skipped_steps, **report.totals}
        counts = dict(report.counts)
        if self._outer is not None:
            counts["bytes_weights_inter"] = self._outer.sent_nbytes  # nothing else leaves a node
        return replace(report, counts=counts, totals=totals)

    def measure_quantization_errors(self, measure: bool) -> None:
        """Measure the errors of the quantized collectives, or no longer."""
        if self.communication is not None:
            self.communication.measure_quantization_errors(measure)

    def vocabulary(self, module: LightningModule) -> list[nn.Parameter] | None:
        """Embeddings and heads of the module; None where they can be told from it."""
        return None

    def settings(self) -> dict[str, object]:
        """Options that a later Trainer of the same module has to repeat."""
        return {
            **super().settings(),
            "weights": self._weights,
            "gradients": self._gradients,
            "seed": self._seed,
        }

    def on_sharded(self, module: LightningModule) -> QuantizedCommunication | None:
        """Install the quantized collectives."""
        self.make_copies_alike(module)
        topology = self.copy_topology()
        if topology.world_size == 1:
            return None
        is_open = self._gradients == "auto" or isinstance(self._weights, WeightOption)
        nvlink = is_open and nvlink_inside_nodes(self.root_device, topology.node_size)
        weights, gradients, reason = choose_quantization(
            self._weights, self._gradients, topology, nvlink
        )
        if isinstance(self.given.get("weights"), WeightQuantization):
            self._warn_without_effect(("replica",), "the `WeightQuantization` brings its own")
        elif weights is None or weights.method != "qWD":
            self._warn_without_effect(("replica",), 'only `weights="qWD"` keeps replicas')
        if reason:
            rank_zero_info(f"{type(self).__name__} {reason}")
        if weights is None and gradients is None:
            if is_open:
                rank_zero_info(
                    "Nothing is quantized: the link between these ranks is no bottleneck. Give "
                    '`weights="qWD"` and `gradients="TLq-HS"` to quantize all the same.'
                )
            return None
        communication = quantize_communication(
            module,
            weights=weights,
            gradients=gradients,
            topology=topology,
            min_quantized_numel=self._min_quantized_numel,
            seed=self._seed,
            vocabulary=self.vocabulary(module),
        )
        if gradients is not None:
            _warn_of_options_without_effect(gradients, communication)
        plan = communication.plan
        tell = rank_zero_warn if plan.leaves_out_much else rank_zero_info
        tell(plan.summary())
        return communication

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers and let their steps start weight exchanges."""
        super().setup_optimizers(trainer)
        if self.copy_topology().world_size == 1:
            names = ("weights", "gradients", "replica")
            self._warn_without_effect(names, self.why_nothing_travels)
        if self.communication is not None:
            for optimizer in self.optimizers:
                self.communication.register_optimizer(optimizer)

    @property
    def why_nothing_travels(self) -> str:
        """Why no other rank shares what this one trains, if none does."""
        if self.nodes_train_alone:
            return (
                "every node is one rank, and all that nodes exchange that train alone is what "
                "`local_steps` says (`LocalSteps(bits=...)`)"
            )
        return "there is one rank, which sends nothing"

    def _warn_without_effect(self, names: Iterable[str], why: str) -> None:
        warn_without_effect(type(self).__name__, self.given, names, why)

    def after_optimizer_step(self) -> None:
        """Compare the replicas now and then, then bring nodes together if it is time to."""
        self._check_replicas()
        super().after_optimizer_step()

    def _check_replicas(self) -> None:
        communication = self.communication
        if communication is None or not self._check_every or communication.step == 0:
            return
        if communication.step % self._check_every == 0:
            drifted = communication.check_replicas(self._on_drift)
            if drifted:
                self.warn_once(
                    f"the weight replicas of {len(drifted)} unit(s) differed between ranks after "
                    f"step {communication.step} (first: `{drifted[0]}`) and are refreshed in full "
                    "precision. Something writes to them on some ranks only."
                )

    def on_step_error(self) -> None:
        """Let no reduction write to memory that is freed now, and keep nothing of the step."""
        if self.communication is not None:
            self.communication.recover()

    def on_weights_loaded(self) -> None:
        """Gather the loaded weights in full precision first."""
        super().on_weights_loaded()
        if self.communication is not None:
            self.communication.invalidate()

    def extra_state(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Counters, and the replica that the next difference refers to."""
        values, tensors = super().extra_state()
        if self.num_skipped_steps:
            values["num_skipped_steps"] = self.num_skipped_steps
        if self.communication is not None:
            values["communication"] = self.communication.state_dict()
            tensors["replica"] = dict(self.communication.replica_state_dict())
        return self.values_of_copies(values), tensors

    def load_extra_state(
        self, values: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Continue with the saved replica, or from the weights if there is none."""
        super().load_extra_state(values, tensors)
        values = self.values_of_copy(values)
        self.num_skipped_steps = int(values.get("num_skipped_steps", 0))
        if self.communication is None:
            return
        if "communication" in values:
            replica = tensors.get("replica", {})
            self.communication.load_state_dict(values["communication"], replica)
        else:
            self.communication.invalidate()
