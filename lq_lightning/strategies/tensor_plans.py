"""``tensor_parallel="auto"``: what is split over tensor-parallel ranks, from the model's own plan.

A plan names linear layers whose rows or columns are split, as Hugging Face models bring one. This
module adds what such plans leave out, where the structure of the model allows it:

- The vocabulary: embedding and head are split, and logits stay so (``sharded_logits.py``).
- The tokens: between a layer's attention and MLP each rank has its share of the tokens. The first
  layer's input is cut, norms run on shares, attention and MLP gather their input and scatter their
  output, and the last norm's output is gathered. What lies outside of the layers sees all tokens.
"""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lq_lightning._compat.tensor_parallel import hugging_face_plan
from lq_lightning.foundation.agreement import broadcast_module_states, check_alike
from lq_lightning.strategies.sharded_logits import ShardedLogits
from lq_lightning.strategies.token_shares import (
    COLUMNS,
    COLUMNS_GATHERED,
    LAYER_NUMBER,
    ROWS,
    ROWS_OF_WHOLE,
    Proof,
    SplitLayers,
    TokenShares,
    find_layers,
    whole,
)

PROTOCOL = "tensor_parallel_plan"
_PARTIAL_NORM = "replicated_with_grad_allreduce"
_EMBEDDING = "embedding_rowwise"
_SPLIT = (COLUMNS, ROWS, *COLUMNS_GATHERED, *ROWS_OF_WHOLE)
_STYLES = (*_SPLIT, _PARTIAL_NORM, _EMBEDDING, "replicate")
_EXAMPLE = f"""
    def {PROTOCOL}(self):  # names of submodules to styles, as in Hugging Face configs
        return {{"embedding": "{_EMBEDDING}", "head": "{COLUMNS_GATHERED[0]}",
                "blocks.*.attention.q_proj": "{COLUMNS}",  # and k_proj, v_proj
                "blocks.*.attention.o_proj": "{ROWS}",
                "blocks.*.mlp.up": "{COLUMNS}", "blocks.*.mlp.down": "{ROWS}"}}
"""


class TensorParallelPlan(NamedTuple):
    """What was split, and how.

    Attributes:
        styles: Style of each module that was given one, by its name in the module.
        tokens: Names of the models whose layers work on shares of the tokens; equal on all stages
            of a pipeline, or its stages exchange tensors of different shapes.
        vocabulary: Names of embeddings and heads that are split along the vocabulary.
        notes: What was left whole although it could be split, and why.
    """

    styles: Mapping[str, str]
    tokens: tuple[str, ...]
    vocabulary: tuple[str, ...]
    notes: tuple[str, ...]

    def summary(self) -> str:
        """Describe the plan for people, one line per kind."""
        kinds: dict[str, set[str]] = defaultdict(set)
        for name, style in self.styles.items():
            kinds[style].add(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name))
        lines = [f"{style}: {', '.join(sorted(names))}" for style, names in sorted(kinds.items())]
        lines.append(f"tokens split between layers: {', '.join(self.tokens) or 'no'}")
        lines.append(f"vocabulary split: {', '.join(self.vocabulary) or 'no'}")
        return "\n".join(["tensor_parallel='auto':", *(f"  {x}" for x in (*lines, *self.notes))])


class Draft(NamedTuple):
    """What will be done to a model of a module, by names within it: all checks have passed."""

    name: str
    styles: Mapping[str, str | ParallelStyle]
    vocabulary: tuple[str, ...]
    splits_tokens: bool
    notes: tuple[str, ...]


def draft_plans(module: nn.Module, ranks: int, *, owner: str) -> tuple[Draft, ...]:
    """Decide what of a whole module is split; to be asked before a pipeline cuts it.

    A stage alone does not know whether the head that it has is tied to an embedding, or whether
    the last norm is missing elsewhere.

    Args:
        module: Contains Hugging Face models, or modules with a method ``tensor_parallel_plan()``
            that returns names of submodules (``*`` is any one part) with Hugging Face's style
            names; or with torch's ``ParallelStyle``s, which are then applied as they are.
        ranks: Ranks of the tensor-parallel axis.
        owner: Who asks, for errors: the class of the strategy.

    Raises:
        ValueError: A size is not a multiple of the number of ranks.
        NotImplementedError: There is no plan, or it has a style without an equivalent.
    """
    models = list(_models(module))
    if not models:
        raise NotImplementedError(
            f'`{owner}(tensor_parallel="auto")` found no plan in `{type(module).__name__}`. '
            "Hugging Face models bring one if their config has a `base_model_tp_plan`. Give your "
            f"model a method:\n{_EXAMPLE}\nor call `parallelize_module` in `configure_model`."
        )
    return tuple(_draft(name, model, ranks, owner) for name, model in models)


