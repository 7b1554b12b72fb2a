"""The client's model: adapters, perhaps both ends, and a server in the place of the trunk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lq_lightning.adaptive import adaptive_quantize

from .adapters import (
    NamedParameters,
    PackedAdapters,
    add_adapters,
    initial_adapters,
    packing_of,
)
from .link import ClientGates, ServerLink
from .models import digest, empty_model, load_ends, read_config, trunk_of
from .settings import SplitSettings
from .sites import EMBEDDED, site_shapes
from .wire.client import Connection
from .wire.messages import Message


class SplitModel(nn.Module):
    """A causal language model to train, of which a server holds the frozen trunk.

    It takes and returns what a model of transformers does, so that a LightningModule needs no
    change: ``model(input_ids=ids, labels=ids).loss.backward()``. With the deployment ``adapters``
    the output has a loss only, and needs labels. Only its adapters, and embeddings and LM head
    where they are trained, are in its state dict.

    Each forward pass in training is followed by its backward pass, before the next one.

    Args:
        settings: Settings, the same as the server's.
        connect: Returns a connection, given the options that both ends compare.
        **gates: Other values of ``AdaptiveBitsConfig`` than its preset for the bits.

    Attributes:
        adapters: Trained parameters, under peft's names.
        gates: Gates of AMAQ; else None.
        link: Connection to the server.

    Raises:
        ModuleNotFoundError: transformers or peft is not installed.
        NotImplementedError: the model cannot be split like this.
    """

    def __init__(
        self,
        settings: SplitSettings,
        connect: Callable[[Mapping[str, Any]], Connection],
        **gates: Any,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.config = read_config(settings.model)
        self.config.use_cache = False
        dtype = getattr(torch, settings.dtype)
        # Not a module of this one: it is there for names, shapes, and peft's way of saving.
        self._peft = [add_adapters(empty_model(self.config, dtype), settings)]
        self.adapters = NamedParameters(initial_adapters(self._peft[0]))
        packing = packing_of(self._peft[0])
        self._packed = PackedAdapters(packing)
        self._by_row = packing.lines_are_rows
        shapes = site_shapes(settings, packing, int(self.config.hidden_size))
        self.gates = ClientGates(shapes, settings, **gates) if settings.codec == "amaq" else None
        self.ends, held = self._load_ends(dtype) if settings.everything else (None, None)
        agreement = settings.agreement(self.config, held)
        self.link = ServerLink(
            lambda: connect(agreement), shapes, packing.shapes, settings, self.gates
        )
        self._samples: dict[bytes, int] = {}
        self.register_state_dict_post_hook(_drop_frozen)
        self.register_load_state_dict_post_hook(_expect_no_frozen)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Any:
        """Return the output of a causal language model of transformers.

        Args:
            input_ids: Tokens, ``[B, T]`` integers.
            labels: Likewise, -100 where there is no loss; they are shifted inside.
            attention_mask: ``[B, T]``, 0 for padding.
        """
        from transformers.modeling_outputs import CausalLMOutput

        if self.ends is not None:
            return self.ends(input_ids=input_ids, labels=labels, attention_mask=attention_mask)
        if labels is None:
            raise ValueError(
                "With `--deployment adapters` the server computes the loss, and only that: give "
                "labels. Logits are with the client in `--deployment everything`."
            )
        batch = {"ids": input_ids.detach().cpu().int()}
        if not torch.equal(labels, input_ids):
            batch["labels"] = labels.detach().cpu().int()
        if attention_mask is not None:
            batch["mask"] = attention_mask.detach().cpu().bool()
        training = torch.is_grad_enabled()
        matrices = self._matrices(training)
        loss = _RemoteLoss.apply(self.link, batch, training, tuple(matrices), *matrices.values())
        return CausalLMOutput(loss=loss)

    def save_adapters(self, folder: str | Path) -> None:
        """Save the adapters in peft's format, for ``PeftModel.from_pretrained``."""
        state = {name: value.detach().cpu() for name, value in self.adapters.values().items()}
        # peft takes a prefix from its model, and LoRA from `state_dict`.
        self._peft[0].load_state_dict(state, strict=False, assign=True)
        self._peft[0].save_pretrained(str(folder), state_dict=state)

    def close(self) -> None:
        """End the connection."""
        self.link.close()

    def _matrices(self, training: bool) -> dict[str, Tensor]:
        """Return the adapters as they cross, encoded in the link."""
        adapters = self.adapters.values()
        self._packed.refresh(adapters)
        gates = self.gates.gates if self.gates is not None and training else None
        arriving = self.link.prepare(self._packed, learning=gates is not None)
        matrices = self._packed.connected(adapters)
        if gates is None:
            return matrices
        turn = (lambda x: x.mT) if self._by_row else (lambda x: x)  # gates are those of columns
        return {
            name: turn(adaptive_quantize(turn(x), gates[name], arrives=turn(arriving[name])))
            for name, x in matrices.items()
        }

    def _run_trunk(self, embedded: Tensor, input_ids: Tensor, mask: Tensor | None) -> Tensor:
        training = torch.is_grad_enabled()
        matrices = self._matrices(training)  # which also sets the widths of `encode` below
        if mask is not None:
            mask = mask.detach().cpu().bool()
        gate = self.gates.gates[EMBEDDED] if self.gates is not None and training else None
        sent, arrives = self.link.encode(
            embedded, mask, self._identify(input_ids), training, learning=gate is not None
        )
        if gate is not None:
            embedded = adaptive_quantize(embedded, gate, arrives=arrives)
        result: Tensor = _RemoteTrunk.apply(
            self.link, embedded, sent, tuple(matrices), *matrices.values()
        )
        return result

    def _identify(self, input_ids: Tensor) -> Tensor:
        """Return a number per sample, the same whenever it comes again; the server learns no more.

        Numbers tell the order in which samples were first seen, nothing of their content.
        """
        if self.settings.codec != "aq_sgd":
            return torch.zeros(len(input_ids), dtype=torch.int64)
        rows = input_ids.detach().cpu().contiguous().numpy()
        keys = [hashlib.sha256(row.tobytes()).digest() for row in rows]
        return torch.tensor([self._samples.setdefault(key, len(self._samples)) for key in keys])

    def _load_ends(self, dtype: torch.dtype) -> tuple[Any, str]:
        """Return the model around a trunk on the server, and a digest of its two ends."""
        model: Any = empty_model(self.config, dtype)
        load_ends(model, self.settings.model)
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        trunk = RemoteTrunk(embeddings, self._run_trunk)
        trunk_of(model)  # is one that can be replaced
        setattr(model, model.base_model_prefix, trunk)
        left = [name for name, value in model.named_parameters() if value.is_meta]
        if left:
            raise NotImplementedError(
                f"{type(model).__name__} has more outside of its trunk than embeddings and a head: "
                f"{left[0]}. Use `--deployment adapters`."
            )
        for end in (embeddings, head):
            end.requires_grad_(self.settings.train_ends)
        return model.train(), digest(embeddings, head)


