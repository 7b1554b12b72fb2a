"""Tensor parallelism within a strategy: layout of ranks, and what its ranks hold alike."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lq_lightning._compat.tensor_parallel import (
    TENSOR,
    replicated_parameters,
    tensor_axis,
    tensor_shard,
)
from lq_lightning._compat.tensors import local_tensor
from lq_lightning._compat.torch import all_gather_flat
from lq_lightning.foundation.strategy_part import StrategyPart
from lq_lightning.foundation.topology import Topology
from lq_lightning.kernels.checksum import checksums
from lq_lightning.strategies.options import FSDPOptions
from lq_lightning.strategies.parts import QuantizedCollectives
from lq_lightning.strategies.same_batches import BatchCheck, align_random_numbers

# Difference of a rank's gradient from the mean over ranks, relative to the mean. Equal computations
# differ by rounding to bf16 at most. Gradients of each rank's own tokens differ by about 1, and by
# a few percent where many tokens say the same, as they may of a scale.
_MAX_DIFFERENCE = 0.01


def data_topology(owner: str, ranks: Topology, tensor_size: int) -> Topology:
    """Return the topology of the ranks with this rank's tensor-parallel shards, among ``ranks``.

    Tensor-parallel ranks are neighbours on one node.

    Raises:
        ValueError: ``tensor_size`` does not divide the ranks of a node.
    """
    if ranks.node_size % tensor_size:
        allowed = [d for d in range(1, ranks.node_size + 1) if ranks.node_size % d == 0]
        raise ValueError(
            f"`{owner}(tensor_parallel_size={tensor_size})` does not divide the {ranks.node_size} "
            "rank(s) of a node that hold the same layers; tensor-parallel ranks exchange "
            f"activations in every layer and have to share a node. Allowed here: {allowed}."
        )
    return Topology(
        world_size=ranks.world_size // tensor_size,
        rank=ranks.rank // tensor_size,
        node_size=ranks.node_size // tensor_size,
    )


def _noted(
    module: nn.Module | None,
) -> tuple[dict[int, list[str]], dict[str, tuple[bool, dict[str, object]]]]:
    """Names of parameters by their id, and by name whether they are trained and their attributes.

    Not the parameters, which are freed as they are cut.
    """
    names_of, known = defaultdict(list), {}
    if module is not None:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names_of[id(parameter)].append(name)
            known[name] = parameter.requires_grad, dict(parameter.__dict__)
    return names_of, known


@contextmanager
def keeps_parameters(module: nn.Module | None) -> Generator[None, None, None]:
    """Let parameters that the code inside cuts stay frozen, and refuse it if it unties them.

    torch's ``parallelize_module`` makes a new parameter for each module, which is trained.
    """
    names_of, known = _noted(module)
    yield
    now = {} if module is None else dict(module.named_parameters(remove_duplicate=False))
    cut = {n: p for n, p in now.items() if n in known and tensor_axis(p) is not None}
    for names in names_of.values():
        present = [name for name in names if name in now]
        for first, other in zip(present, present[1:], strict=False):
            if now[other] is not now[first] and (first in cut or other in cut):
                raise ValueError(
                    f"`{first}` and `{other}` were one parameter, of which `parallelize_module` in "
                    "`configure_model` has made two, which would be trained apart. Give both "
                    "modules styles that cut it alike, such as `RowwiseParallel` for an embedding "
                    "and `ColwiseParallel` for the head, and then tie them again: `head.weight = "
                    "embedding.weight`. Or do not tie them in `__init__`."
                )
    thawed = []
    for name, new in cut.items():
        trained, attributes = known[name]
        new.__dict__.update({k: v for k, v in attributes.items() if k not in new.__dict__})
        if new.requires_grad and not trained:
            new.requires_grad_(False)
            thawed.append(name)
    if thawed:
        rank_zero_warn(
            f"`{thawed[0]}`{_more(thawed)} stay frozen, as they were before `configure_model`. To "
            "train what was frozen, unfreeze it in `configure_optimizers`."
        )


class _GatherOver:
    """Gathers states of a metric from a group, which can be neither copied nor pickled."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, result: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
        gathered: list[Tensor] = gather_all_tensors(result, group or self._group)
        return gathered

    def __deepcopy__(self, memo: object) -> _GatherOver:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


