"""`load_pretrained`: values, names that do not fit, and the memory that a rank needs."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lq_testing import run_ranks
from lq_testing.lightning_models import TinyModule, loader, trainer
from lq_testing.models import TinyLM
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from lq_lightning import QuantizedFSDPStrategy, QuantizedPipelineStrategy, load_pretrained
from lq_lightning.checkpoint.consolidate import consolidate_checkpoint
from lq_lightning.foundation.meta_start import check_values, initialize_meta_tensors

safetensors = pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file  # noqa: E402

CPU = torch.device("cpu")
WIDTH, LAYERS = 1501, 16
LAYER_NBYTES = 4 * WIDTH * WIDTH
BFLOAT16 = {"forward_codec": "bf16", "backward_codec": "bf16"}
MODEL_NBYTES = LAYERS * LAYER_NBYTES


def _save(folder: Path, tensors: dict[str, Tensor], files: int = 1) -> Path:
    """Write tensors as Hugging Face does, into several files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {name: f"part{i % files}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        part = {name: t for name, t in tensors.items() if weight_map[name] == file}
        save_file(part, folder / file)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


def _meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def _values(make: Callable[[], nn.Module]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: t.detach().clone() for name, t in make().state_dict().items()}


# --- ranks ----------------------------------------------------------------------------------------


class Pretrained(TinyModule):
    """Tied weights, of which the file has one name; uneven shards, and ranks that own nothing."""

    def __init__(self, root: str, shard: bool = False) -> None:
        super().__init__(layers=4, tied=True)
        self.root, self.shard = root, shard
        del self.net

    def configure_model(self) -> None:
        self.net = _meta(lambda: TinyLM(layers=4, tied=True))
        if self.shard:
            for block in self.net.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
        load_pretrained(self.net, f"{self.root}/tiny")

    def on_fit_start(self) -> None:
        self.start = {name: p.detach().clone() for name, p in self.net.named_parameters()}


def _starts_with_the_values_of_the_file(
    root: str, make_strategy: Callable[[], Any], **options: Any
) -> None:
    module = Pretrained(root, **options)
    run = trainer(make_strategy(), root, use_distributed_sampler=False)
    run.fit(module, loader(8))
    saved = torch.load(f"{root}/tiny.pt")
    for name, value in module.start.items():
        expected = saved["embed.weight" if name == "head.weight" else name].to(torch.float32)
        if isinstance(value, DTensor):
            expected = distribute_tensor(expected, value.device_mesh, value.placements).to_local()
            value = value.to_local()
        assert torch.equal(value, expected), name
    kind = type(run.strategy).__name__
    if kind.startswith("Quantized"):
        run.save_checkpoint(f"{root}/{kind}.ckpt")
    if kind == "QuantizedFSDPStrategy":  # a checkpoint comes after what is pretrained
        restored = Pretrained(root)
        trainer(make_strategy(), root, max_epochs=2, use_distributed_sampler=False).fit(
            restored, loader(8), ckpt_path=f"{root}/{kind}.ckpt"
        )
        assert not torch.equal(restored.start["tiny"], module.start["tiny"])


class Wide(TinyModule):
    """Large enough to tell a shard from the whole model by its memory."""

    def __init__(self, path: str, meta: bool) -> None:
        super().__init__()
        self.path, self.meta = path, meta
        del self.net

    def configure_model(self) -> None:
        def make() -> nn.Module:
            return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

        self.net = _meta(make) if self.meta else make()
        load_pretrained(self.net, self.path)

    def on_fit_start(self) -> None:
        for parameter in self.net.parameters():
            assert torch.all(parameter.to_local() == 1)  # type: ignore[operator]


def _anonymous_nbytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status).group(1))  # type: ignore[union-attr]


@contextmanager
def _peak() -> Iterator[list[int]]:
    """How many bytes of memory were used at once that are no file's; the only entry, at the end."""
    peak, before, done = [0], _anonymous_nbytes(), threading.Event()

    def watch() -> None:
        while not done.wait(0.0005):
            peak[0] = max(peak[0], _anonymous_nbytes() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def _ranks(rank: int, world: int, root: str) -> dict[bool, int]:
    peaks = {}
    for meta in (True, False):
        run = trainer(QuantizedFSDPStrategy(), root, max_steps=0)
        module = Wide(f"{root}/wide.safetensors", meta)
        with _peak() as peak:
            run.fit(module, loader(8))
        peaks[meta] = peak[0]
    run.save_checkpoint(f"{root}/wide.ckpt", weights_only=True)
    _starts_with_the_values_of_the_file(root, QuantizedFSDPStrategy)
    _starts_with_the_values_of_the_file(root, partial(QuantizedPipelineStrategy, **BFLOAT16))
    stock = partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1)
    _starts_with_the_values_of_the_file(root, stock, shard=True)
    return peaks


