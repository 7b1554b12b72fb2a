"""One decoder layer of Hugging Face's Llama, and the ways to train it in `activations.py`.

A variant changes how a layer saves tensors for backward, or the precision of its products. Each has
a layer of its own with the same weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lq_lightning import quantize_activations
from lq_lightning.activations.policy import RECIPES

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a layer and of its input.

    Attributes:
        hidden: Width of the residual stream.
        intermediate: Width between the MLP's projections.
        heads: Query heads.
        kv_heads: Key/value heads.
        seq: Tokens of a sequence.
        batch: Sequences.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    seq: int = 0
    batch: int = 0

    @property
    def unit_nbytes(self) -> int:
        """U: bytes of the layer's input in bf16."""
        return 2 * self.batch * self.seq * self.hidden


SHAPES = {
    "llama3_8b": Shape(hidden=4096, intermediate=14336, heads=32, kv_heads=8),
    "llama2_7b": Shape(hidden=4096, intermediate=11008, heads=32, kv_heads=32),
    # COAT's table 6: its memory per token has the 7B's ratio of MLP to hidden size.
    "coat_2048": Shape(hidden=2048, intermediate=5504, heads=16, kv_heads=16),
    "tiny": Shape(hidden=64, intermediate=224, heads=2, kv_heads=1),
}


def parse_case(text: str) -> tuple[str, Shape]:
    """Read a case such as ``llama3_8b:4096x2``, shape, sequence length and batch.

    Raises:
        ValueError: The text is none.
    """
    name, _, sizes = text.partition(":")
    seq, _, batch = sizes.partition("x")
    if name not in SHAPES or not (seq.isdigit() and batch.isdigit()):
        raise ValueError(f"case {text!r}: give SHAPE:SEQxBATCH, SHAPE one of {', '.join(SHAPES)}")
    return text, replace(SHAPES[name], seq=int(seq), batch=int(batch))


# Differs from the seed of the inputs, which would equal rows of the first weight with it and make
# the attention's scores huge.
WEIGHT_SEED = 20_261_122


def make_layer(shape: Shape, device: torch.device) -> nn.Module:
    """Return a layer in bf16, with the same weights each time."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        attn_implementation="sdpa",
    )
    with torch.device(device):
        layer = LlamaDecoderLayer(config, layer_idx=0).to(torch.bfloat16)
    generator = torch.Generator(device).manual_seed(WEIGHT_SEED)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return layer.train()


def rotary_embedding(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, ``[1, S, head size]`` bf16, which all layers of a model share."""
    width = shape.hidden // shape.heads
    steps = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    angles = torch.outer(torch.arange(shape.seq, device=device).float(), 5e5**-steps)
    angles = torch.cat((angles, angles), dim=-1)[None]
    return angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A way to train a layer.

    Attributes:
        change: Changes the layer in place.
        wrap: Wraps the call of the layer.
        context: Context of each forward and backward, including the first, which compiles.
        compiled: Whether the wrapped layer is compiled.
    """

    change: Callable[[nn.Module], object] = lambda layer: None
    wrap: Callable[[nn.Module, Layer], Layer] = lambda layer, call: call
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    compiled: bool = False

    def build(self, layer: nn.Module, name: str) -> Layer:
        """Return the function of input, cosine and sine to be trained."""
        self.change(layer)

        def call(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return layer(x, position_embeddings=(cos, sin))

        call = self.wrap(layer, call)
        if not self.compiled:
            return call
        # Dynamo finds compiled graphs by code object: without one of its own, a variant would be
        # served the graph of another that differs in a setting of the compiler only.
        code = _entry.__code__.replace(co_name="layer_" + "".join(filter(str.isalnum, name)))
        entry = FunctionType(code, globals() | {"_call": call})
        return torch.compile(entry, fullgraph=True, dynamic=False)


def _entry(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _call(x, cos, sin)  # type: ignore[name-defined]  # noqa: F821 - a global of each copy


def _use_liger(layer: Any) -> None:
    from liger_kernel.transformers.rms_norm import LigerRMSNorm
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP

    for name in ("input_layernorm", "post_attention_layernorm"):
        norm = getattr(layer, name)
        fused = LigerRMSNorm(norm.weight.numel(), eps=norm.variance_epsilon)
        fused.weight = norm.weight
        setattr(layer, name, fused)
    layer.mlp.forward = functools.partial(LigerSwiGLUMLP.forward, layer.mlp)


def use_torchao(recipe: str, layer: nn.Module) -> None:
    """Let torchao compute linear layers in FP8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(layer, config=Float8LinearConfig.from_recipe_name(recipe))


