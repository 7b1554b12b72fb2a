"""Hugging Face models: whole on the server, their two ends or nothing on the client."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .settings import OptionError
from .wire import require

SMALL = "small"
_SMALL = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "vocab_size": 264,  # of bytes
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def read_config(name: str) -> Any:
    """Return the configuration of a model: a name on the hub, a folder, or ``small``."""
    require("transformers")
    from transformers import AutoConfig

    if name == SMALL:
        settings = {key: value for key, value in _SMALL.items() if key != "model_type"}
        return AutoConfig.for_model(_SMALL["model_type"], **settings)
    with _reading(name):
        return AutoConfig.from_pretrained(_path(name))


def load_model(name: str, config: Any, dtype: torch.dtype) -> nn.Module:
    """Return the whole model with its weights, frozen, in evaluation mode: without dropout."""
    from transformers import AutoModelForCausalLM

    if name == SMALL:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.no_grad():
            for parameter, value in model.named_parameters():
                value.copy_(_random(parameter, value))
    else:
        with _reading(name):
            model = AutoModelForCausalLM.from_pretrained(_path(name), config=config, dtype=dtype)
    return model.eval().requires_grad_(False)


def empty_model(config: Any, dtype: torch.dtype) -> nn.Module:
    """Return the model without memory for its weights, on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def load_ends(model: Any, name: str) -> None:
    """Give memory and weights to the embeddings and the LM head of an empty model.

    Reads these tensors alone, and of a model on the hub only the files that hold them.
    """
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    names = {id(value): key for key, value in model.named_parameters()}
    for end in ends:
        if end is None or any(True for _ in end.buffers()):
            raise NotImplementedError(
                f"The embeddings or the LM head of {type(model).__name__} are computed in a way "
                "that the client cannot take over. Use `--deployment adapters`."
            )
    places = [(end, key, value) for end in ends for key, value in end.named_parameters()]
    wanted = {names[id(value)]: value for _, _, value in places}
    loaded = _read_tensors(name, wanted)
    for end, key, value in places:
        weights = loaded[names[id(value)]].to(value.dtype)
        if weights.shape != value.shape:
            raise ValueError(
                f"'{name}' holds {names[id(value)]} of shape {tuple(weights.shape)}, but its "
                f"config.json says {tuple(value.shape)}."
            )
        # Tied ends share one tensor: `loaded` has it once, and `to` does not copy twice.
        loaded[names[id(value)]] = weights
        setattr(end, key, nn.Parameter(weights, requires_grad=False))
    if len(wanted) < len(places):
        ends[1].weight = ends[0].weight


def digest(*ends: nn.Module) -> str:
    """Return a digest of embeddings and LM head, by which models are told apart."""
    seen = hashlib.sha256()
    for end in ends:
        for weight in end.parameters():
            seen.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy())
    return seen.hexdigest()[:16]


def trunk_of(model: Any) -> nn.Module:
    """Return the module between the embeddings and the LM head."""
    trunk = getattr(model, str(getattr(model, "base_model_prefix", "")), None)
    if not isinstance(trunk, nn.Module) or trunk is model:
        raise NotImplementedError(
            f"{type(model).__name__} does not tell its trunk from its head. Use a causal language "
            "model of transformers such as Llama, Qwen or GPT-2."
        )
    return trunk


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise OptionError(
            f"`--model {name}` cannot be read. Give a folder with `config.json` that transformers "
            f"knows (on the server with weights, too), or a name on the hub. {reason}"
        ) from error


def _path(name: str) -> str:
    folder = Path(name).expanduser()
    return str(folder) if folder.is_dir() else name


def _random(name: str, like: Tensor) -> Tensor:
    """Return weights that depend on the name alone, so that each end can draw its own."""
    if like.dim() < 2:
        return torch.ones(like.shape)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(like.shape).normal_(0.0, 0.05, generator=generator)


def _read_tensors(name: str, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    if name == SMALL:
        return {key: _random(key, value) for key, value in wanted.items()}
    from safetensors import safe_open
    from transformers.utils import cached_file

    found = cached_file(
        _path(name), "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False
    )
    if found is None:
        files = dict.fromkeys(wanted, "model.safetensors")
    else:
        files = json.loads(Path(found).read_text())["weight_map"]
    loaded: dict[str, Tensor] = {}
    for file in sorted({files[key] for key in wanted if key in files}):
        with safe_open(str(cached_file(_path(name), file)), framework="pt") as tensors:
            held = set(tensors.keys()) & set(wanted)
            loaded |= {key: tensors.get_tensor(key) for key in held if files[key] == file}
    missing = sorted(set(wanted) - set(loaded))
    if missing:
        raise ValueError(f"'{name}' holds no {missing}. Save the model with transformers 5 again.")
    return loaded


def tokenizer_file(name: str) -> str:
    """Return the path of a model's tokenizer.json; ``byte`` for the built-in model."""
    if name == SMALL:
        return "byte"
    from transformers.utils import cached_file

    found = cached_file(_path(name), "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    if found is None:
        raise OptionError(
            f"`--model {name}` has no tokenizer.json: name one with `--tokenizer`, or "
            "`--tokenizer byte` for a model of bytes."
        )
    return str(found)
