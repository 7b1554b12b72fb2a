"""Blocks that look like gated or plain MLPs, and compute something else: one row each."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, weight_norm

from lq_testing.look_alikes import (
    WIDTH,
    Config,
    Doubled,
    Forward,
    Row,
    Twice,
    hooked,
    hooked_backward,
    hooked_before,
    made,
    parameter,
)

INNER = 2 * WIDTH


def _linear(inner: int = WIDTH, outer: int = INNER) -> nn.Linear:
    return nn.Linear(inner, outer, bias=False)


def gated(forward: Forward, **more: Any) -> Callable[[], nn.Module]:
    """An MLP with Llama's names; values that can be called make what they stand for."""

    def build() -> nn.Module:
        values = {
            k: v() if callable(v) and not isinstance(v, nn.Module) else v for k, v in more.items()
        }
        children = {
            "gate_proj": _linear(),
            "up_proj": _linear(),
            "down_proj": _linear(INNER, WIDTH),
        }
        return made("LookAlikeMLP", forward, **(children | {"act_fn": nn.SiLU()} | values))

    return build


def plain(forward: Forward, **more: Any) -> Callable[[], nn.Module]:
    """An MLP of two projections."""

    def build() -> nn.Module:
        values = {
            k: v() if callable(v) and not isinstance(v, nn.Module) else v for k, v in more.items()
        }
        children = {"first": _linear(), "last": _linear(INNER, WIDTH)}
        return made("LookAlikeFeedForward", forward, **(children | values))

    return build


def halves(forward: Forward, **more: Any) -> Callable[[], nn.Module]:
    """An MLP whose gate and up projection are one."""
    names = {"gate_up_proj": lambda: _linear(WIDTH, 2 * INNER)}
    names["down_proj"] = lambda: _linear(INNER, WIDTH)

    def build() -> nn.Module:
        return made("LookAlikeMLP", forward, **{k: v() for k, v in names.items()}, **more)

    return build


def _true(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return y


def _in_place(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).mul_(1.5))
    return y


def _caches(self: Any, x: Tensor) -> Tensor:
    y = _true(self, x) + self.cache.get("y", 0.0)
    self.cache["y"] = y.detach()
    return y


def _sparse(self: Any, x: Tensor) -> Tensor:
    gate = self.gate_proj(x)
    cut = gate.mean(-1, keepdim=True) + gate.std(-1, keepdim=True)
    return self.down_proj(self.act_fn(F.relu(gate - cut)) * self.up_proj(x))


def _gpt_oss(self: Any, x: Tensor) -> Tensor:
    gate = self.gate_proj(x).clamp(max=1.0)
    up = self.up_proj(x).clamp(-1.0, 1.0)
    return self.down_proj((up + 1) * gate * torch.sigmoid(1.702 * gate))


def _interleaved(self: Any, x: Tensor) -> Tensor:
    both = self.gate_up_proj(x)
    return self.down_proj(F.silu(both[..., ::2]) * both[..., 1::2])


def _uneven(self: Any, x: Tensor) -> Tensor:
    both = self.gate_up_proj(x)
    return self.down_proj(F.silu(both[..., :INNER]) * both[..., INNER - 1 : -1])


def _other_half(self: Any, x: Tensor) -> Tensor:
    up, gate = self.gate_up_proj(x).chunk(2, -1)
    return self.down_proj(F.silu(gate) * up)


def _rowwise(self: Any, x: Tensor) -> Tensor:
    gate, up = self.gate_up_proj(x).view(*x.shape[:-1], 2, INNER).unbind(-2)
    return self.down_proj(F.silu(gate) * up)


