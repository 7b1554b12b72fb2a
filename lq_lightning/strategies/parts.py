"""Parts of strategies, and the two that every strategy has: optimizer steps and collectives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import LBFGS, Optimizer

from lq_lightning._compat.lightning import accumulation_window
from lq_lightning._compat.modules import discard_unreduced_gradients
from lq_lightning._compat.tensors import local_tensor
from lq_lightning._compat.torch import all_linked_by_nvlink
from lq_lightning.data_parallel import (
    GradientQuantization,
    QuantizedCommunication,
    Topology,
    WeightQuantization,
    quantize_communication,
)
from lq_lightning.foundation.checks import check_choice, counted
from lq_lightning.foundation.strategy_part import StrategyPart
from lq_lightning.strategies.options import (
    FSDPOptions,
    GradientName,
    ReplicaName,
    WeightName,
    warn_without_effect,
)
from lq_lightning.strategies.sharding import ShardedModule


def warn_on_first(group: dist.ProcessGroup | None, message: str) -> None:
    """Warn on the first rank of a group only; None is the group of all ranks."""
    if group is None:
        rank_zero_warn(message)
    elif group.rank() == 0:
        warnings.warn(f"node of rank {dist.get_rank()}: {message}", stacklevel=2)


class OptimizerSteps(StrategyPart):
    """Defers gradient reduction in gradient accumulation, and skips steps that are not finite.

    Gradients are examined before hooks and clipping as well as after: clipping by value, or a hook
    that clamps, makes an infinite gradient finite but not right.

    Attributes:
        num_skipped: Number of skipped steps.
        skips: Whether steps with infinite or NaN gradients are skipped.
        defers: Whether backward passes but the last of a window leave gradients unreduced.
    """

    def __init__(self, skip_nonfinite: bool, reduce_every_microbatch: bool) -> None:
        self.num_skipped = 0
        self.skips = skip_nonfinite
        self.defers = not reduce_every_microbatch
        self._module: LightningModule | None = None  # sharded
        self._pending = False  # gradients not reduced yet, which no `zero_grad` finds
        self._largest: dict[Optimizer, list[Tensor]] = {}

    def set_up(self, module: LightningModule, optimizers: list[Optimizer]) -> None:
        """Start a run of ``fit``; drop gradients that an interrupted one has left in the module."""
        if self.skips and any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
            raise NotImplementedError(
                "`skip_nonfinite_steps=True` does not work with `LBFGS`, which evaluates the "
                "loss several times in a step: set it to False or use another optimizer."
            )
        self.num_skipped, self._pending = 0, False
        self._largest.clear()
        self._module = module if isinstance(module, FSDPModule) else None
        if self._module is not None:
            discard_unreduced_gradients(self._module)

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        """Run a backward that is not the last of its accumulation window."""
        if self._module is None or not self.defers:
            yield
            return
        root = cast(FSDPModule, self._module)
        root.set_requires_gradient_sync(False)  # FSDP2 then sums unsharded gradients
        self._pending = True
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def start_batch(self) -> None:
        """Drop gradients of an interrupted window, as ``zero_grad`` does without sharding."""
        self._largest.clear()
        module = self._module
        if module is None or not self._pending or not module.automatic_optimization:
            return
        if accumulation_window(module.trainer).first:
            discard_unreduced_gradients(module)
            self._pending = False

    def after_optimizer_step(self, stepped: bool) -> None:
        """Note that the gradients are used."""
        self._pending = False

    def examine(self, optimizer: Optimizer | LightningOptimizer) -> None:
        """Record the largest of this rank's gradients now; does not wait for the device."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        gradients = [p.grad for g in optimizer.param_groups for p in g["params"]]
        local = [local_tensor(g) for g in gradients if g is not None]
        largest = torch.nn.utils.get_total_norm([g for g in local if g.numel()], float("inf"))
        self._largest.setdefault(optimizer, []).append(largest)

    def step_if_finite(
        self,
        optimizer: Optimizer,
        run_closure: Callable[[], Any],
        device: torch.device,
        group: dist.ProcessGroup | None,
        **kwargs: Any,
    ) -> tuple[Any, bool]:
        """Step unless a rank of the group (None: of all) has found a gradient that is not finite.

        Args:
            optimizer: Takes the step, with ``kwargs``.
            run_closure: Runs forward, backward, hooks and clipping.
            device: Device on which the ranks exchange their findings.

        Returns:
            The closure's result, and whether the optimizer stepped.
        """
        result = run_closure()
        self.examine(optimizer)
        largest = torch.stack([value.to(device) for value in self._largest.pop(optimizer)])
        bad = (~torch.isfinite(largest)).any().to(torch.int32)
        if dist.is_initialized() and dist.get_world_size(group) > 1:
            dist.all_reduce(bad, dist.ReduceOp.MAX, group=group)
        if not bad.item():  # waits for the device: all ranks have to take the same branch
            optimizer.step(**kwargs)
            return result, True
        self.num_skipped += 1
        optimizer.zero_grad()
        warn_on_first(
            group,
            "optimizer step skipped because of infinite or NaN gradients "
            f"({self.num_skipped} so far); disable with `skip_nonfinite_steps=False`",
        )
        return result, False

    def extra_state(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """The number of skipped steps."""
        return {"num_skipped_steps": self.num_skipped} if self.num_skipped else {}, {}

    def load_extra_state(
        self, values: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Continue counting."""
        self.num_skipped = int(values.get("num_skipped_steps", 0))


class OptionsOfRun(StrategyPart):
    """Says which options of the strategy are others than in the run that is continued.

    Args:
        name: Of the strategy.
        options: All of its options, as text.
    """

    def __init__(self, name: str, options: Mapping[str, str]) -> None:
        self._options = {"strategy": name, **options}

    def extra_state(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """The options."""
        return {"options": self._options}, {}

    def load_extra_state(
        self, values: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Compare the options with those of the checkpoint."""
        changed = [
            f"`{name}`: {old} -> {self._options[name]}"
            for name, old in values.get("options", {}).items()
            if self._options.get(name, old) != old
        ]
        if changed:
            rank_zero_info(
                "This run continues one with other options of the strategy: " + ", ".join(changed)
            )


_RECORD = "_lq_sharded"  # kept in the module, so that both are freed together


def sharded(module: nn.Module | None) -> ShardedModule | None:
    """Record of a sharded module; ``None`` if it is not sharded."""
    return None if module is None else module.__dict__.get(_RECORD)


def remember(module: LightningModule, record: ShardedModule) -> None:
    """Keep the record in the module, once everything is attached to it."""
    module.__dict__[_RECORD] = record


Auto = Literal["auto"]


class WeightOption(NamedTuple):
    """Weights by name, with a replica mode, either of them perhaps still to be chosen."""

    name: Literal["auto", "qWD"]
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


def read_options(
    weights: Any, gradients: Any, replica: Any
) -> tuple[WeightOption | WeightQuantization | None, Auto | GradientQuantization | None]:
    """Return what these options of a strategy ask for, perhaps still to be chosen.

    None stands for full precision.
    """
    if weights == "none":
        weights = None
    elif not isinstance(weights, WeightQuantization):
        is_open = "auto" in (weights, replica)
        weights = WeightOption(weights, replica) if is_open else WeightQuantization(replica=replica)
    if gradients == "none":
        gradients = None
    elif gradients != "auto" and not isinstance(gradients, GradientQuantization):
        gradients = GradientQuantization(method=gradients)
    return weights, gradients


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
        name, replica = weights
        if name == "auto":
            notes.append(f"weights={'none' if fast else 'qWD'!r}")
            if fast:
                return None, gradients, _reason(notes, topology, nvlink)
        if replica == "auto":
            shared = nvlink and topology.num_nodes > 1 and topology.node_size > 1
            replica = "node" if shared else "full"
            notes.append(f"replica={replica!r}")
        weights = WeightQuantization(replica=replica)
    return weights, gradients, _reason(notes, topology, nvlink)


def _reason(notes: list[str], topology: Topology, nvlink: bool) -> str:
    if not notes:
        return ""
    link = "with NVLink inside" if nvlink else "where no NVLink between all of them was found"
    nodes, ranks = counted(topology.num_nodes, "node"), counted(topology.node_size, "rank")
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
        self._check_name("replica", ReplicaName, WeightQuantization)
        self._check_name("on_drift", Literal["resync", "raise"])
        self._check_name("weights", WeightName, WeightQuantization)
        self._check_name("gradients", GradientName, GradientQuantization)
        self.weights, self.gradients = read_options(
            options.weights, options.gradients, options.replica
        )

    def _check_name(self, option: str, allowed: object, *configs: type) -> None:
        value = getattr(self._options, option)
        if not isinstance(value, configs):
            check_choice(self._owner, option, value, get_args(allowed), *configs)

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
        nvlink = is_open and nvlink_inside_nodes(
            self._strategy.root_device, topology.node_size * self._options.tensor_parallel_size
        )
        weights, gradients, reason = choose_quantization(
            self.weights, self.gradients, topology, nvlink
        )
        if isinstance(self._given.get("weights"), WeightQuantization):
            self.warn_without_effect(("replica",), "the `WeightQuantization` brings its own")
        elif weights is None:
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