def test_ranks_read_their_shards_and_stages(tmp_path: Path) -> None:
    tensors = {name: t.bfloat16() for name, t in _values(lambda: TinyLM(layers=4)).items()}
    del tensors["head.weight"]
    torch.save(tensors, tmp_path / "tiny.pt")
    _save(tmp_path / "tiny", tensors, files=2)
    one = torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16)
    save_file({f"{i}.weight": one.clone() for i in range(LAYERS)}, tmp_path / "wide.safetensors")
    for peaks in run_ranks(_ranks, 2, str(tmp_path), backend=None, torchrun=True, timeout=120.0):
        slack = 2 * LAYER_NBYTES
        assert peaks[True] < MODEL_NBYTES / 2 + slack, peaks
        assert peaks[False] > MODEL_NBYTES - slack, peaks

    for kind in ("QuantizedFSDPStrategy", "QuantizedPipelineStrategy"):
        exported = tmp_path / f"{kind}.safetensors"
        consolidate_checkpoint(tmp_path / f"{kind}.ckpt", exported, "safetensors", prefix="net.")
        assert load_file(exported).keys() == tensors.keys()  # tied weights once
        with safetensors.safe_open(exported, "pt") as file:
            assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
        consolidate_checkpoint(tmp_path / f"{kind}.ckpt", tmp_path / "one.ckpt")
        state = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
        assert state["net.head.weight"].data_ptr() == state["net.embed.weight"].data_ptr()
        assert all(torch.equal(t, state[f"net.{n}"]) for n, t in load_file(exported).items())
    with _peak() as peak:
        consolidate_checkpoint(
            tmp_path / "wide.ckpt", tmp_path / "wide2.safetensors", "safetensors"
        )
    assert peak[0] < MODEL_NBYTES / 2, peak  # one shard, as it is read
    assert {bool(t.eq(1).all()) for t in load_file(tmp_path / "wide2.safetensors").values()} == {
        True
    }


# --- one process ----------------------------------------------------------------------------------


def _tied() -> TinyLM:
    return TinyLM(tied=True)


def test_the_file_may_have_either_name_of_tied_weights_or_both(tmp_path: Path) -> None:
    values = _values(_tied)
    for dropped in ("head.weight", "embed.weight", None):
        stored = {name: t for name, t in values.items() if name != dropped}
        module = _meta(_tied)
        load_pretrained(module, _save(tmp_path / str(dropped), stored) / "model.safetensors")
        module = copy.deepcopy(module)  # as callbacks do it that average weights
        initialize_meta_tensors(module, CPU)
        check_values(module)
        assert module.head.weight is module.embed.weight
        assert not any("reset_parameters" in m.__dict__ for m in module.modules())  # once
        assert all(torch.equal(t, values[n]) for n, t in module.state_dict().items())
    stored["head.weight"] = stored["head.weight"] + 1
    path = _save(tmp_path / "differ", stored)
    with pytest.raises(ValueError, match=r"`embed.weight` and `head.weight` differ.*tied"):
        load_pretrained(_meta(_tied), path)
    module = _meta(TinyLM)  # not tied: no trouble
    load_pretrained(module, path)


def test_tensors_of_other_modules_do_not_overwrite_what_was_loaded(tmp_path: Path) -> None:
    """The head, which shares the weight of the embedding, is not in what is loaded."""
    values = _values(_tied)
    module = _meta(_tied)
    load_pretrained(module.embed, _save(tmp_path, {"weight": values["embed.weight"]}))
    initialize_meta_tensors(module, CPU)
    assert torch.equal(module.head.weight, values["embed.weight"])
    assert module.blocks[0].norm.weight.eq(1).all()  # those that are not loaded start as usual