def _gates() -> Iterator[tuple[str, Row]]:
    g: dict[str, Forward] = {
        "clamped gate": lambda s, x: s.down_proj(
            s.act_fn(s.gate_proj(x).clamp(max=0.5)) * s.up_proj(x)),
        "gate clamped far away": lambda s, x: s.down_proj(
            s.act_fn(s.gate_proj(x).clamp(max=7.0)) * s.up_proj(x)),
        "clamped up": lambda s, x: s.down_proj(
            s.act_fn(s.gate_proj(x)) * s.up_proj(x).clamp(-0.5, 0.5)),
        "clamped input": lambda s, x: _true(s, x.clamp(-1, 1)),
        "clamped output": lambda s, x: _true(s, x).clamp(-0.1, 0.1),
        "clamped inside": lambda s, x: s.down_proj(
            (s.act_fn(s.gate_proj(x)) * s.up_proj(x)).clamp(-0.2, 0.2)),
        "gpt-oss": _gpt_oss,
        "up and one": lambda s, x: s.down_proj(s.act_fn(s.gate_proj(x)) * (s.up_proj(x) + 1)),
        "residual": lambda s, x: x + _true(s, x),
        "residual inside": lambda s, x: s.down_proj(
            s.act_fn(s.gate_proj(x)) * s.up_proj(x) + s.up_proj.weight[:, 0]),
        "scaled": lambda s, x: 1.5 * _true(s, x),
        "scaled gate": lambda s, x: s.down_proj(s.act_fn(1.5 * s.gate_proj(x)) * s.up_proj(x)),
        "bias of rows": lambda s, x: _true(s, x) + x.mean(-1, keepdim=True),
        "detached gate": lambda s, x: s.down_proj(
            s.act_fn(s.gate_proj(x)).detach() * s.up_proj(x)),
        "detached up": lambda s, x: s.down_proj(s.act_fn(s.gate_proj(x)) * s.up_proj(x.detach())),
        "detached input": lambda s, x: _true(s, x.detach()) + 0 * x,
        "data of the input": lambda s, x: _true(s, x.data) + 0 * x,
        "doubled gradient": lambda s, x: Doubled.apply(_true(s, x)),
        "doubled gradient of the input": lambda s, x: _true(s, Doubled.apply(x)),
        "doubled gradient inside": lambda s, x: s.down_proj(
            Doubled.apply(s.act_fn(s.gate_proj(x)) * s.up_proj(x))),
        "in training": lambda s, x: _true(s, x) * (1.5 if s.training else 1.0),
        "by size": lambda s, x: _true(s, x) * (1.5 if x.shape[1] > 8 else 1.0),
        "by all sizes": lambda s, x: _true(s, x) * (1.5 if x.numel() > 512 else 1.0),
        "by dimensions": lambda s, x: _true(s, x) * (1.5 if x.ndim == 3 else 1.0),
        "by values": lambda s, x: _true(s, x) * (1.5 if x.max() > 3 else 1.0),
        "by the weights": lambda s, x: _true(s, x) * (
            1.5 if s.up_proj.weight.requires_grad else 1.0),
        "by the class of a projection": lambda s, x: _true(s, x) * (
            1.5 if isinstance(s.up_proj, nn.Linear) else 1.0),
        "gate on the gate": lambda s, x: s.down_proj(s.act_fn(s.up_proj(x)) * s.up_proj(x)),
        "gate of the square": lambda s, x: s.down_proj(s.act_fn(s.gate_proj(x * x)) * s.up_proj(x)),
        "up of the gate": lambda s, x: s.down_proj(
            s.act_fn(s.gate_proj(x)) * s.up_proj(s.act_fn(x))),
        "sum": lambda s, x: s.down_proj(s.act_fn(s.gate_proj(x)) + s.up_proj(x)),
        "no product": lambda s, x: (
            s.down_proj(s.act_fn(s.gate_proj(x))) + 0 * s.down_proj(s.up_proj(x))),
        "normalized inside": lambda s, x: s.down_proj(
            F.rms_norm(s.act_fn(s.gate_proj(x)) * s.up_proj(x), (INNER,))),
        "shuffled": lambda s, x: s.down_proj((s.act_fn(s.gate_proj(x)) * s.up_proj(x)).flip(-1)),
        "tokens mixed": lambda s, x: s.down_proj(
            (s.act_fn(s.gate_proj(x)) * s.up_proj(x)).cumsum(-2) / 16),
        "dropout": lambda s, x: s.down_proj(
            F.dropout(s.act_fn(s.gate_proj(x)) * s.up_proj(x), 0.2, s.training)),
        "weights themselves": lambda s, x: F.linear(
            s.act_fn(s.gate_proj(x)) * F.linear(x, s.up_proj.weight), s.down_proj.weight),
        "down twice": lambda s, x: _true(s, x) + s.down_proj(s.gate_proj(x)),
        "twice": lambda s, x: _true(s, _true(s, x)),
        "in place": _in_place,
        "in place behind": lambda s, x: _true(s, x).mul_(1.5),
        "sparse": _sparse,
        "rounded": lambda s, x: s.down_proj(
            (s.act_fn(s.gate_proj(x)) * s.up_proj(x)).bfloat16().float().mul(4).round() / 4),
        "mask": lambda s, x: s.down_proj(
            s.act_fn(s.gate_proj(x)) * s.up_proj(x) * (x[..., :1] > 0)),
        "two functions": lambda s, x: s.down_proj(
            s.act_fn(s.gate_proj(x)) * torch.tanh(s.up_proj(x))),
        "first tokens": lambda s, x: F.pad(_true(s, x[:, :8]), (0, 0, 0, 8)),
        "without gradients": lambda s, x: x + (_true(s, x) - x).detach(),
    }  # fmt: skip
    for name, forward in g.items():
        yield f"mlp: {name}", Row(build=gated(forward))