class RemoteTrunk(nn.Module):
    """Takes the place of a trunk; ``run`` computes its output from embeddings, ids and mask."""

    def __init__(
        self, embeddings: nn.Module, run: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    ) -> None:
        super().__init__()
        self.embeddings = embeddings
        self._run = run

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any
    ) -> Any:
        """Return the last hidden states."""
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        given = [name for name, value in others.items() if value is not None and value is not False]
        if given:
            raise ValueError(f"A trunk on a server takes ids and a mask, not {', '.join(given)}.")
        hidden = self._run(self.embeddings(input_ids), input_ids, attention_mask)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)


class _RemoteLoss(torch.autograd.Function):
    """The loss of a batch; its gradients come with it, in one round trip."""

    @staticmethod
    def forward(
        ctx: Any,
        link: ServerLink,
        batch: dict[str, Tensor],
        training: bool,
        names: tuple[str, ...],
        *matrices: Tensor,
    ) -> Tensor:
        loss, gradients = link.loss(batch, training, matrices[0].device)
        ctx.gradients = [gradients[name] for name in names] if training else None
        return loss.to(matrices[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        # In place: nobody else has them, and for large adapters a copy would be the client's peak.
        return (None,) * 4 + tuple(gradient.mul_(grad) for gradient in gradients)


class _RemoteTrunk(torch.autograd.Function):
    """Hidden states behind the trunk; backward sends their gradient and gets the others."""

    @staticmethod
    def forward(
        ctx: Any,
        link: ServerLink,
        embedded: Tensor,
        sent: Message,
        names: tuple[str, ...],
        *matrices: Tensor,
    ) -> Tensor:
        ctx.link, ctx.names = link, names
        return link.forward(sent, embedded.shape, embedded.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        embedded, gradients = ctx.link.backward(grad)
        found = tuple(gradients[name] for name in ctx.names)
        return None, embedded, None, None, *found


def _drop_frozen(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Leave out frozen weights: the model's own files have them."""
    for name, value in module.named_parameters():
        if not value.requires_grad:
            state.pop(prefix + name, None)


def _expect_no_frozen(module: Any, incompatible: Any) -> None:
    frozen = {name for name, value in module.named_parameters() if not value.requires_grad}
    incompatible.missing_keys[:] = [
        key
        for key in incompatible.missing_keys
        if not any(key == name or key.endswith(f".{name}") for name in frozen)
    ]