def _change(values: dict[str, Tensor], **changes: Any) -> dict[str, Tensor]:
    changed = {**values, **{name.replace("__", "."): t for name, t in changes.items()}}
    return {name: t for name, t in changed.items() if t is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tiny": None}, r"1 that only the module has \(`tiny`\)\. Pass the module"),
        ({"new": torch.ones(1)}, r"1 that only the files have \(`new`\)"),
        ({"tiny": None, "new": torch.ones(1)}, r"`tiny`\) and 1 that only .*`new`"),
        ({"head__weight": torch.ones(2, 3)}, r"`head.weight` has the shape \(2, 3\).*\(31, 24\)"),
        ({"tiny": torch.ones(1, dtype=torch.int8)}, r"`tiny` is stored as torch.int8 .*float32"),
        ({"tiny": torch.ones(1).to(torch.float8_e4m3fn)}, "`tiny` is stored as torch.float8_e4m3f"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: Any, message: str) -> None:
    path = _save(tmp_path, _change(_values(TinyLM), **changes), files=2)
    module = _meta(TinyLM)
    with pytest.raises(ValueError, match=message):
        load_pretrained(module, path)
    assert not any("reset_parameters" in m.__dict__ for m in module.modules())


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    values = _values(TinyLM)
    path = _save(tmp_path, _change(values, head__weight=None, new=torch.ones(1)))
    module = _meta(TinyLM)
    with pytest.warns(UserWarning, match=r"`head.weight`\) and .*`new`.* initialized as usual"):
        load_pretrained(module, path, strict=False)
    real = TinyLM()
    before = real.head.weight.detach().clone()
    with pytest.warns(UserWarning, match="do not fit `TinyLM`"):
        load_pretrained(real, path, strict=False)
    initialize_meta_tensors(module, CPU)
    check_values(module)
    assert 0.01 < module.head.weight.std() < 1
    assert torch.equal(real.head.weight, before)
    for each in (module, real):
        same = [
            n for n, t in each.state_dict().items() if n in values and torch.equal(t, values[n])
        ]
        assert set(same) == values.keys() - {"head.weight"}
    with pytest.raises(ValueError, match=r"only the module has .*, \.\.\."):
        load_pretrained(_meta(TinyLM), _save(tmp_path / "x", {"a": torch.ones(1)}), strict=False)


def test_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no `user/model`.*snapshot_download"):
        load_pretrained(_meta(TinyLM), "user/model")
    with pytest.raises(FileNotFoundError, match="has neither `model.safetensors` nor.*GGUF"):
        load_pretrained(_meta(TinyLM), tmp_path)
    path = _save(tmp_path, _values(TinyLM), files=3)
    (path / "part1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="not beside it: part1.safetensors. The download"):
        load_pretrained(_meta(TinyLM), path)
    index = path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ValueError, match="is no index of safetensors files: KeyError"):
        load_pretrained(_meta(TinyLM), index)
    (path / "model.safetensors").write_bytes((path / "part0.safetensors").read_bytes()[:-1])
    with pytest.raises(ValueError, match="is no safetensors file, or damaged"):
        load_pretrained(_meta(TinyLM), path)


def test_placements_that_are_no_rows_are_refused(tmp_path: Path) -> None:
    run_ranks(_strided, 1, str(_save(tmp_path, {"weight": torch.ones(8, 4)})))


def _strided(rank: int, world: int, path: str) -> None:
    mesh = init_device_mesh("cpu", (1,))
    module = nn.Linear(4, 8, bias=False)
    local = torch.zeros(8, 4)
    for placement, fits in ((Shard(1), True), (_StridedShard(0, split_factor=2), False)):
        module.weight = nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False))
        if fits:
            load_pretrained(module, path)
            assert local.eq(1).all()
            continue
        with pytest.raises(NotImplementedError, match="is placed as .*StridedShard"):
            load_pretrained(module, path)


def _llama(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**shape, **heads, **options)
    )