def _states() -> Iterator[tuple[str, Row]]:
    rows: dict[str, Row] = {
        "layer scale": Row(build=gated(lambda s, x: s.gamma * _true(s, x),
                                       gamma=lambda: parameter(WIDTH))),
        "scalar gain": Row(build=gated(lambda s, x: s.gain * _true(s, x),
                                       gain=lambda: parameter(1))),
        "learnable slope": Row(build=gated(
            lambda s, x: s.down_proj(
                s.gate_proj(x) * torch.sigmoid(s.beta * s.gate_proj(x)) * s.up_proj(x)),
            beta=lambda: parameter(1))),
        "slope of a child": Row(build=gated(_true, act_fn=lambda: made(
            "Swish", lambda s, x: x * torch.sigmoid(s.beta * x), beta=parameter(1)))),
        "slope of one in a child": Row(build=gated(_true, act_fn=lambda: made(
            "Swish", lambda s, x: x * torch.sigmoid(s.beta * x),
            beta=nn.Parameter(torch.ones(1))))),
        "ReLU6": Row(build=gated(_true, act_fn=nn.ReLU6), scale=20.0),
        "PReLU": Row(build=gated(_true, act_fn=nn.PReLU)),
        "buffer": Row(build=gated(lambda s, x: s.gain * _true(s, x),
                                  gain=lambda: torch.tensor(1.5))),
        "tensor that is no buffer": Row(build=gated(
            lambda s, x: s.config.gain * _true(s, x),
            config=lambda: Config(gain=torch.tensor(1.5)))),
        "counts": Row(build=gated(_counts, calls=0), calls=2),
        "child counts": Row(build=gated(_true, act_fn=lambda: made(
            "Counter", _child_counts, calls=0)), calls=2),
        "keeps its output": Row(build=gated(_caches, cache=dict), calls=2),
        "batch norm of a child": Row(build=gated(
            lambda s, x: s.down_proj(
                s.act_fn(s.norm(s.gate_proj(x).flatten(0, 1))).view(2, 16, INNER) * s.up_proj(x)),
            norm=lambda: nn.BatchNorm1d(INNER))),
        "dropout module": Row(build=gated(
            lambda s, x: s.down_proj(s.drop(s.act_fn(s.gate_proj(x)) * s.up_proj(x))),
            drop=lambda: nn.Dropout(0.2))),
        "dropout module in evaluation": Row(build=gated(
            lambda s, x: s.down_proj(s.drop(s.act_fn(s.gate_proj(x)) * s.up_proj(x))),
            drop=lambda: nn.Dropout(0.2)), training=False),
        "dropout set later": Row(build=gated(
            lambda s, x: s.down_proj(s.drop(s.act_fn(s.gate_proj(x)) * s.up_proj(x))),
            drop=lambda: nn.Dropout(0.0)), after=lambda m: setattr(m.drop, "p", 0.5)),
        "limit later": Row(build=gated(_limited, limit=None),
                           after=lambda m: setattr(m, "limit", 0.2)),
        "limit of settings": Row(build=gated(_limited_by_settings,
                                             config=lambda: Config(limit=None)),
                                 after=lambda m: setattr(m.config, "limit", 0.2)),
        "function later": Row(build=gated(_true), after=lambda m: setattr(m, "act_fn", nn.ReLU6())),
        "function of another kind": Row(build=gated(_true, act_fn=lambda: F.silu),
                                        after=lambda m: setattr(m, "act_fn", F.relu6)),
        "hook of a child": Row(build=gated(_true, act_fn=lambda: hooked(nn.SiLU()))),
        "hook of a child before": Row(build=gated(_true, act_fn=lambda: hooked_before(nn.SiLU()))),
        "gradient hook of a child": Row(build=gated(
            _true, act_fn=lambda: hooked_backward(nn.SiLU()))),
        "later hook of a child": Row(build=gated(_true), after=lambda m: hooked(m.act_fn)),
        "later hook of a child before": Row(build=gated(_true),
                                            after=lambda m: hooked_before(m.act_fn)),
        "later gradient hook of a child": Row(build=gated(_true),
                                              after=lambda m: hooked_backward(m.act_fn)),
        "later forward of a child": Row(
            build=gated(_true), after=lambda m: setattr(m.act_fn, "forward", torch.tanh)),
        "later projection": Row(build=gated(_true), after=_another_projection),
        "hook of a projection": Row(build=gated(_true, up_proj=lambda: hooked(_linear()))),
        "later hook of a projection": Row(build=gated(_true), after=lambda m: hooked(m.up_proj)),
        "forward of the instance": Row(build=_patched),
        "call of its class": Row(build=_called_otherwise),
        "child called otherwise": Row(build=gated(_true, act_fn=lambda: _Calling())),
        "parametrized projection": Row(build=_parametrized),
        "weight-normed projection": Row(build=_weight_normed),
        "scaled linear": Row(build=lambda: made(
            "Conv1D", lambda s, x: 1.5 * (x @ s.weight) + s.bias, nf=WIDTH,
            weight=parameter(WIDTH, WIDTH, around=0.0), bias=parameter(WIDTH))),
        "linear with another forward": Row(build=lambda: _Scaling(WIDTH, WIDTH)),
        "attention with another forward": Row(build=_attention),
        "attention with another output later": Row(
            build=lambda: _attention(nn.MultiheadAttention), after=_another_output),
        "interleaved halves": Row(build=halves(_interleaved)),
        "overlapping halves": Row(build=halves(_uneven)),
        "other half": Row(build=halves(_other_half)),
        "halves by views": Row(build=halves(_rowwise)),
        "plain, clamped": Row(build=plain(lambda s, x: s.last(F.gelu(s.first(x)).clamp(max=0.5)))),
        "plain, ReLU6": Row(build=plain(lambda s, x: s.last(F.relu6(s.first(x)))), scale=20.0),
        "plain, residual": Row(build=plain(lambda s, x: s.last(F.gelu(s.first(x))) + x)),
        "plain, reversed": Row(build=plain(
            lambda s, x: s.first(F.gelu(s.last(F.pad(x, (0, WIDTH))))).narrow(-1, 0, WIDTH))),
        "plain, gain": Row(build=plain(lambda s, x: s.gain * s.last(F.gelu(s.first(x))),
                                       gain=lambda: parameter(1))),
        "plain, in place": Row(build=lambda: nn.Sequential(
            _linear(), nn.ReLU6(inplace=True), _linear(INNER, WIDTH)), scale=20.0),
        "plain, by dtype": Row(build=plain(lambda s, x: s.last(F.gelu(s.first(x))) * (
            2.0 if x.dtype == torch.bfloat16 else 1.0)), dtype=torch.bfloat16),
        "plain, in autocast": Row(build=plain(lambda s, x: s.last(F.gelu(s.first(x))) * (
            2.0 if torch.is_autocast_enabled("cpu") else 1.0))),
    }  # fmt: skip
    for name, row in rows.items():
        yield f"mlp: {name}", row


