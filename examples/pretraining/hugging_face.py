"""Causal language models from Hugging Face transformers, with LoRA through peft."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jsonargparse.typing import PositiveInt
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceConfig:
    """The transformers model to train: options ``hf_*`` of ``CausalLM``."""

    config: str | None = None
    overrides: dict[str, Any] | None = None
    load_weights: bool = False
    save_to: str | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        if self.config is None and (self.load_weights or self.save_to or self.overrides):
            raise ValueError(
                "The other `--model.hf_` options need `--model.hf_config`, for example "
                "`--model.hf_config=llama`."
            )
        if self.load_weights and not Path(str(self.config)).is_dir():
            raise ValueError(
                f"`--model.hf_load_weights=true` needs a folder with weights, but "
                f"`--model.hf_config={self.config}` is not a folder. Save a model there with "
                "`--model.hf_save_to`, or leave the option out to start from random weights."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoRAConfig:
    """Low-rank adapters.

    Args:
        rank: Rank of the update of each adapted matrix.
        alpha: Strength of the update; it is scaled by ``alpha / rank``.
        target_modules: Names of the modules to adapt, or ``all-linear``.
    """

    rank: PositiveInt = 8
    alpha: float = 16.0
    target_modules: str | list[str] = "all-linear"


def _require(package: str, option: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"`{option}` needs the package `{package}`: `pip install '.[hf]'` in the checkout."
        )


def resolve_config(source: HuggingFaceConfig, vocab_size: int, block_size: int) -> Any:
    """Return the transformers config for the vocabulary and the longest sequence of the data."""
    _require("transformers", "--model.hf_config")
    from transformers import AutoConfig

    values = _read(str(source.config))
    own_vocabulary = source.load_weights and "vocab_size" in values
    if own_vocabulary and values["vocab_size"] < vocab_size:
        raise ValueError(
            f"The weights in '{source.config}' have a vocabulary of {values['vocab_size']}, the "
            f"data needs {vocab_size}. Use the tokenizer that the model was trained with: "
            "`--data.tokenizer=<folder>/tokenizer.json`."
        )
    if not own_vocabulary:
        values["vocab_size"] = vocab_size
        # The families' default special ids may lie outside of a small vocabulary.
        values |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    positions = max(block_size, int(values.get("max_position_embeddings", 0)))
    values |= source.overrides or {}
    values.setdefault("max_position_embeddings", positions)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.use_cache = False
    return config


def _read(source: str) -> dict[str, Any]:
    """Return the settings behind a model type, a path, or JSON text."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if source in CONFIG_MAPPING_NAMES:
        return {"model_type": source}
    text = source
    if not source.lstrip().startswith("{"):
        path = Path(source).expanduser()
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(
                f"`--model.hf_config={source}` is neither a model type that transformers "
                "knows (llama, gpt2, qwen3, ...), nor a folder or file with a config.json, nor "
                "JSON text. Nothing is downloaded: give a local path."
            )
        text = path.read_text()
    try:
        values: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"`--model.hf_config` is not valid JSON: {error}.") from error
    if values.get("model_type") not in CONFIG_MAPPING_NAMES:
        raise ValueError(
            f"`model_type={values.get('model_type')!r}` in `--model.hf_config` is unknown "
            "to the installed transformers. Use one such as 'llama', 'gpt2' or 'qwen3'."
        )
    return values


def build(
    source: HuggingFaceConfig, lora: LoRAConfig | None, vocab_size: int, block_size: int
) -> nn.Module:
    """Build a transformers model; with ``lora``, all weights but the adapters are frozen.

    Loaded weights are in fp32, random ones in the default dtype, which is bf16 with
    ``--trainer.precision=bf16-true``.
    """
    config = resolve_config(source, vocab_size, block_size)
    from transformers import AutoModelForCausalLM

    if source.load_weights:
        model = AutoModelForCausalLM.from_pretrained(
            source.config, config=config, dtype=torch.float32, local_files_only=True
        )
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype())
    model.train()  # `from_pretrained` returns models in evaluation mode
    return model if lora is None else _adapt(model, lora)


def _adapt(model: nn.Module, lora: LoRAConfig) -> nn.Module:
    _require("peft", "--model.lora")
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=int(lora.rank),
        lora_alpha=lora.alpha,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, settings)


def save(
    state: dict[str, Tensor],
    source: HuggingFaceConfig,
    lora: LoRAConfig | None,
    vocab_size: int,
    block_size: int,
) -> Path:
    """Write full, unsharded weights to ``source.save_to`` in Hugging Face format. Call on one rank.

    Sharding changes the class of the trained model, and the class name goes into ``config.json``,
    so the weights are put into a fresh model first. ``state`` is the state dict of the model that
    ``build`` returned for the other arguments.
    """
    from transformers import AutoModelForCausalLM

    config = resolve_config(source, vocab_size, block_size)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = model if lora is None else _adapt(model, lora)
    model.load_state_dict(state)
    folder = Path(str(source.save_to)).expanduser()
    model.save_pretrained(folder)
    return folder
