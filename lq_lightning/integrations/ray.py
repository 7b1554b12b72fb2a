"""Ray Train: both strategies on Ray's workers, and their checkpoints in its storage.

In the function that a ``TorchTrainer`` runs on each worker::

    trainer = Trainer(
        strategy=RayQuantizedFSDPStrategy(),
        plugins=[RayLightningEnvironment()],  # of ray.train.lightning
        callbacks=[RayCheckpoints()],
        max_epochs=3,
    )
    trainer.fit(model, data, ckpt_path=newest_checkpoint())

``ray.train.lightning.prepare_trainer`` knows Ray's own strategies alone: leave it out, and also
``devices`` and ``num_nodes``, which Ray knows. Ray starts the process group: its backend and
timeout are those of ``ray.train.torch.TorchConfig``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lq_lightning.strategies import QuantizedFSDPStrategy, QuantizedPipelineStrategy

try:
    import ray.train
    import ray.train.torch
    from ray.train.v2.api.report_config import CheckpointUploadMode
except ImportError as error:
    raise ModuleNotFoundError(
        "`lq_lightning.integrations.ray` needs Ray Train: `pip install 'ray[train]>=2.60'`."
    ) from error

__all__ = [
    "RayCheckpoints",
    "RayQuantizedFSDPStrategy",
    "RayQuantizedPipelineStrategy",
    "newest_checkpoint",
]

_FILE = "checkpoint.ckpt"  # as Ray's own callback names it


class _OnWorkers:
    """Devices and nodes of Ray's workers, in place of what the Trainer was told."""

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The worker's device for each worker of its node."""
        return [ray.train.torch.get_device()] * ray.train.get_context().get_local_world_size()

    @parallel_devices.setter
    def parallel_devices(self, devices: object) -> None:
        """Ignore what Lightning found, which may be other workers' devices."""

    @property
    def num_nodes(self) -> int:
        """Nodes with workers, which are equally many on each."""
        context = ray.train.get_context()
        return int(context.get_world_size() // context.get_local_world_size())

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        """Ignore the Trainer's, whose default is one."""

    def setup_environment(self) -> None:
        """Check that all nodes have as many workers, in the process group that Ray has started.

        Raises:
            ValueError: On all workers: they lie unevenly on nodes.
        """
        context, device = ray.train.get_context(), ray.train.torch.get_device()
        if device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL gathers on the current one
        on_nodes: list[int] = [0] * context.get_world_size()
        dist.all_gather_object(on_nodes, context.get_local_world_size())
        if len(set(on_nodes)) > 1:
            raise ValueError(
                f"nodes have {min(on_nodes)} to {max(on_nodes)} workers: set "
                "`ScalingConfig(num_workers=...)` and its resources so that each has as many."
            )
        super().setup_environment()  # type: ignore[misc]


class RayQuantizedFSDPStrategy(_OnWorkers, QuantizedFSDPStrategy):  # type: ignore[misc]
    """``QuantizedFSDPStrategy`` on the workers of a Ray ``TorchTrainer``, with its options."""


class RayQuantizedPipelineStrategy(_OnWorkers, QuantizedPipelineStrategy):  # type: ignore[misc]
    """``QuantizedPipelineStrategy`` on the workers of a Ray ``TorchTrainer``, with its options."""


class RayCheckpoints(Callback):
    """Saves in Ray's storage at the end of each training epoch, and reports it with the metrics.

    All workers write one checkpoint together, so the storage has to be a folder that every node
    sees. For other storage use ``save_distributed_checkpoint=False``, which makes one file, and
    Ray's ``RayTrainReportCallback``, which uploads it.

    Args:
        every_n_epochs: Epochs from one checkpoint to the next; metrics are reported after each.
    """

    def __init__(self, every_n_epochs: int = 1) -> None:
        super().__init__()
        self._every_n_epochs = every_n_epochs

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save and report; all workers together."""
        metrics: dict[str, Any] = {k: v.item() for k, v in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        if (trainer.current_epoch + 1) % self._every_n_epochs:
            ray.train.report(metrics)
            return
        storage = ray.train.get_context().get_storage()
        if storage.storage_filesystem.type_name != "local":
            raise ValueError(
                f"`RayCheckpoints` writes to a folder that all nodes see, but the storage path is "
                f"on `{storage.storage_filesystem.type_name}`. Set `RunConfig(storage_path=...)` "
                "to a shared folder, or use `RayTrainReportCallback` and "
                "`save_distributed_checkpoint=False`."
            )
        name = f"epoch={trainer.current_epoch}-step={trainer.global_step}"
        folder = Path(storage.experiment_fs_path, name)
        trainer.save_checkpoint(folder / _FILE)
        ray.train.report(
            metrics,
            checkpoint=ray.train.Checkpoint(folder, storage.storage_filesystem),
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )


def newest_checkpoint() -> str | None:
    """Path of the newest reported checkpoint for ``ckpt_path``; None in a run's first attempt."""
    checkpoint = ray.train.get_checkpoint()
    return None if checkpoint is None else str(Path(checkpoint.path, _FILE))