def parallelize_automatically(
    module: nn.Module, mesh: DeviceMesh, drafts: Sequence[Draft]
) -> TensorParallelPlan:
    """Split the models in a module over tensor-parallel ranks, before ``fully_shard``.

    All ranks of the mesh call this with the same module, which may lack layers of other pipeline
    stages and may be on the meta device. Values of the mesh's first rank are taken.

    Args:
        module: The module.
        mesh: The tensor-parallel axis.
        drafts: Result of :func:`draft_plans` for the whole module.
    """
    check_alike(module, mesh.get_group())
    broadcast_module_states(module, parameters=True, group=mesh.get_group())
    return _apply(module, mesh, [_part(module, draft) for draft in drafts])


class _Part(NamedTuple):
    """What of a draft concerns the modules that are here."""

    name: str
    model: nn.Module
    styles: Mapping[str, str | ParallelStyle]
    vocabulary: tuple[str, ...]
    layers: SplitLayers | None
    notes: tuple[str, ...]


def _part(module: nn.Module, draft: Draft) -> _Part:
    model = module.get_submodule(draft.name)
    here = {name for name, each in model.named_modules() if not hasattr(each, "absent_name")}
    styles = {name: style for name, style in draft.styles.items() if name in here}
    vocabulary = tuple(name for name in draft.vocabulary if name in here)
    layers = find_layers(model, styles) if draft.splits_tokens else None
    if isinstance(layers, str):
        raise AssertionError(f"the whole model can split tokens, but a part cannot: {layers}")
    return _Part(draft.name, model, styles, vocabulary, layers, draft.notes)