def gather_over_data_ranks(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Let metrics that have no group of their own gather their states over ``group``."""
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.process_group is None:
            known = metric.dist_sync_fn
            if known is None or isinstance(known, _GatherOver):
                metric.dist_sync_fn = _GatherOver(group)


class TensorRanks(StrategyPart):
    """Keeps tensor-parallel ranks alike in what all of them hold.

    Norms, biases, and whatever a plan does not shard are replicated: each rank computes the same
    gradient and takes the same step, with equal rounding noise. Nothing but that keeps them equal.

    Attributes:
        size: Tensor-parallel ranks.
        kept: Returns what else than optimizers' states is kept for a parameter.
    """

    kept: Callable[[nn.Parameter], Iterable[Tensor]] | None = None

    def __init__(self, owner: str, options: FSDPOptions, collectives: QuantizedCollectives) -> None:
        self.size = options.tensor_parallel_size
        self._owner, self._options, self._collectives = owner, options, collectives
        self._module: nn.Module | None = None
        self._device: torch.device | None = None
        self._group: dist.ProcessGroup | None = None
        self._every: dist.ProcessGroup | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self._steps = 0
        self._unverified: dict[str, nn.Parameter] = {}
        self._gradients: Counter[str] = Counter()  # that these have had
        self._batches: BatchCheck | None = None

    def begin_run(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        every: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """Let tensor-parallel ranks draw alike from here on, and compare their batches.

        ``every`` has all ranks that share the module.
        """
        if self.size > 1:
            self._module, self._group, self._every = module, mesh.get_group(TENSOR), every
            self._device = device
            align_random_numbers(self._group, device)
            self._batches = BatchCheck(self._group, device)

    def check_batch(self, batch: object) -> None:
        """Refuse a batch or random numbers that other tensor-parallel ranks do not have."""
        if self._batches is not None:
            self._batches(batch)

    def check_last_batch(self) -> None:
        """Wait for the comparison of batches that is under way."""
        if self._batches is not None:
            self._batches.finish()

    def before_save(self) -> None:
        """Save nothing that was learned from different batches."""
        self.check_last_batch()

    def on_step_error(self) -> None:
        """Drop the comparison that is under way."""
        if self._batches is not None:
            self._batches.forget()

    def share_values(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Give replicated parameters the values of the first tensor-parallel rank."""
        if self.size == 1:
            return
        self._group, self._device = mesh.get_group(TENSOR), torch.device(mesh.device_type)
        if not any(tensor_shard(p) is not None for p in module.parameters()):
            raise ValueError(
                f"`{self._owner}(tensor_parallel_size={self.size})`: no parameter of "
                f"`{type(module).__name__}` on this rank is sharded over tensor-parallel ranks, "
                "which would all compute the same. Call `torch.distributed.tensor.parallel."
                'parallelize_module(..., self.device_mesh["tensor_parallel"], plan)` in '
                '`configure_model`, or set `tensor_parallel="auto"`.'
            )
        self._copy_from_first(replicated_parameters(module).values())

    def _copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            local = local_tensor(tensor.detach())
            if local.numel():
                staged = local.to(self._device)
                # bytes: gloo knows no float8
                dist.broadcast(staged.view(-1).view(torch.uint8), group=self._group, group_src=0)
                if staged is not local:
                    local.copy_(staged)

    def set_up(self, optimizers: Sequence[Optimizer]) -> None:
        """Start a run of ``fit``."""
        self._optimizers = optimizers
        self._steps = 0
        if self._module is not None:
            self._unverified = replicated_parameters(self._module)
        self._gradients.clear()

    @torch.no_grad()
    def check_gradients(self) -> None:
        """Refuse a parameter's first gradient if it differs between ranks; all of them call it.

        A norm that sees this rank's tokens only, as a plain module in a sequence-parallel region,
        has a gradient of these alone: every rank would train its copy on other tokens. A gradient
        that is zero, or in a step that is not finite, says nothing: the 2nd, 4th, 8th ... one is
        compared then.
        """
        names, differences = [], []
        for name, parameter in self._unverified.items():
            if parameter.grad is None:
                continue
            self._gradients[name] = count = self._gradients[name] + 1
            if count & (count - 1) == 0:
                own = local_tensor(parameter.grad).float()
                mean = own / self.size
                dist.all_reduce(mean, group=self._group)
                names.append(name)
                differences.append((own - mean).norm() / mean.norm())
        if not names:
            return
        found = torch.stack(differences).nan_to_num(-1.0, posinf=1.0)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._every)
        compared = [(n, d) for n, d in zip(names, found.tolist(), strict=True) if d >= 0]
        for name, _ in compared:
            del self._unverified[name]
        bad = [pair for pair in compared if pair[1] > _MAX_DIFFERENCE]
        if bad:
            name, difference = max(bad, key=lambda pair: pair[1])
            raise ValueError(
                f"the gradient of `{name}`{_more(bad)} differs between tensor-parallel ranks by "
                f"{difference:.0%} of its mean, although all of them hold the same parameter. "
                "Either its module sees this rank's tokens only: give it `SequenceParallel()` in "
                "the plan of `parallelize_module`. Or ranks have other inputs: batches and random "
                "numbers (dropout) must be those of the data-parallel rank, "
                '`self.device_mesh["data_parallel"].get_local_rank()`.'
            )

    def after_optimizer_step(self, stepped: bool) -> None:
        """Compare replicated parameters every so many steps."""
        every = self._options.check_replicas_every_n_steps
        self._steps += 1
        module, group = self._module, self._group
        if module is not None and group is not None and every and self._steps % every == 0:
            self._compare(module, group)

    def _compare(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        parameters = replicated_parameters(module)
        own = checksums([local_tensor(p.detach()) for p in parameters.values()])
        every = own.new_empty(self.size, own.numel())
        all_gather_flat(every.view(-1), own, group)
        differ = (every != every[:1]).any(0).to(torch.int32)
        # all ranks raise, or refresh their replicas, together
        dist.all_reduce(differ, dist.ReduceOp.MAX, group=self._every)
        drifted = [name for name, bad in zip(parameters, differ.tolist(), strict=True) if bad]
        if not drifted:
            return
        message = (
            f"`{drifted[0]}`{_more(drifted)} differ between tensor-parallel ranks, which all hold "
            "the same parameters: something wrote to them on some ranks only, or summed gradients "
            "in another order"
        )
        if self._options.on_drift == "raise":
            raise RuntimeError(f"{message}. `on_drift='resync'` would take the first rank's.")
        for parameter in map(parameters.__getitem__, drifted):
            self._copy_from_first((parameter, *self._states(parameter)))
        self._collectives.on_weights_loaded()
        rank_zero_warn(
            f"{message}. They and their optimizer states become those of the first rank."
        )

    def _states(self, parameter: nn.Parameter) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            for value in optimizer.state.get(parameter, {}).values():
                # counters of steps, on the CPU, are equal
                if isinstance(value, Tensor) and value.device == parameter.device and value.ndim:
                    yield value
        if self.kept is not None:
            yield from self.kept(parameter)


def _more(found: Sequence[object]) -> str:
    return f" and {len(found) - 1} more" if len(found) > 1 else ""
