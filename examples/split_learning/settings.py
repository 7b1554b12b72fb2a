"""What both ends of split learning agree on before the first batch."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

Deployment = Literal["adapters", "everything"]
Peft = Literal["lora", "prefix"]
ForwardCodec = Literal["none", "bf16", "group", "channel", "aq_sgd", "amaq"]
GradientCodec = Literal["none", "bf16", "int8", "int6", "int5", "int4", "int3"]
Bits = Literal[4, 3]
Ranges = Literal["fitted", "full"]
Precision = Literal["float32", "bfloat16"]

DEFAULT_ADDRESS = "127.0.0.1:5600"
# What a configuration holds that says nothing about the model.
_INCIDENTAL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}


class OptionError(ValueError):
    """An option that cannot be used as it was given; the text says which, and what to do."""


@contextmanager
def starting() -> Iterator[None]:
    """Tell in one line what a package refuses while a program starts; later errors are bugs.

    Raises:
        OptionError: in place of the errors that name what was given.
    """
    try:
        yield
    except OptionError:
        raise
    except (ValueError, OSError, NotImplementedError, ImportError) as error:
        raise OptionError(" ".join(str(error).split())) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSettings:
    """What client and server have to be given alike.

    Attributes:
        model: a name on the Hugging Face hub, a local folder, or ``small``: a Llama of 1.2 million
            random weights, for tests and for a first try without a network.
        dtype: of the frozen weights, and of the activations that cross.
        deployment: ``adapters``: the client holds adapters only, and sends them with token ids and
            labels. ``everything``: it also holds the embeddings and the LM head; no token crosses.
        peft: LoRA, or prefix tuning.
        rank: of LoRA.
        alpha: strength of LoRA; updates are scaled by ``alpha / rank``.
        targets: names of the modules that LoRA adapts.
        virtual_tokens: of prefix tuning.
        codec: of adapters and activations. ``none`` sends them as they are. ``group``: integers
            with a scale and a minimum per 64 neighbours; ``channel``: per channel; ``aq_sgd``: the
            change since the last visit in such groups; ``amaq``: a trained width per channel.
        bits: of the codec; with ``amaq`` the mean that is aimed at.
        ranges: of activations with ``channel`` and ``amaq``: ``fitted`` to mean and deviation of a
            channel, or ``full``, from its minimum to its maximum. Those of adapters are full: their
            channels have few values, none of which is far off by chance.
        gradients: codec of gradients; integers in groups of 64. 4 bits cost no loss that could be
            measured, 3 bits 0.3% (benchmarks/split_gradients.py).
        train_ends: with ``everything``: also train embeddings and LM head, on the client.

    Raises:
        OptionError: a value or a combination that is not listed above.
    """

    model: str = "small"
    dtype: Precision = "float32"
    deployment: Deployment = "adapters"
    peft: Peft = "lora"
    rank: int = 16
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    virtual_tokens: int = 30
    codec: ForwardCodec = "amaq"
    bits: Bits = 4
    ranges: Ranges = "fitted"
    gradients: GradientCodec = "int4"
    train_ends: bool = False

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
        """Whether the client needs the gradient of what it sends into the trunk."""
        return self.everything and (self.train_ends or self.codec == "amaq")

    def agreement(self, model_config: Any, ends: str | None) -> dict[str, Any]:
        """Return what the handshake compares, plain data.

        The name of the model is left out, since a folder may have another one on each machine.

        Args:
            model_config: the ``PretrainedConfig``.
            ends: a digest of embeddings and head, where the client has them.
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
    "deployment": get_args(Deployment),
    "peft": get_args(Peft),
    "codec": get_args(ForwardCodec),
    "bits": get_args(Bits),
    "ranges": get_args(Ranges),
    "gradients": get_args(GradientCodec),
    "dtype": get_args(Precision),
}
_HELP = {
    "model": "name on the Hugging Face hub, a local folder, or 'small'",
    "dtype": "of frozen weights and activations",
    "deployment": "what the client holds: adapters, or embeddings and LM head as well",
    "peft": "kind of adapters",
    "rank": "of LoRA",
    "alpha": "of LoRA",
    "targets": "modules that LoRA adapts, separated by commas",
    "virtual_tokens": "of prefix tuning",
    "codec": "of adapters and activations",
    "bits": "of the codec",
    "ranges": "of channels of activations: fitted clips what is far off",
    "gradients": "codec of gradients",
    "train_ends": "also train embeddings and LM head, on the client",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that both programs take."""
    group = parser.add_argument_group("the same at both ends")
    for field in fields(SplitSettings):
        option, default = f"--{field.name.replace('_', '-')}", field.default
        text = _HELP[field.name]
        if isinstance(default, bool):
            group.add_argument(option, action="store_true", help=text)
        elif isinstance(default, tuple):
            group.add_argument(
                option, default=default, type=lambda names: tuple(names.split(",")), help=text
            )
        else:
            choices = _CHOICES.get(field.name)
            group.add_argument(
                option,
                type=type(default),
                default=default,
                choices=choices,
                help=f"{text} (default: {default})",
            )


def read_options(options: argparse.Namespace) -> SplitSettings:
    """Return what `add_options` read."""
    return SplitSettings(**{f.name: getattr(options, f.name) for f in fields(SplitSettings)})