def use_ours(recipe: str, layer: nn.Module, matmul: str | None = None) -> None:
    """Save codes with this library, with products in the precision of the recipe or another."""
    policy = RECIPES[recipe] if matmul is None else replace(RECIPES[recipe], matmul=matmul)  # type: ignore[arg-type]
    quantize_activations(layer, policy if matmul else recipe)


def _checkpointed(layer: nn.Module, call: Layer) -> Layer:
    return lambda x, cos, sin: checkpoint(call, x, cos, sin, use_reentrant=False)


def keep_products(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep results of matrix products and of attention."""
    kept = operator in _PRODUCTS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _selectively(layer: nn.Module, call: Layer) -> Layer:
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
    return lambda x, cos, sin: checkpoint(
        call, x, cos, sin, use_reentrant=False, context_fn=contexts
    )


def on_cpu(layer: nn.Module) -> AbstractContextManager[Any]:
    """Keep saved tensors in pinned memory of the host, all but weights."""
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    hooks = save_on_cpu(pin_memory=torch.cuda.is_available())
    pack, unpack = hooks.pack_hook, hooks.unpack_hook

    def pack_activation(tensor: Tensor) -> Any:
        is_weight = tensor.untyped_storage().data_ptr() in weights
        return tensor if is_weight else pack(tensor)

    hooks.pack_hook = pack_activation
    hooks.unpack_hook = lambda packed: packed if isinstance(packed, Tensor) else unpack(packed)
    return hooks


def _offloaded(layer: nn.Module, call: Layer) -> Layer:
    def offloading(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        with on_cpu(layer):
            return call(x, cos, sin)

    return offloading


def _memory_budget() -> AbstractContextManager[Any]:
    from torch._functorch import config

    return config.patch(activation_memory_budget=0.5)


def _fp8_pass() -> AbstractContextManager[Any]:
    """Let the compiler's partitioner store bf16 tensors of 1 MB and more as E4M3.

    ``primals`` are the layer's input and its weights, which it would convert too.
    """
    from torch._inductor import config

    options = {
        "quant_type": "torch.float8_e4m3fn",
        "use_scaling": True,
        "exclude_primals": True,
        "size_in_mb": 1,
    }
    patched = config.post_grad_fusion_options | {"activation_quantization_aten_pass": options}
    stack = ExitStack()
    stack.enter_context(config.patch(post_grad_fusion_options=patched))
    return stack


def _ours() -> dict[str, Variant]:
    made = {}
    changes = {name: functools.partial(use_ours, name) for name in ("agoq", "coat", "fp8-4bit")}
    changes["coat int8"] = functools.partial(use_ours, "coat", matmul="int8_forward")
    for name, change in changes.items():
        made[name] = Variant(change=change)
        made[f"{name}, compiled"] = replace(made[name], compiled=True)
    return made


_TENSORWISE = Variant(compiled=True, change=functools.partial(use_torchao, "tensorwise"))
BASE, COMPILED = "bf16", "bf16, compiled"
VARIANTS = {
    BASE: Variant(),
    COMPILED: Variant(compiled=True),
    **_ours(),
    "bf16, Liger": Variant(change=_use_liger),
    "bf16, compiled, memory budget 0.5": Variant(compiled=True, context=_memory_budget),
    "bf16, compiled, full checkpointing": Variant(compiled=True, wrap=_checkpointed),
    "bf16, compiled, selective checkpointing": Variant(compiled=True, wrap=_selectively),
    "bf16, compiled, torch's FP8 pass": Variant(compiled=True, context=_fp8_pass),
    "bf16, full checkpointing": Variant(wrap=_checkpointed),
    "bf16, selective checkpointing": Variant(wrap=_selectively),
    "bf16, save_on_cpu": Variant(wrap=_offloaded),
    "torchao tensorwise, compiled": _TENSORWISE,
    "torchao tensorwise, compiled, memory budget 0.5": replace(_TENSORWISE, context=_memory_budget),
    "torchao rowwise, compiled": Variant(
        compiled=True, change=functools.partial(use_torchao, "rowwise")
    ),
}
