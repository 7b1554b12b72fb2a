"""Settings that both ends of split learning must agree on."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

DEFAULT_ADDRESS = "127.0.0.1:5600"
# Parts of a configuration that say nothing about the model.
_INCIDENTAL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}


class OptionError(ValueError):
    """An option that cannot be used as it was given; the text says which, and what to do."""


@contextmanager
def starting() -> Iterator[None]:
    """Turn errors of packages while a program starts into OptionErrors; later ones are bugs."""
    try:
        yield
    except OptionError:
        raise
    except (ValueError, OSError, NotImplementedError, ImportError) as error:
        raise OptionError(" ".join(str(error).split())) from error


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSettings:
    """Settings that client and server must be given alike; each is an option of both programs.

    ``model="small"`` is a Llama of 1.2 million random weights, for tests and a first try without a
    network. Channels of adapters always have full ranges: they have few values, none of which is
    far off by chance.

    Raises:
        OptionError: a value or a combination that is not supported.
    """

    model: str = _option("small", "name on the Hugging Face hub, a local folder, or 'small'")
    dtype: Literal["float32", "bfloat16"] = _option(
        "float32", "dtype of frozen weights and of activations that cross"
    )
    deployment: Literal["adapters", "everything"] = _option(
        "adapters",
        "parts that the client holds: adapters, sent with token ids and labels; or embeddings and "
        "LM head as well, so that no token crosses",
    )
    peft: Literal["lora", "prefix"] = _option("lora", "LoRA or prefix tuning")
    rank: int = _option(16, "rank of LoRA")
    alpha: float = _option(16.0, "strength of LoRA: updates are scaled by alpha / rank")
    targets: tuple[str, ...] = _option(
        ("q_proj", "k_proj", "v_proj", "o_proj"), "modules that LoRA adapts, separated by commas"
    )
    virtual_tokens: int = _option(30, "length of a prefix")
    codec: Literal["none", "bf16", "group", "channel", "aq_sgd", "amaq"] = _option(
        "amaq",
        "code of adapters and activations: integers with a scale and a minimum per 64 neighbours "
        "(group) or per channel, changes since the last visit in such groups (aq_sgd), or a "
        "trained width per channel (amaq)",
    )
    bits: Literal[4, 3] = _option(4, "bits of the codec; with amaq the mean of the trained widths")
    ranges: Literal["fitted", "full"] = _option(
        "fitted",
        "ranges of activations with channel and amaq: fitted to mean and deviation of a channel, "
        "which clips outliers, or from minimum to maximum",
    )
    gradients: Literal["none", "bf16", "int8", "int6", "int5", "int4", "int3"] = _option(
        "int4", "codec of gradients; integers in groups of 64"
    )
    train_ends: bool = _option(False, "also train embeddings and LM head, on the client")

    def __post_init__(self) -> None:
        """Check every field."""
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise OptionError(
                    f"`--{name.replace('_', '-')} {getattr(self, name)}` is not supported; "
                    f"allowed: {', '.join(map(str, allowed))}."
                )
        for name in ("rank", "virtual_tokens"):
            if getattr(self, name) < 1:
                raise OptionError(
                    f"`--{name.replace('_', '-')} {getattr(self, name)}` must be at least 1."
                )
        if self.train_ends and self.deployment != "everything":
            raise OptionError(
                "`--train-ends` needs the embeddings and the LM head on the client: use it with "
                "`--deployment everything`."
            )

    @property
    def everything(self) -> bool:
        """Whether activations cross, rather than tokens."""
        return self.deployment == "everything"

    @property
    def input_gradient(self) -> bool:
        """Whether the client needs the gradient of the trunk's input."""
        return self.everything and (self.train_ends or self.codec == "amaq")

    def agreement(self, model_config: Any, ends: str | None) -> dict[str, Any]:
        """Return the plain data that is compared when a client connects.

        The name of the model is left out, since a folder may have another one on each machine.
        ``ends`` is a digest of embeddings and head, where the client has them.
        """
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"}
        shape = {k: v for k, v in model_config.to_diff_dict().items() if k not in _INCIDENTAL}
        text = json.dumps(shape, sort_keys=True, default=str)
        return own | {
            "targets": ", ".join(self.targets),
            "model_type": model_config.model_type,
            "model_config": hashlib.sha256(text.encode()).hexdigest()[:16],
            "ends": ends or "on the server",
        }


_CHOICES: dict[str, tuple[Any, ...]] = {
    name: get_args(hint)
    for name, hint in get_type_hints(SplitSettings).items()
    if get_origin(hint) is Literal
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that both programs take."""
    group = parser.add_argument_group("the same at both ends")
    for one in fields(SplitSettings):
        option: dict[str, Any] = {"default": one.default, "help": one.metadata["help"]}
        if isinstance(one.default, bool):
            option["action"] = "store_true"
        elif isinstance(one.default, tuple):
            option["type"] = lambda names: tuple(names.split(","))
        else:
            option |= {"type": type(one.default), "choices": _CHOICES.get(one.name)}
            option["help"] += f" (default: {one.default})"
        group.add_argument(f"--{one.name.replace('_', '-')}", **option)


def read_options(options: argparse.Namespace) -> SplitSettings:
    """Return the settings that `add_options` read."""
    return SplitSettings(**{one.name: getattr(options, one.name) for one in fields(SplitSettings)})
