"""The quantized collectives of a strategy: choosing, installing, checking and saving them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lq_lightning._compat.torch import all_linked_by_nvlink
from lq_lightning.checkpoint.checkpointer import StrategyPart
from lq_lightning.data_parallel import (
    GradientQuantization,
    QuantizedCommunication,
    Topology,
    WeightQuantization,
    quantize_communication,
)
from lq_lightning.foundation.checks import check_choice
from lq_lightning.strategies.optimizer_steps import warn_on_first
from lq_lightning.strategies.options import (
    FSDPOptions,
    GradientName,
    ReplicaName,
    WeightName,
    warn_without_effect,
)
from lq_lightning.strategies.sharding import sharded

Auto = Literal["auto"]


class WeightOption(NamedTuple):
    """A weight method by name, with a replica mode, either of them perhaps still to be chosen."""

    method: Literal["auto", "qWD", "qW"]
    replica: Literal["auto", "full", "node"]


def nvlink_inside_nodes(device: torch.device, node_size: int) -> bool:
    """Whether every rank sees NVLink between all GPUs of its node; all ranks must call it."""
    linked = False
    if device.type == "cuda":
        try:
            linked = all_linked_by_nvlink(node_size)
        except RuntimeError as error:  # the other ranks wait for this one's answer
            rank_zero_warn(
                f"cannot tell whether NVLink connects the GPUs, so assuming not: {error}"
            )
    flag = torch.tensor(int(linked), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def choose_quantization(
    weights: WeightOption | WeightQuantization | None,
    gradients: Auto | GradientQuantization | None,
    topology: Topology,
    nvlink: bool,
) -> tuple[WeightQuantization | None, GradientQuantization | None, str]:
    """Replace every ``"auto"`` by a choice.

    On one node of GPUs linked by NVLink nothing is quantized: FSDP2's collectives hide behind the
    computation there, and quantized ones are at best as fast. Anywhere else weights travel as
    ``"qWD"`` and gradients as ``"TLq-HS"``. The ranks of a node share a replica if NVLink makes
    reading it cheap, since that takes less memory; otherwise each rank has a full one.

    Returns:
        Quantization of weights and of gradients (None: FSDP2's own collective), and the choice with
        its reason (empty if there was nothing to choose).
    """
    fast = topology.num_nodes == 1 and nvlink
    notes = []
    if gradients == "auto":
        gradients = None if fast else GradientQuantization()
        notes.append(f"gradients={'none' if fast else GradientQuantization().method!r}")
    if isinstance(weights, WeightOption):
        method, replica = weights
        if method == "auto":
            method = "qWD"
            notes.append(f"weights={'none' if fast else method!r}")
            if fast:
                return None, gradients, _reason(notes, topology, nvlink)
        if replica == "auto":
            shared = nvlink and topology.num_nodes > 1 and topology.node_size > 1
            replica = "node" if shared else "full"
            if method == "qWD":
                notes.append(f"replica={replica!r}")
        weights = WeightQuantization(method=method, replica=replica)
    return weights, gradients, _reason(notes, topology, nvlink)


def _reason(notes: list[str], topology: Topology, nvlink: bool) -> str:
    if not notes:
        return ""
    link = "with NVLink inside" if nvlink else "where no NVLink between all of them was found"
    nodes = "1 node" if topology.num_nodes == 1 else f"{topology.num_nodes} nodes"
    ranks = "1 rank" if topology.node_size == 1 else f"{topology.node_size} ranks"
    return f"chose {', '.join(notes)} for {nodes} of {ranks} {link}"


class QuantizedCollectives(StrategyPart):
    """Gathers weights and reduces gradients among the ranks that share a model.

    Args:
        strategy: Gives the device and the attached module.
        given: Options that the user has set.

    Attributes:
        weights: Quantization of weights, perhaps still to be chosen.
        gradients: Quantization of gradients, perhaps still to be chosen.
        step_group: Ranks that take or skip an optimizer step together; None are all.
    """

    tensor_kinds = ("replica",)

    def __init__(
        self, strategy: ModelParallelStrategy, options: FSDPOptions, given: Mapping[str, object]
    ) -> None:
        self._strategy, self._options, self._given = strategy, options, given
        self._owner = type(strategy).__name__
        self.step_group: dist.ProcessGroup | None = None
        self.weights = self._weight_option()
        self.gradients = self._gradient_option()

    def _check_name(self, option: str, allowed: object, *configs: type) -> None:
        value = getattr(self._options, option)
        check_choice(self._owner, option, value, get_args(allowed), *configs)

    def _weight_option(self) -> WeightOption | WeightQuantization | None:
        weights, replica = self._options.weights, self._options.replica
        self._check_name("replica", ReplicaName, WeightQuantization)
        self._check_name("on_drift", Literal["resync", "raise"])
        if isinstance(weights, WeightQuantization):
            return weights
        self._check_name("weights", WeightName, WeightQuantization)
        if weights == "none":
            return None
        if weights == "auto" or replica == "auto":
            return WeightOption(weights, replica)
        return WeightQuantization(method=weights, replica=replica)

    def _gradient_option(self) -> Auto | GradientQuantization | None:
        gradients = self._options.gradients
        if isinstance(gradients, GradientQuantization):
            return gradients
        self._check_name("gradients", GradientName, GradientQuantization)
        if gradients == "auto":
            return "auto"
        return None if gradients == "none" else GradientQuantization(method=gradients)

    @property
    def communication(self) -> QuantizedCommunication | None:
        """The collectives in use; ``None`` on one rank, before ``setup``, or if off."""
        record = sharded(self._strategy.lightning_module)
        communication: QuantizedCommunication | None = None if record is None else record.extra
        return communication

    def install(
        self,
        module: LightningModule,
        topology: Topology,
        vocabulary: list[nn.Parameter] | None,
    ) -> QuantizedCommunication | None:
        """Install the quantized collectives in a sharded module; None if nothing is quantized.

        Args:
            module: Sharded over the ranks of ``topology``.
            vocabulary: Embeddings and heads of the module; None to find them in it.
        """
        if topology.world_size == 1:
            return None
        is_open = self.gradients == "auto" or isinstance(self.weights, WeightOption)
        # every rank takes the same branches: options are equal, and this is agreed on
        nvlink = is_open and nvlink_inside_nodes(self._strategy.root_device, topology.node_size)
        weights, gradients, reason = choose_quantization(
            self.weights, self.gradients, topology, nvlink
        )
        if isinstance(self._given.get("weights"), WeightQuantization):
            self.warn_without_effect(("replica",), "the `WeightQuantization` brings its own")
        elif weights is None or weights.method != "qWD":
            self.warn_without_effect(("replica",), 'only `weights="qWD"` keeps replicas')
        if reason:
            rank_zero_info(f"{self._owner} {reason}")
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
            min_quantized_numel=self._options.min_quantized_numel,
            seed=self._options.seed,
            vocabulary=vocabulary,
        )
        if gradients is not None:
            _warn_of_options_without_effect(gradients, communication)
        plan = communication.plan
        tell = rank_zero_warn if plan.leaves_out_much else rank_zero_info
        tell(plan.summary())
        return communication

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Let the steps of optimizers start weight exchanges."""
        if (communication := self.communication) is not None:
            for optimizer in optimizers:
                communication.register_optimizer(optimizer)

    def warn_without_effect(self, names: Iterable[str], why: str) -> None:
        """Warn on rank zero of options that do nothing in this run, if any of them was given."""
        warn_without_effect(self._owner, self._given, names, why)

    def after_optimizer_step(self, stepped: bool) -> None:
        """Compare the weight replicas every so many steps."""
        communication, every = self.communication, self._options.check_replicas_every_n_steps
        if not stepped or communication is None or not every or communication.step == 0:
            return
        if communication.step % every == 0:
            drifted = communication.check_replicas(self._options.on_drift)
            if drifted:
                warn_on_first(
                    self.step_group,
                    f"the weight replicas of {len(drifted)} unit(s) differed between ranks after "
                    f"step {communication.step} (first: `{drifted[0]}`) and are refreshed in full "
                    "precision. Something writes to them on some ranks only.",
                )

    def on_step_error(self) -> None:
        """Join reductions before their memory is freed, and drop the state of the step."""
        if (communication := self.communication) is not None:
            communication.recover()

    def on_weights_loaded(self) -> None:
        """Gather the loaded weights in full precision next."""
        if (communication := self.communication) is not None:
            communication.invalidate()

    def extra_state(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Counters, and the replica that the next difference refers to."""
        communication = self.communication
        if communication is None:
            return {}, {}
        replica = dict(communication.replica_state_dict())
        return {"communication": communication.state_dict()}, {"replica": replica}

    def load_extra_state(
        self, values: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Continue with the saved replica, or from the weights if there is none."""
        communication = self.communication
        if communication is not None and "communication" in values:
            communication.load_state_dict(values["communication"], tensors.get("replica", {}))
        elif communication is not None:
            communication.invalidate()


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
