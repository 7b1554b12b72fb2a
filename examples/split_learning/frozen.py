"""The frozen model on the server, which all clients share: each brings adapters of its own.

Adapters are put in for one call (``torch.func.functional_call``), so there is one copy of the
weights however many clients there are. A lock lets one client compute at a time, since a call
changes the modules while it runs.

Shape legend: B samples, T tokens, H channels.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .adapters import Packing, add_adapters, packing_of
from .models import digest, load_model, read_config, trunk_of
from .settings import SplitSettings
from .sites import open_sites, site_shapes


class FrozenModel:
    """A model whose weights never change, on ``device``.

    A batch has at most ``max_tokens`` tokens, B * T.
    """

    def __init__(
        self, settings: SplitSettings, device: torch.device, max_tokens: int = 65_536
    ) -> None:
        self.settings = settings
        self.device = device
        self.max_tokens = max_tokens
        self.config = read_config(settings.model)
        self.config.use_cache = False
        model = load_model(settings.model, self.config, getattr(torch, settings.dtype))
        # Of both ends, where clients have them: they must not be those of another model.
        self._ends = (
            digest(model.get_input_embeddings(), model.get_output_embeddings())
            if settings.everything
            else None
        )
        adapted = add_adapters(model.to(device), settings)
        self.packing: Packing = packing_of(adapted)
        self.shapes = site_shapes(settings, self.packing, self.hidden_size)
        open_sites(self.shapes, settings)  # which may refuse their sizes, before any client comes
        self._calls = _Calls(adapted, settings.peft == "prefix")
        self._lock = threading.Lock()

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self.config.hidden_size)

    def agreement(self) -> dict[str, Any]:
        """Return the options that are compared when a client connects."""
        return self.settings.agreement(self.config, self._ends)

    def check_batch(self, batch: int, tokens: int) -> None:
        """Refuse a batch that the model cannot take."""
        own = self.settings.virtual_tokens if self.settings.peft == "prefix" else 0
        longest = int(getattr(self.config, "max_position_embeddings", 0) or self.max_tokens) - own
        if batch < 1 or tokens < 1 or batch * tokens > self.max_tokens or tokens > longest:
            raise ValueError(
                f"A batch of {batch} x {tokens} tokens: this server takes up to {self.max_tokens} "
                f"(`--max-tokens`), and this model {longest} per sample. Send smaller batches."
            )

    def check_ids(self, ids: Tensor, least: int = 0) -> None:
        """Refuse ids that are not of the vocabulary; on a GPU they would end the whole server."""
        low, high = int(ids.min()), int(ids.max())
        if low < least or high >= self.config.vocab_size:
            raise ValueError(
                f"Token ids from {low} to {high}, but the vocabulary has {self.config.vocab_size}. "
                "Use the tokenizer that belongs to the model."
            )

    def loss(
        self, matrices: Mapping[str, Tensor], batch: Mapping[str, Tensor], gradients: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss per token and, if wanted, its gradients.

        Args:
            matrices: Adapters as they cross, on the device.
            batch: ``input_ids``, ``labels`` and maybe ``attention_mask``, each ``[B, T]``.
            gradients: Whether they are wanted.
        """
        inputs = {name: value.to(self.device) for name, value in batch.items()}
        with self._lock, torch.set_grad_enabled(gradients):
            leaves = self._leaves(matrices, gradients)
            loss = self._call(leaves, "loss", **inputs)
            found = torch.autograd.grad(loss, list(leaves.values())) if gradients else ()
            return loss.detach().float().cpu(), dict(zip(leaves, found, strict=False))

    def forward(
        self,
        matrices: Mapping[str, Tensor],
        embedded: Tensor,
        mask: Tensor | None,
        gradients: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the hidden states ``[B, T, H]`` behind the trunk, and the leaves of their graph.

        Args:
            matrices: Adapters as they cross, on the device.
            embedded: Input of the trunk, ``[B, T, H]``, on the device.
            mask: ``[B, T]``, 0 for padding.
            gradients: Whether `backward` follows; without, there are no leaves.
        """
        with self._lock, torch.set_grad_enabled(gradients):
            leaves = self._leaves(matrices, gradients)
            x = embedded.requires_grad_(gradients and self.settings.input_gradient)
            mask = None if mask is None else mask.to(self.device)
            hidden = self._call(leaves, "hidden", inputs_embeds=x, attention_mask=mask)
            if gradients:
                return hidden, {**leaves, **({"embedded": x} if x.requires_grad else {})}
            return hidden, {}

    def backward(
        self, hidden: Tensor, gradient: Tensor, leaves: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the gradients of the leaves of `forward`."""
        # On this thread. That of the GPU may be a client's, which waits for this answer in its own
        # backward pass if both are one process.
        with self._lock, torch.autograd.set_multithreading_enabled(False):
            wanted: Sequence[Tensor] = list(leaves.values())
            found = torch.autograd.grad(hidden, wanted, gradient)
            return dict(zip(leaves, found, strict=True))

    def _leaves(self, matrices: Mapping[str, Tensor], gradients: bool) -> dict[str, Tensor]:
        return {name: value.detach().requires_grad_(gradients) for name, value in matrices.items()}

    def _call(self, leaves: Mapping[str, Tensor], method: str, **inputs: Any) -> Tensor:
        adapters = self.packing.unpack(leaves)
        named = {f"adapted.{name}": value for name, value in adapters.items()}
        result: Tensor = functional_call(self._calls, named, (method,), inputs)
        return result


class _Calls(nn.Module):
    """Both uses of a model of peft, as one module whose parameters can be replaced for a call."""

    def __init__(self, adapted: Any, prefix: bool) -> None:
        super().__init__()
        self.adapted = adapted
        self._prefix = prefix

    def forward(self, method: str, **inputs: Any) -> Tensor:
        result: Tensor = self.adapted(**inputs).loss if method == "loss" else self._hidden(**inputs)
        return result

    def _hidden(self, inputs_embeds: Tensor, attention_mask: Tensor | None) -> Tensor:
        trunk = trunk_of(self.adapted.get_base_model())
        past = None
        if self._prefix:  # which only peft's own forward puts in
            past = self.adapted.get_prompt(batch_size=len(inputs_embeds))
            if attention_mask is not None:
                virtual = self.adapted.active_peft_config.num_virtual_tokens
                seen = attention_mask.new_ones(len(attention_mask), virtual)
                attention_mask = torch.cat((seen, attention_mask), dim=1)
        output = trunk(
            inputs_embeds=inputs_embeds, attention_mask=attention_mask, past_key_values=past
        )
        hidden: Tensor = output.last_hidden_state
        return hidden
