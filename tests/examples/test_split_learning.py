"""Split learning: the same training as in one process, quantized or not, and what crosses."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lq_testing.split_runs import batches, client, load, serving, train
from split_learning import protocol
from split_learning.adapters import add_adapters
from split_learning.frozen import FrozenModel
from split_learning.link import ClientGates
from split_learning.model import SplitModel
from split_learning.models import load_model, read_config
from split_learning.settings import SplitSettings
from split_learning.sites import EMBEDDED, HIDDEN, open_sites, site_shapes
from torch import Tensor

from lq_lightning.adaptive import adaptive_quantize

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.uninitialized_memory_ok  # transformers fills what it allocates later

PLAIN: dict[str, Any] = {"codec": "none", "gradients": "none"}
CASES = [
    {"peft": "lora", "deployment": "adapters"},
    {"peft": "lora", "deployment": "everything"},
    {"peft": "lora", "deployment": "everything", "train_ends": True},
    {"peft": "prefix", "deployment": "adapters"},
    {"peft": "prefix", "deployment": "everything"},
]


def name(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


def whole_model(settings: SplitSettings, adapters: dict[str, Tensor]) -> Any:
    """The model of peft in one process, with the same adapters."""
    base = load_model(settings.model, read_config(settings.model), torch.float32)
    if settings.peft == "prefix":
        model = add_adapters(base, settings)
    else:
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=list(settings.targets),
        )
        model = peft.get_peft_model(base, config)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for key, value in adapters.items():
            parameters[key].requires_grad_(True).copy_(value)
    if settings.train_ends:
        base.get_input_embeddings().requires_grad_(True)
        base.get_output_embeddings().requires_grad_(True)
    model.gates = None
    return model.eval()


@pytest.mark.parametrize("case", CASES, ids=name)
def test_without_quantization_it_is_the_training_of_one_process(case: dict[str, Any]) -> None:
    settings = SplitSettings(**case, **PLAIN)
    with serving(load(settings)) as server:
        model = client(settings, server)
        whole = whole_model(settings, copy.deepcopy(model.adapters).values())
        losses = train(model)
        model.close()
    torch.testing.assert_close(losses, train(whole), rtol=1e-5, atol=0.0)
    assert losses[-1] < losses[0] - 0.1
    trained = dict(whole.named_parameters())
    for key, value in model.adapters.values().items():
        torch.testing.assert_close(value, trained[key], rtol=1e-4, atol=1e-5)


SHAPE = {"vocab_size": 264, "bos_token_id": None, "eos_token_id": None}
FAMILIES = {
    "qwen2": {  # with tied ends, which are trained as one
        **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    },
    "gpt2": {"n_embd": 64, "n_layer": 1, "n_head": 4, "resid_pdrop": 0.5},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_from_a_folder(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **SHAPE, **FAMILIES[family])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    settings = SplitSettings(
        model=str(tmp_path),
        deployment="everything",
        targets=("c_attn",) if family == "gpt2" else ("q_proj",),
        train_ends=True,
        **PLAIN,
    )
    with serving(load(settings)) as server:
        model = client(settings, server)
        whole = whole_model(settings, copy.deepcopy(model.adapters).values())
        losses = train(model, 4)
        model.close()
    torch.testing.assert_close(losses, train(whole, 4), rtol=1e-5, atol=0.0)


def test_padding_is_masked_and_labels_are_the_callers() -> None:
    ids = batches()[0]
    mask = torch.ones_like(ids)
    mask[0, 10:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    found = []
    for case in CASES:
        settings = SplitSettings(**case, **PLAIN)
        with serving(load(settings)) as server, torch.no_grad():
            model = client(settings, server)
            whole = whole_model(settings, model.adapters.values())
            given = {"input_ids": ids, "labels": labels, "attention_mask": mask}
            found.append((model(**given).loss.item(), whole(**given).loss.item()))
            model.close()
    split, one = zip(*found, strict=True)
    torch.testing.assert_close(split, one, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("codec", ["bf16", "group", "channel", "aq_sgd", "amaq"])
def test_quantized_runs_train(codec: Any) -> None:
    for case in (CASES[0], CASES[4]):
        plain = SplitSettings(**case, **PLAIN)
        settings = SplitSettings(**case, codec=codec)
        losses = []
        for each in (plain, settings):
            with serving(load(each)) as server:
                model = client(each, server)
                losses.append(train(model))
                model.close()
        assert losses[1] != losses[0]
        assert abs(losses[1][-1] - losses[0][-1]) < 0.3 * abs(losses[0][-1] - losses[0][0])


def test_gates_learn_as_if_all_were_in_one_process() -> None:
    settings = SplitSettings(deployment="everything", codec="amaq", gradients="none")
    frozen = load(settings)
    with serving(frozen) as server:
        model = client(settings, server, learning_rate=0.1)
        adapters = copy.deepcopy(model.adapters)
        losses = train(model, 6)
        model.close()
    shapes = site_shapes(settings, frozen.packing, frozen.hidden_size)
    gates = ClientGates(shapes, settings, learning_rate=0.1)
    ends, packing = model.ends, frozen.packing
    optimizer = torch.optim.AdamW(adapters.parameters(), lr=1e-2)
    for step, expected in enumerate(losses):
        ids = batches()[step % 4]
        matrices = {
            key: adaptive_quantize(value.mT, gates.gates[key]).mT
            for key, value in packing.pack(adapters.values()).items()
        }
        embedded = adaptive_quantize(ends.model.embeddings(ids), gates.gates[EMBEDDED])
        hidden = frozen._call(matrices, "hidden", inputs_embeds=embedded, attention_mask=None)
        logits = ends.lm_head(adaptive_quantize(hidden, gates.gates[HIDDEN]))
        loss = ends.loss_function(logits=logits, labels=ids, vocab_size=logits.shape[-1])
        loss.backward()
        gates.optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert model.gates is not None
    for key, gate in gates.gates.items():
        torch.testing.assert_close(model.gates.gates[key].q, gate.q, rtol=1e-4, atol=1e-5)
        assert len(gate.q.unique()) > gate.q.numel() // 2  # each has learned something of its own
    assert model.gates.optimizer.mean < 7.5


@pytest.mark.parametrize("ranges", ["fitted", "full"])
def test_activations_have_the_ranges_of_the_settings_and_adapters_full_ones(ranges: Any) -> None:
    settings = SplitSettings(deployment="everything", codec="channel", bits=3, ranges=ranges)
    frozen = load(settings)
    shapes = site_shapes(settings, frozen.packing, frozen.hidden_size)
    sites = open_sites(shapes, settings)
    for name, shape in shapes.items():
        x = torch.randn(200, shape.num_lines)
        x = x.mT.contiguous() if shape.by_row else x
        decoded = sites[name].decode(sites[name].encode(x), x.shape)
        clipped = float((decoded - x).abs().max()) > 0.8
        assert clipped == (ranges == "fitted" and name in (EMBEDDED, HIDDEN))


def test_what_crosses_in_a_step_and_in_evaluation() -> None:
    settings = SplitSettings(deployment="everything", codec="amaq", bits=3)
    with serving(load(settings)) as server:
        model = client(settings, server)
        train(model, 1)
        ids = batches()[0]
        with torch.no_grad():
            model(input_ids=ids, labels=ids)
            model(input_ids=ids, labels=ids)
        traffic = model.link.traffic
        messages = {
            kind: count.messages for kind, count in {**traffic.sent, **traffic.received}.items()
        }
        sizes = {kind: count.tensor_nbytes for kind, count in traffic.sent.items()}
        lines = sum(shape.num_lines for shape in model.link._shapes.values())
        model.close()
    messages.pop("handshake")
    assert messages == {
        protocol.WIDTHS: 2,  # before and after the step, not once per batch
        protocol.ADAPTERS: 2,
        protocol.EMBEDDED: 3,
        protocol.HIDDEN: 3,
        protocol.HIDDEN_GRADIENT: 1,
        protocol.EMBEDDED_GRADIENT: 1,
        protocol.ADAPTER_GRADIENTS: 1,
        protocol.GATE_SUMS: 1,
    }
    assert sizes[protocol.WIDTHS] == 2 * lines // 2


def test_tokens_stay_with_the_client_in_everything() -> None:
    settings = SplitSettings(deployment="everything", **PLAIN)
    seen = []
    frozen = load(settings)
    forward = frozen.forward

    def note(*arguments: Any) -> Any:
        seen.append(arguments)
        return forward(*arguments)

    frozen.forward = note  # type: ignore[method-assign]
    with serving(frozen) as server:
        model = client(settings, server)
        train(model, 1)
        kinds = set(model.link.traffic.sent)
        model.close()
    assert kinds == {"handshake", protocol.ADAPTERS, protocol.EMBEDDED, protocol.HIDDEN_GRADIENT}
    ((_, embedded, mask, _),) = seen
    assert embedded.shape == (2, 16, 128)
    assert mask is None


def test_the_client_holds_what_it_owns_alone() -> None:
    for settings, ends in (
        (SplitSettings(**PLAIN), 0),
        (SplitSettings(deployment="everything", **PLAIN), 2 * 264 * 128),
    ):
        frozen = load(settings)
        with serving(frozen) as server:
            model = client(settings, server)
            adapters = sum(value.numel() for value in model.adapters.values().values())
            assert adapters == sum(rows * width for rows, width in frozen.packing.shapes.values())
            assert sum(value.numel() for value in model.parameters()) == adapters + ends
            base = model._peft[0].get_base_model()
            assert all(value.is_meta for key, value in base.named_parameters() if "lora" not in key)
            assert set(model.state_dict()) == {f"adapters.{key}" for key in model.adapters}
            model.load_state_dict(model.state_dict())  # strictly
            broken = dict(list(model.state_dict().items())[1:])
            with pytest.raises(RuntimeError, match="Missing key"):
                model.load_state_dict(broken)


def test_saved_adapters_are_those_of_peft(tmp_path: Path) -> None:
    for case in (CASES[0], CASES[3]):
        settings = SplitSettings(**case, **PLAIN)
        ids = batches()[0]
        with serving(load(settings)) as server, torch.no_grad():
            model = client(settings, server)
            expected = model(input_ids=ids, labels=ids).loss
            model.close()
        model.save_adapters(tmp_path / settings.peft)
        base = load_model(settings.model, read_config(settings.model), torch.float32)
        loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / settings.peft))
        assert loaded(input_ids=ids, labels=ids).loss.item() == pytest.approx(expected.item())


def test_two_clients_at_one_server_train_as_if_alone() -> None:
    for case in (CASES[0], CASES[1]):
        settings = SplitSettings(**case, codec="amaq")
        frozen = load(settings)
        alone, together = [], [[], []]
        with serving(frozen) as server:
            models = [client(settings, server, seed) for seed in (0, 1)]
            copies = [client(settings, server, seed) for seed in (0, 1)]
            alone = [train(model, 6) for model in models]

            def run(index: int, models: list[SplitModel] = copies, into: Any = together) -> None:
                into[index] += train(models[index], 6)

            threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for model in (*models, *copies):
                model.close()
        assert together == alone
        assert alone[0] != alone[1]


def test_the_server_computes_gradients_on_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a GPU may be waiting for this answer, in the backward pass of a client."""
    grad, seen = torch.autograd.grad, list[bool]()

    def noted(*args: Any, **options: Any) -> Any:
        seen.append(torch._C._is_multithreading_enabled())
        return grad(*args, **options)

    monkeypatch.setattr(torch.autograd, "grad", noted)
    settings = SplitSettings(peft="lora", deployment="everything")
    with serving(load(settings)) as server:
        model = client(settings, server)
        train(model, 1)
        model.close()
    assert seen == [False]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=name)
def test_on_a_gpu_it_is_the_training_of_a_cpu(case: dict[str, Any]) -> None:
    settings = SplitSettings(**case, codec="amaq")
    losses = []
    for device in ("cpu", "cuda"):
        frozen = FrozenModel(settings, torch.device(device))
        with serving(frozen) as server:
            model = client(settings, server).to(device)
            losses.append(train(model, 4))
            model.close()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=0.0)
