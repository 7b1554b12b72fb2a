"""Rules that recompute modules."""

from __future__ import annotations

import pytest
import torch
from lq_testing.small_llama import SmallLlama, tokens
from torch import Tensor, nn

from lq_lightning.activations import ActivationPolicy, ActivationRule, quantize_activations
from lq_lightning.activations.recompute import find_recompute_units

KEEP = {"norm": None, "activation": None, "other": None}


def recompute(*modules: str, **options: object) -> ActivationPolicy:
    rules = tuple(ActivationRule(module=module, recompute=True) for module in modules)
    return ActivationPolicy(rules=rules, **options)


def gradients(model: nn.Module) -> tuple[list[Tensor], int]:
    """Gradients, and bytes that are kept until backward."""
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.data_ptr() not in weights:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    weights = {p.data_ptr() for p in model.parameters()}
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens())
    nbytes = sum(tensor.untyped_storage().nbytes() for tensor in held.values())
    loss.backward()
    return [p.grad.clone() for p in model.parameters()], nbytes


@pytest.mark.parametrize("modules", [("blocks.?",), ("blocks.*.mlp", "blocks.1.attention")])
def test_recomputation_is_exact_and_keeps_less(modules: tuple[str, ...]) -> None:
    model = SmallLlama(dropout=0.2)
    exact, full = gradients(model)
    handle = quantize_activations(model, recompute(*modules, **KEEP))
    again, kept = gradients(model)
    handle.remove()
    assert kept < 0.7 * full
    assert all(torch.equal(a, b) for a, b in zip(exact, again, strict=True))
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_codes_around_a_recomputed_module_change_nothing_in_it() -> None:
    """A code of its input is not handed to it: both runs of its linear layers save the same."""
    model = SmallLlama()
    exact, _ = gradients(model)
    handle = quantize_activations(model, recompute("blocks.*.mlp", norm="int4", other=None))
    coded, _ = gradients(model)
    handle.remove()
    names = [name for name, _ in model.named_parameters()]
    for name, a, b in zip(names, exact, coded, strict=True):
        if name == "blocks.1.mlp.up_proj.weight":
            error = float((a - b).norm() / a.norm())
            assert 0.0 < error < 0.2  # of the final norm only
        assert torch.isfinite(b).all()


def test_policies_are_exchanged_between_steps() -> None:
    model = SmallLlama()
    exact, full = gradients(model)
    handle = quantize_activations(model, ActivationPolicy(**KEEP))
    handle.apply(ActivationPolicy(norm="int8", activation="int4"))
    _, coded = gradients(model)
    handle.apply(recompute("blocks.0", **KEEP))
    again, recomputed = gradients(model)
    handle.apply(ActivationPolicy(**KEEP))
    last, kept = gradients(model)
    handle.remove()
    assert coded < 0.5 * full
    assert recomputed < 0.8 * full
    assert kept == full
    for changed in (again, last):
        assert all(torch.equal(a, b) for a, b in zip(exact, changed, strict=True))
    with pytest.raises(ValueError, match="matmul='float8'"):
        handle.apply(ActivationPolicy(matmul="float8"))


def test_a_cache_is_not_filled_twice() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor, past_key_values: list[Tensor] | None = None) -> Tensor:
            if past_key_values is not None:
                past_key_values.append(x)
            return self.linear(x).tanh()

    layer = nn.ModuleList([Layer()])
    handle = quantize_activations(layer, recompute("0", **KEEP))
    cache: list[Tensor] = []
    layer[0](x := torch.randn(2, 16), past_key_values=cache).sum().backward()
    assert not cache
    with torch.no_grad():
        layer[0](x, past_key_values=cache)
    assert len(cache) == 1
    handle.remove()


def test_units_are_repeated_blocks_and_their_halves() -> None:
    units = list(find_recompute_units(SmallLlama()))
    halves = ("attention", "mlp")
    expected = [[f"blocks.{i}", *(f"blocks.{i}.{half}" for half in halves)] for i in range(2)]
    assert units == [*expected[0], *expected[1]]
    layers = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 16) for _ in range(2)))
    assert list(find_recompute_units(layers)) == ["0", "0.self_attn", "1", "1.self_attn"]


def test_errors_name_what_to_do() -> None:
    with pytest.raises(ValueError, match="leave out one of both"):
        ActivationRule(module="a", codec="int4", recompute=True)
    model = SmallLlama()
    with pytest.raises(ValueError, match=r"ModuleList that has no forward.*'blocks\.\*'"):
        quantize_activations(model, recompute("blocks"))