def _models(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Outermost modules that bring a plan."""
    transformers: Any = sys.modules.get("transformers")
    found: list[str] = []
    for name, child in module.named_modules():
        if any(name.startswith(f"{other}.") or not other for other in found):
            continue
        hugging_face = transformers is not None and isinstance(child, transformers.PreTrainedModel)
        if hasattr(child, PROTOCOL) or hugging_face:
            found.append(name)
            yield name, child


def _draft(name: str, model: nn.Module, ranks: int, owner: str) -> Draft:
    who = f'`{owner}(tensor_parallel="auto")`: `{type(model).__name__}`'
    own = getattr(model, PROTOCOL, None)
    plan = own() if callable(own) else own
    styles = _expand(model, plan or hugging_face_plan(model), who, strict=bool(plan))
    if any(isinstance(style, ParallelStyle) for style in styles.values()):
        if not all(isinstance(style, ParallelStyle) for style in styles.values()):
            raise ValueError(f"{who} mixes names of styles with torch's styles in its plan.")
        return Draft(name, styles, (), False, ())
    if not any(style in _SPLIT and LAYER_NUMBER.match(n) for n, style in styles.items()):
        raise NotImplementedError(
            f"{who} brings no plan for its layers. Give it a method (in a subclass):\n{_EXAMPLE}\n"
            "or call `parallelize_module` in `configure_model` and leave `tensor_parallel` out."
        )
    vocabulary, notes = _vocabulary(model, styles, ranks)
    for part in vocabulary:
        embedding = isinstance(model.get_submodule(part), nn.Embedding)
        styles[part] = _EMBEDDING if embedding else "vocabulary head"
    _check_sizes(model, styles, ranks, who)
    found = find_layers(model, styles)
    whole_tokens = isinstance(found, str)
    if whole_tokens:
        notes.append(f"all ranks have all tokens of `{type(model).__name__}`: {found}")
    return Draft(name, styles, tuple(vocabulary), not whole_tokens, tuple(notes))


def _with_parameters(model: nn.Module) -> dict[str, Any]:
    named = model.named_modules()
    return {name: m for name, m in named if next(m.parameters(), None) is not None}


def _expand(model: nn.Module, plan: Mapping[str, Any], who: str, *, strict: bool) -> dict[str, Any]:
    """Styles of the modules that are here, by name; parameters and unknown styles are refused."""
    modules, styles = _with_parameters(model), dict[str, Any]()
    names = [*modules, *(name for name, _ in model.named_parameters())]
    everywhere = [name for name, _ in model.named_modules()]
    for pattern, style in plan.items():
        matches = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")).fullmatch
        torch_style = isinstance(style, ParallelStyle)
        found = list(filter(matches, everywhere if torch_style else names))
        if not found and strict:
            raise ValueError(f"{who}: `{pattern}` of its plan names nothing in the model.")
        for name in found:
            if torch_style:
                styles[name] = style
                continue
            if name not in modules or style not in _STYLES:
                raise NotImplementedError(
                    f"{who} splits `{name}` by the style `{style}`, which is not translated "
                    "(experts, packed weights and latent attention). Call `parallelize_module` in "
                    "`configure_model` for this model and leave `tensor_parallel` out."
                )
            plain = type(modules[name]).forward is nn.Linear.forward
            if style in _SPLIT and not (plain and modules[name].weight.is_floating_point()):
                raise NotImplementedError(
                    f"{who} splits `{name}`, which is a `{type(modules[name]).__name__}` here and "
                    "no plain `nn.Linear` (adapters and quantized layers are not split)."
                )
            styles[name] = style
    _check_between(model, styles, who)
    return {name: style for name, style in styles.items() if style != "replicate"}


def _check_between(model: nn.Module, styles: Mapping[str, Any], who: str) -> None:
    """Refuse parameters between columns and rows: each rank's gradient is of its columns alone."""
    for name, style in styles.items():
        parent = name.rpartition(".")[0]
        for key, child in model.get_submodule(parent).named_children() if style == COLUMNS else ():
            path = f"{parent}.{key}"
            linear_or_norm = isinstance(child, nn.Linear) or "norm" in type(child).__name__.lower()
            if path not in styles and not linear_or_norm and list(child.parameters(recurse=False)):
                raise NotImplementedError(
                    f"{who} has a plan without `{path}`, which has parameters beside split layers. "
                    f'Name it: "{_PARTIAL_NORM}" if it sees split columns, "replicate" if not.'
                )


def _vocabulary(
    model: nn.Module, styles: dict[str, str], ranks: int
) -> tuple[list[str], list[str]]:
    """Embeddings and heads to split; styles of those that stay whole are dropped."""
    modules = _with_parameters(model)
    inputs = _input_embedding(model)
    embeddings = [
        name
        for name, m in modules.items()
        if isinstance(m, nn.Embedding) and (m is inputs or styles.get(name) == _EMBEDDING)
    ]
    weights = {modules[name].weight for name in embeddings}
    sizes: set[Any] = {modules[name].num_embeddings for name in embeddings}
    config: Any = getattr(model, "config", None)
    if not sizes and hasattr(config, "get_text_config"):
        sizes = {getattr(config.get_text_config(), "vocab_size", None)}
    heads = [
        name
        for name, m in modules.items()
        if isinstance(m, nn.Linear)
        and (
            m.weight in weights
            or styles.get(name) in (*COLUMNS_GATHERED, *ROWS_OF_WHOLE)
            and not LAYER_NUMBER.match(name)
            and (m.out_features in sizes or hasattr(model, PROTOCOL))
        )
    ]
    chosen, notes = [*embeddings, *heads], list[str]()
    for name in chosen:
        m, why = modules[name], ""
        rows = m.weight.shape[0]
        if rows % ranks:
            why = f"{rows} rows are not a multiple of {ranks}; pad the vocabulary to split it"
        elif isinstance(m, nn.Embedding) and (
            m.max_norm is not None or m.scale_grad_by_freq or m.sparse
        ):
            why = "max_norm, scale_grad_by_freq and sparse need all rows"
        if why:
            notes.append(f"`{name}` is whole on all ranks: {why}")
            break
    for name in chosen:
        styles.pop(name, None)
    return ([] if notes else chosen), notes


def _input_embedding(model: nn.Module) -> nn.Module | None:
    try:
        found: nn.Module | None = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    return found


def _check_sizes(model: nn.Module, styles: Mapping[str, str], ranks: int, who: str) -> None:
    """Refuse sizes that do not divide, all at once."""
    counts: dict[str, int] = {}
    for name, style in styles.items():
        m: Any = model.get_submodule(name)
        parent: Any = model.get_submodule(name.rpartition(".")[0])
        generic = re.sub(r"\.\d+\.", ".*.", name)
        if style in (ROWS, *ROWS_OF_WHOLE):
            counts[f"input features of `{generic}`"] = m.in_features
        elif style in (COLUMNS, *COLUMNS_GATHERED):
            counts[f"output features of `{generic}`"] = m.out_features
        if style != COLUMNS or "atten" not in type(parent).__name__.lower():
            continue
        head = getattr(parent, "head_dim", getattr(parent, "head_size", None))
        if isinstance(head, int) and m.out_features % head == 0:
            counts[f"heads of `{generic}`"] = m.out_features // head
        config: Any = getattr(parent, "config", None)
        for key in ("num_attention_heads", "num_key_value_heads"):
            value = getattr(config, key, None)
            if isinstance(value, int):
                counts[f"`{key}`"] = value
    bad = [f"{n} {label}" for label, n in counts.items() if n % ranks]
    if bad:
        common = math.gcd(*counts.values())
        allowed = [str(n) for n in range(1, common + 1) if common % n == 0]
        raise ValueError(
            f"{who} has {', '.join(bad)}, which {ranks} tensor-parallel ranks cannot share "
            f"equally. Use `tensor_parallel_size` {' or '.join(allowed)}."
        )


def _apply(module: nn.Module, mesh: DeviceMesh, parts: list[_Part]) -> TensorParallelPlan:
    ties = defaultdict(list)
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            ties[parameter].append((child, name))
    styles: dict[str, str] = {}
    for part in parts:
        tokens = part.layers and TokenShares(mesh, part.layers)
        for layer in () if tokens else _first_layers(part):
            layer.register_forward_pre_hook(Proof(layer, mesh), with_kwargs=True)
        for name, style in part.styles.items():
            _split(part.model.get_submodule(name), style, mesh, tokens)
            styles[".".join(filter(None, (part.name, name)))] = str(style)
        if part.layers and tokens:
            tokens.install(part.layers)
        if any(isinstance(style, ParallelStyle) for style in part.styles.values()):
            part.model.register_forward_hook(_plain_output)
    for old, places in ties.items():
        new = getattr(*places[0])
        new.requires_grad_(old.requires_grad)
        new.__dict__.update(old.__dict__)
        for child, name in places[1:]:
            setattr(child, name, new)
    prefixed = [(f"{part.name}." if part.name else "", part) for part in parts]
    return TensorParallelPlan(
        styles,
        tuple(part.name or type(part.model).__name__ for part in parts if part.layers),
        tuple(prefix + name for prefix, part in prefixed for name in part.vocabulary),
        tuple(note for part in parts for note in part.notes),
    )


def _first_layers(part: _Part) -> Iterator[nn.Module]:
    """First layers of all lists, unless torch's styles may give them parts of their input."""
    named = [n for n, style in part.styles.items() if not isinstance(style, ParallelStyle)]
    for start in {m.group() for m in map(LAYER_NUMBER.match, named) if m}:
        if re.fullmatch(r"(?:.*\.)?0\.", start):
            yield part.model.get_submodule(start[:-1])


def _split(
    module: nn.Module, style: str | ParallelStyle, mesh: DeviceMesh, tokens: TokenShares | None
) -> None:
    """Apply a style to a module, with the hooks that torch's own has not."""
    buffers = dict(module.named_buffers(recurse=False))
    parallel: ParallelStyle
    if isinstance(style, ParallelStyle):
        parallel = style
    elif style == _EMBEDDING:
        parallel = RowwiseParallel(input_layouts=Replicate())
    elif style in (ROWS, *ROWS_OF_WHOLE):
        given = Shard(-1) if style == ROWS else Replicate()
        parallel = RowwiseParallel(
            input_layouts=given, output_layouts=Partial(), use_local_output=False
        )
    elif style == _PARTIAL_NORM:
        # rows of any dimension are independent, so each rank's heads count as shares of the batch
        parallel = SequenceParallel(sequence_dim=0, use_local_output=True)
    else:
        gathered = style in COLUMNS_GATHERED
        parallel = ColwiseParallel(output_layouts=Replicate() if gathered else Shard(-1))
    parallelize_module(module, mesh, parallel, src_data_rank=None)
    for name, buffer in buffers.items() if style != _PARTIAL_NORM else ():
        setattr(module, name, buffer)  # `distribute_module` makes them DTensors
    if style in (ROWS, *ROWS_OF_WHOLE):
        rows = tokens.rows if tokens else whole
        module.register_forward_hook(lambda _, args, output: rows(output))
    elif style == "vocabulary head":
        group = mesh.get_group()
        module.register_forward_hook(lambda _, args, output: ShardedLogits.wrap(output, group))


def _plain_output(model: nn.Module, args: Any, output: Any) -> Any:
    """Let no DTensor out of a model that torch's styles split."""
    return apply_to_collection(output, DTensor, _plain)


def _plain(output: DTensor) -> Tensor:
    if output.placements[0].is_shard(output.dim() - 1):
        return ShardedLogits.wrap(output.to_local(), output.device_mesh.get_group())
    return whole(output)