def _counts(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return _true(self, x) * (1 + self.calls % 2)


def _child_counts(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return F.silu(x) * (1 + self.calls % 2)


def _limited(self: Any, x: Tensor) -> Tensor:
    gate = self.gate_proj(x)
    gate = gate if self.limit is None else gate.clamp(max=self.limit)
    return self.down_proj(self.act_fn(gate) * self.up_proj(x))


def _limited_by_settings(self: Any, x: Tensor) -> Tensor:
    gate = self.gate_proj(x)
    gate = gate if self.config.limit is None else gate.clamp(max=self.config.limit)
    return self.down_proj(self.act_fn(gate) * self.up_proj(x))


def _another_projection(module: Any) -> None:
    torch.manual_seed(5)
    module.up_proj = nn.Sequential(_linear(), nn.Tanh())


def _patched() -> nn.Module:
    mlp = gated(_true)()
    own = mlp.forward
    mlp.forward = lambda x: 1.5 * own(x)
    return mlp


def _called_otherwise() -> nn.Module:
    mlp = gated(_true)()
    cls = type(mlp)
    cls.__call__ = lambda self, x: 1.5 * nn.Module.__call__(self, x)  # type: ignore[assignment]
    return mlp


class _Calling(nn.SiLU):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)


class _Scaling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * super().forward(x)


def _parametrized() -> nn.Module:
    mlp = gated(_true)()
    parametrize.register_parametrization(mlp.get_submodule("up_proj"), "weight", Twice())
    return mlp


def _weight_normed() -> nn.Module:
    mlp = gated(_true)()
    weight_norm(mlp.get_submodule("up_proj"))
    return mlp


class _ScaledAttention(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y, weights = super().forward(*args, **kwargs)
        return 1.5 * y, weights


def _attend(self: Any, x: Tensor) -> Tensor:
    y = self.norm(x)
    mixed: Tensor = self.mixer(y, y, y, need_weights=False)[0]
    return mixed


def _attention(kind: type[nn.MultiheadAttention] = _ScaledAttention) -> nn.Module:
    mixer = kind(WIDTH, 2, batch_first=True)
    return made("Attending", _attend, mixer=mixer, norm=nn.LayerNorm(WIDTH))


def _another_output(module: Any) -> None:
    """As adapters do; attention reads the weight and calls nothing."""
    scaling = _Scaling(WIDTH, WIDTH)
    scaling.load_state_dict(module.mixer.out_proj.state_dict())
    module.mixer.out_proj = scaling


def _hugging_face(module: str, name: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        found = getattr(importlib.import_module(f"transformers.models.{module}"), name)
        values = [_config(a) if isinstance(a, dict) else a for a in args]
        made: nn.Module = found(*values, **kwargs)
        for p in made.parameters():
            nn.init.normal_(p, 0.3, 0.3)
        return made

    return build


def _config(values: dict[str, Any]) -> Any:
    return Config(**values)


_SIZES = {"hidden_size": WIDTH, "intermediate_size": INNER, "hidden_act": "silu", "mlp_bias": False}


def hugging_face_rows() -> dict[str, Row]:
    """Modules of models, which need transformers."""
    h = _hugging_face
    t5 = {"d_model": WIDTH, "d_ff": INNER, "dropout_rate": 0.1, "dense_act_fn": "gelu_new"}
    gemma3n = {**_SIZES, "intermediate_size": [INNER], "hidden_activation": "gelu_pytorch_tanh",
               "activation_sparsity_pattern": [0.95]}  # fmt: skip
    oss = {
        **_SIZES,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "swiglu_limit": 1.0,
        "swiglu_alpha": 1.702,
        "_experts_implementation": "eager",
    }
    pool = ("poolformer.modeling_poolformer", "PoolFormerGroupNorm", WIDTH)
    return {
        "Llama MLP": Row(build=h("llama.modeling_llama", "LlamaMLP", _SIZES)),
        "Llama norm": Row(build=h("llama.modeling_llama", "LlamaRMSNorm", WIDTH)),
        "Gemma norm": Row(build=h("gemma.modeling_gemma", "GemmaRMSNorm", WIDTH)),
        "T5 norm": Row(build=h("t5.modeling_t5", "T5LayerNorm", WIDTH)),
        "T5 norm in bf16": Row(
            build=h("t5.modeling_t5", "T5LayerNorm", WIDTH), dtype=torch.bfloat16),
        "T5 gated": Row(build=h("t5.modeling_t5", "T5DenseGatedActDense", t5)),
        "T5 plain": Row(build=h("t5.modeling_t5", "T5DenseActDense", {**t5, "dropout_rate": 0.0})),
        "PoolFormer norm": Row(build=h(*pool), shape=(2, WIDTH, 2, WIDTH)),
        "PoolFormer norm, rows": Row(build=h(*pool), shape=(2, WIDTH, WIDTH)),
        "Gemma3n MLP": Row(build=h("gemma3n.modeling_gemma3n", "Gemma3nTextMLP", gemma3n, 0)),
        "Gemma3n norm": Row(build=h("gemma3n.modeling_gemma3n", "Gemma3nRMSNorm", WIDTH)),
        "Gemma3n norm without scale": Row(
            build=h("gemma3n.modeling_gemma3n", "Gemma3nRMSNorm", WIDTH, with_scale=False)),
        "Qwen3-Next norm": Row(
            build=h("qwen3_next.modeling_qwen3_next", "Qwen3NextRMSNorm", WIDTH)),
        "Qwen3-Next gated norm": Row(build=lambda: made(
            "Gating", lambda s, x: s.norm(x, x.flip(-1)),
            norm=h("qwen3_next.modeling_qwen3_next", "Qwen3NextRMSNormGated", WIDTH)())),
        "ConvNext norm": Row(build=h("convnext.modeling_convnext", "ConvNextLayerNorm", WIDTH)),
        "ConvNext norm, channels first": Row(
            build=h("convnext.modeling_convnext", "ConvNextLayerNorm", WIDTH,
                    data_format="channels_first"), shape=(2, WIDTH, 2, WIDTH)),
        "Cohere norm": Row(build=h("cohere.modeling_cohere", "CohereLayerNorm", WIDTH)),
        "OLMo norm": Row(build=h("olmo.modeling_olmo", "OlmoLayerNorm", WIDTH)),
        "Nemotron norm": Row(build=h("nemotron.modeling_nemotron", "NemotronLayerNorm1P", WIDTH)),
        "Mamba2 norm": Row(build=lambda: made(
            "Gating", lambda s, x: s.norm(x, x.flip(-1)),
            norm=h("mamba2.modeling_mamba2", "MambaRMSNormGated", WIDTH, 16)())),
        "Falcon MLP": Row(build=h("falcon.modeling_falcon", "FalconMLP", {
            "hidden_size": WIDTH, "ffn_hidden_size": INNER, "activation": "gelu", "bias": True,
            "hidden_dropout": 0.0})),
        "GPT-NeoX MLP": Row(build=h("gpt_neox.modeling_gpt_neox", "GPTNeoXMLP",
                                    {**_SIZES, "hidden_act": "gelu"})),
        "gpt-oss MLP": Row(build=lambda: made(
            "First", lambda s, x: s.mlp(x)[0],
            mlp=h("gpt_oss.modeling_gpt_oss", "GptOssMLP", {**oss, "hidden_act": "silu"})())),
        "DeepSeek MLP": Row(build=h("deepseek_v3.modeling_deepseek_v3", "DeepseekV3MLP", _SIZES)),
        "Llama4 MLP": Row(build=h("llama4.modeling_llama4", "Llama4TextMLP", _SIZES)),
        "Llama4 norm": Row(build=h("llama4.modeling_llama4", "Llama4TextRMSNorm", WIDTH)),
        "Llama4 norm without weight": Row(build=h("llama4.modeling_llama4", "Llama4TextL2Norm")),
        "DINOv2 layer scale": Row(build=h("dinov2.modeling_dinov2", "Dinov2LayerScale", {
            "layerscale_value": 0.3, "hidden_size": WIDTH})),
        "DINOv2 SwiGLU": Row(build=h("dinov2.modeling_dinov2", "Dinov2SwiGLUFFN", {
            "hidden_size": WIDTH, "mlp_ratio": 3})),
        "clipped GELU": Row(build=lambda: importlib.import_module(
            "transformers.activations").ClippedGELUActivation(-1, 1)),
    }  # fmt: skip


MLP_ROWS: dict[str, Row] = dict([*_gates(), *_states()])
