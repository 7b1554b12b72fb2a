"""The LightningModule: loss, optimizer and text generation for a causal language model."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from jsonargparse.typing import (
    ClosedUnitInterval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
)
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.checkpoint import checkpoint

from pretraining import hugging_face
from pretraining.hugging_face import HuggingFaceConfig, LoRAConfig
from pretraining.model import Decoder, DecoderConfig


@dataclass(frozen=True, kw_only=True)  # no slots: jsonargparse reads defaults with vars()
class OptimizerConfig:
    """AdamW with linear warmup and cosine decay over the whole run.

    Args:
        lr: Peak learning rate.
        betas: Decay rates of the two moments.
        eps: Term that keeps the update finite.
        weight_decay: Decoupled weight decay of matrices; norms and biases are not decayed.
        warmup_steps: Optimizer steps of linear warmup.
        min_lr_ratio: Learning rate at the end, as a share of the peak.
    """

    lr: float = 1e-3  # no type of jsonargparse: checkpoints do not load those
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup_steps: NonNegativeInt = 50
    min_lr_ratio: ClosedUnitInterval = 0.1

    def __post_init__(self) -> None:
        """Check the values."""
        if not self.lr > 0:
            raise ValueError(f"`--model.optimizer.lr={self.lr}` must be positive; 1e-3 is usual.")


def learning_rate_factor(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Return the share of the peak learning rate after ``step`` of ``total_steps`` steps."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine


# Settings by which some families change the logits after the head.
_AFTER_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def backbone_and_head(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], nn.Module]:
    """Split a language model, adapted or not, into backbone and head.

    Returns:
        A function from ``[B, T]`` tokens to the ``[B, T, D]`` last hidden states, and the module
        that makes logits of them.
    """
    if hasattr(model, "hidden_states"):
        return model.hidden_states, model.lm_head
    whole: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    for name in _AFTER_THE_HEAD:
        if getattr(whole.config, name, None) not in (None, 1, 1.0):
            raise ValueError(
                f"`{type(whole).__name__}` changes its logits (`{name}`) behind the head, which "
                "the loss in chunks leaves out: use `--model.loss=full`."
            )
    backbone = whole.base_model
    return (lambda tokens: backbone(tokens).last_hidden_state), whole.get_output_embeddings()


def _sum_of_losses(head: nn.Module, x_ND: Tensor, targets_N: Tensor) -> Tensor:
    return F.cross_entropy(head(x_ND).float(), targets_N, reduction="sum")


def chunked_cross_entropy(head: nn.Module, x_ND: Tensor, targets_N: Tensor, chunk: int) -> Tensor:
    """Return the mean loss of last hidden states, with the logits of ``chunk`` tokens at a time.

    Logits of 32,768 tokens over Llama 3's vocabulary take 8.4 GB in bf16, and the loss makes fp32
    copies of them. Backward computes them again, which costs a third more of the head's time.
    """
    parts = zip(x_ND.split(chunk), targets_N.split(chunk), strict=True)
    losses = [checkpoint(_sum_of_losses, head, x, y, use_reentrant=False) for x, y in parts]
    return torch.stack(losses).sum() / targets_N.numel()


def compile_layers(model: nn.Module) -> None:
    """Compile each repeated layer in place, all with one graph; names in checkpoints stay."""
    names = getattr(model, "_no_split_modules", None) or ["Block"]
    for layer in [module for module in model.modules() if type(module).__name__ in names]:
        layer.compile()


class CausalLM(pl.LightningModule):
    """A causal language model: the built-in decoder, or any from Hugging Face transformers.

    Args:
        decoder: Size of the built-in decoder. Not used with ``hf_config``.
        hf_config: Train a Hugging Face transformers model instead of the built-in decoder: a model
            type such as ``llama``, a folder or JSON file with its config, or JSON text such as
            ``{"model_type": "llama", "hidden_size": 256}``. Nothing is downloaded.
        hf_overrides: Settings to change in that config, such as ``{num_hidden_layers: 4}``.
        hf_load_weights: Start from the weights in the folder ``hf_config``, not from random ones.
        hf_save_to: Folder that gets the trained model in Hugging Face format at the end of ``fit``
            (with LoRA: the adapters in peft format).
        lora: Train low-rank adapters instead of all weights (Hugging Face models, needs peft).
        optimizer: AdamW and its schedule.
        loss: ``full`` makes the logits of all tokens at once; ``chunked`` of ``loss_chunk`` at a
            time, for long sequences and large vocabularies; ``liger`` does so in Liger's kernel,
            which needs a GPU.
        loss_chunk: Tokens of a chunk.
        compile_layers: ``torch.compile`` each layer. With ``quantized_fsdp``, use the strategy's
            ``compile_units`` instead.
        max_new_tokens: Tokens that ``predict`` adds to each prompt.
        temperature: Sampling temperature of ``predict``; 0 always takes the likeliest token.
        vocab_size: Size of the vocabulary; filled in from the data.
        block_size: Tokens the model sees at once; filled in from the data.
    """

    def __init__(
        self,
        decoder: DecoderConfig = DecoderConfig(),  # noqa: B008 - frozen
        hf_config: str | None = None,
        hf_overrides: dict[str, Any] | None = None,
        hf_load_weights: bool = False,
        hf_save_to: str | None = None,
        lora: LoRAConfig | None = None,
        optimizer: OptimizerConfig = OptimizerConfig(),
        loss: Literal["full", "chunked", "liger"] = "full",
        loss_chunk: PositiveInt = 2048,
        compile_layers: bool = False,
        max_new_tokens: NonNegativeInt = 128,
        temperature: NonNegativeFloat = 0.8,
        vocab_size: int = 264,
        block_size: int = 128,
    ) -> None:
        super().__init__()
        if lora is not None and hf_config is None:
            raise ValueError(
                "`--model.lora` works on Hugging Face models only. Choose one with "
                "`--model.hf_config=llama`, or leave `--model.lora` out."
            )
        if loss == "liger" and importlib.util.find_spec("liger_kernel") is None:
            raise ModuleNotFoundError(
                "`--model.loss=liger` needs Liger's kernels: `pip install liger-kernel`, or use "
                "`--model.loss=chunked`."
            )
        self.loss = loss
        self.loss_chunk = loss_chunk
        self.compile_layers = compile_layers
        self.decoder_config = decoder
        self.hugging_face = HuggingFaceConfig(
            config=hf_config,
            overrides=hf_overrides,
            load_weights=hf_load_weights,
            save_to=hf_save_to,
        )
        self.lora = lora
        self.optimizer_config = optimizer
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        """Build the network once; Lightning calls this before every stage."""
        if self.model is not None:
            return
        if self.hugging_face.config is None:
            self.model = Decoder(self.decoder_config, self.vocab_size)
        else:
            self.model = hugging_face.build(
                self.hugging_face, self.lora, self.vocab_size, self.block_size
            )
        if self.compile_layers:
            compile_layers(self.model)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the ``[B, T, V]`` next-token logits of ``[B, T]`` int64 tokens."""
        if self.model is None:
            raise RuntimeError("`CausalLM` has no network yet; call `configure_model()` first.")
        output = self.model(tokens_BT)
        return output if isinstance(output, Tensor) else output.logits

    def _loss(self, block_BL: Tensor) -> Tensor:
        tokens_BT, targets_BT = block_BL[:, :-1], block_BL[:, 1:]
        if self.loss == "full" or self.model is None:
            logits_BTV = self(tokens_BT)
            return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())
        backbone, head = backbone_and_head(self.model)
        x_ND, targets_N = backbone(tokens_BT).flatten(0, 1), targets_BT.flatten()
        if self.loss == "chunked":
            return chunked_cross_entropy(head, x_ND, targets_N, self.loss_chunk)
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        fused = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
        return fused(head.weight, x_ND, targets_N, head.bias)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss in nats per token of ``[B, block_size + 1]`` tokens."""
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=True, logger=False)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the validation loss in nats per token."""
        loss = self._loss(batch)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(batch))

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the test loss in nats per token."""
        loss = self._loss(batch)
        self.log("test_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(batch))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Continue one prompt; every rank does the same number of forward passes."""
        tokens = self.generate(batch["tokens"][0], self.max_new_tokens, self.temperature)
        return {"index": batch["index"], "tokens": tokens}

    @torch.no_grad()
    def generate(
        self, tokens_T: Tensor, max_new_tokens: int, temperature: float, seed: int = 0
    ) -> Tensor:
        """Continue a ``[T]`` int64 prompt. On a sharded model all ranks must call this together.

        There is no cache of keys and values: this shows what the model learned, it does not serve.

        Args:
            tokens_T: Prompt, which the result includes.
            max_new_tokens: Tokens to add; always that many, so that ranks stay in step.
            temperature: Sampling temperature; 0 takes the likeliest token.
            seed: Seed of the sampling.
        """
        random = torch.Generator().manual_seed(seed)
        tokens_T = tokens_T.to(self.device)
        for _ in range(max_new_tokens):
            logits_V = self(tokens_T[None, -self.block_size :])[0, -1].float().cpu()
            if temperature == 0:
                chosen = logits_V.argmax().view(1)
            else:
                chosen = torch.multinomial((logits_V / temperature).softmax(0), 1, generator=random)
            tokens_T = torch.cat([tokens_T, chosen.to(tokens_T.device)])
        return tokens_T

    def configure_optimizers(self) -> dict[str, Any]:
        """Return AdamW (matrices decayed, the rest not) with warmup and cosine decay."""
        config = self.optimizer_config
        trainable = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trainable if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
        total_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, config, total_steps)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step", "name": "lr"},
        }

    def on_fit_end(self) -> None:
        """Save the trained model in Hugging Face format where that was asked for."""
        if self.hugging_face.save_to is None or self.model is None:
            return
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        if getattr(self.trainer.strategy, "pipeline", None) is None:
            state = get_model_state_dict(self.model, options=options)
        else:  # other ranks have other layers
            whole = self.trainer.strategy.whole_state_dict()
            state = {name.removeprefix("model."): value for name, value in whole.items()}
        if self.trainer.is_global_zero:
            shape = (self.vocab_size, self.block_size)
            folder = hugging_face.save(state, self.hugging_face, self.lora, *shape)
            rank_zero_info(f"Saved the model in Hugging Face format to '{folder}'.")