@pytest.mark.parametrize("tied", [True, False])
def test_hugging_face_models_compute_the_same(tied: bool, tmp_path: Path) -> None:
    model = _llama(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    module = _meta(lambda: _llama(tie_word_embeddings=tied))
    load_pretrained(module, tmp_path)
    initialize_meta_tensors(module, CPU)
    check_values(module)  # frequencies of the rotary embedding, too, which are in no file
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(module(tokens).logits, model(tokens).logits)
    assert (module.lm_head.weight is module.model.embed_tokens.weight) == tied


def test_adapters_on_the_meta_device_change_nothing_at_first(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = _llama()
    model.save_pretrained(tmp_path)
    base = _meta(_llama)
    load_pretrained(base, tmp_path)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear"))
    initialize_meta_tensors(adapted, CPU)
    check_values(adapted)
    adapters = {n: p for n, p in adapted.named_parameters() if "lora_" in n}
    assert all(p.eq(0).all() == ("lora_B" in n) for n, p in adapters.items())
    assert len(adapters) == 2 * 14
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(adapted(tokens).logits, model(tokens).logits)
    for adapter in adapters.values():
        adapter.data.fill_(0.5)
    saved = {name: t.clone() for name, t in adapted.state_dict().items()}
    base = _meta(_llama)
    again = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear"))
    load_pretrained(again, _save(tmp_path / "adapted", saved))
    initialize_meta_tensors(again, CPU)
    assert all(torch.equal(t, saved[name]) for name, t in again.state_dict().items())


class Parent(nn.Module):
    """Initializes its child, and owns a buffer that is in no file."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(3, 3)
        self.register_buffer("scale", torch.zeros(1), persistent=False)

    def reset_parameters(self) -> None:
        self.child.reset_parameters()
        self.scale.fill_(2)


def test_modules_that_initialize_their_children_do_not_use_up_the_files(tmp_path: Path) -> None:
    values = _values(Parent)
    module = _meta(Parent)
    load_pretrained(module, _save(tmp_path, values))
    with pytest.raises(RuntimeError, match=r"`Linear.reset_parameters\(\)` was called on the meta"):
        module.reset_parameters()
    initialize_meta_tensors(module, CPU)
    assert torch.equal(module.child.weight, values["child.weight"])
    assert module.scale == 2
    module.reset_parameters()  # from here on as usual
    assert not torch.equal(module.child.weight, values["child.weight"])


def test_what_no_longer_fits_when_memory_comes_is_refused(tmp_path: Path) -> None:
    path = _save(tmp_path, {**_values(_tied), "head.weight": torch.ones(31, 24)})
    module = _meta(TinyLM)
    load_pretrained(module, path)
    module.head.weight = module.embed.weight  # whose values?
    with pytest.raises(ValueError, match="`embed.weight` and `head.weight` are one tensor .* now"):
        initialize_meta_tensors(module, CPU)
    linear = _meta(lambda: nn.Linear(3, 4))
    load_pretrained(linear, _save(tmp_path / "linear", _values(lambda: nn.Linear(3, 4))))
    linear.weight = nn.Parameter(torch.empty(2, 3, device="meta"))
    with pytest.raises(ValueError, match=r"shape \(4, 3\) .* \(2, 3\) in the module, though"):
        initialize_meta_tensors(linear, CPU)
    _save(tmp_path / "linear", {"weight": torch.ones(1, 3), "bias": torch.ones(1)})
    linear = _meta(lambda: nn.Linear(3, 1))
    load_pretrained(linear, tmp_path / "linear")
    _save(tmp_path / "linear", {"weight": torch.ones(4, 3), "bias": torch.ones(4)})
    with pytest.raises(ValueError, match=r"shape \(4, 3\) .* \(1, 3\) in the module, though"):
        initialize_meta_tensors(linear, CPU)


def test_weights_that_have_values_keep_them(tmp_path: Path) -> None:
    linear = _meta(lambda: nn.Linear(3, 4))
    values = _values(lambda: nn.Linear(3, 4))
    load_pretrained(linear, _save(tmp_path, values))
    linear.weight = nn.Parameter(torch.zeros(4, 3))
    initialize_meta_tensors(linear, CPU)
    check_values(linear)
    assert linear.weight.eq(0).all()
    assert torch.equal(linear.bias, values["bias"])


def test_heads_tied_after_the_load_are_not_initialized_again(tmp_path: Path) -> None:
    model = _llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    module = _meta(lambda: _llama(tie_word_embeddings=False))
    with pytest.warns(UserWarning, match="lm_head"):
        load_pretrained(module, tmp_path, strict=False)
    module.lm_head.weight = module.model.embed_tokens.weight
    initialize_meta_tensors(module, CPU)
    assert torch.equal(module.lm_head.weight, model.lm_head.weight)
