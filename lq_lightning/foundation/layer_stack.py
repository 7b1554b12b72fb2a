"""Find the layer stack of a model: the repeated blocks that one hidden state flows through.

Everything else with parameters runs before the stack (embeddings) or after it (last norm, head,
loss). Nothing is executed: this works on the meta device too.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn


def has_parameters(module: nn.Module) -> bool:
    """Whether the module or one inside it has parameters."""
    return next(module.parameters(), None) is not None


def is_silent_container(module: nn.Module) -> bool:
    """Whether only modules inside this one are called, never itself."""
    return (
        isinstance(module, (nn.ModuleList, nn.ModuleDict))
        and type(module).forward is nn.Module.forward
    )


def is_block(module: nn.Module) -> bool:
    """Whether the module can be called and has submodules with parameters."""
    return not is_silent_container(module) and any(has_parameters(c) for c in module.children())


def repeated_blocks(
    root: nn.Module, block: Callable[[nn.Module], bool] = is_block, path: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield repeated blocks with their names, outermost ones only.

    These are two or more of a class for which ``block`` holds, in one ``ModuleList``,
    ``ModuleDict`` or ``Sequential``. ``path`` is the name of ``root``.
    """
    holds = isinstance(root, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    blocks = {key: child for key, child in root.named_children() if holds and block(child)}
    alike = Counter(map(type, blocks.values()))
    for key, child in root.named_children():
        name = f"{path}.{key}" if path else key
        if key in blocks and alike[type(child)] > 1:
            yield name, child
        else:
            yield from repeated_blocks(child, block, name)


_FRAMEWORKS = ("torch", "lightning", "pytorch_lightning")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerStack:
    """Names of the modules of a model, by their place around its repeated blocks."""

    layers: tuple[str, ...]  # repeated blocks, in the order of their calls
    before: tuple[str, ...]  # other modules with parameters that run before them
    after: tuple[str, ...]


def find_layer_stack(root: nn.Module, trunk: str | None = None) -> LayerStack:
    """Find the repeated blocks of ``root`` and the modules around them.

    The blocks are the children of a ``ModuleList``, ``ModuleDict`` or ``Sequential`` that have
    parameters in submodules of their own; ``trunk`` names it in a model with several. Other modules
    run before or after them by the order in which the code of their common parent uses both, or,
    where that does not show it, by the order in which they were registered.

    Raises:
        ValueError: There are no blocks, or ``trunk`` names no container of blocks.
        NotImplementedError: An encoder-decoder model, several lists of blocks, or a block that
            occurs twice.
    """
    lists = dict(_block_lists(root, "", set()))
    if trunk is not None and trunk not in lists:
        raise ValueError(
            f"`trunk={trunk!r}` names no list of blocks of `{type(root).__name__}`; it has: "
            f"{', '.join(lists) or 'none'}."
        )
    container = _only_list(root, lists) if trunk is None else trunk
    keys = lists[container]
    layers = tuple(f"{container}.{key}" if container else key for key in keys)
    _check_distinct(root, layers)
    around = list(_children_around(root, layers))
    return LayerStack(
        layers=layers,
        before=tuple(name for name, earlier in around if earlier),
        after=tuple(name for name, earlier in around if not earlier),
    )


def _children_around(root: nn.Module, layers: tuple[str, ...]) -> Iterator[tuple[str, bool]]:
    """Yield the modules with parameters around the layers, and whether each runs before them.

    Innermost first, so that modules after the layers come in the order of calls.
    """
    for path in reversed(names_around(layers[0])):
        parent = root.get_submodule(path)
        children = list(parent.named_children())
        names = {key: f"{path}.{key}" if path else key for key, _ in children}
        inner = [
            key
            for key, name in names.items()
            if name in layers or any(layer.startswith(f"{name}.") for layer in layers)
        ]
        order, used = [key for key, _ in children], _orders_of_use(parent)
        for key, child in children:
            if key in inner or not has_parameters(child):
                continue
            earlier = _used_before(used, key, inner[0])
            if earlier is None:
                earlier = order.index(key) < order.index(inner[0])
            yield names[key], earlier


def names_around(name: str) -> list[str]:
    """Return the names of the modules around one, outermost (the root, ``""``) first."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts))]


# --- lists of blocks --------------------------------------------------------------------------


def _block_lists(module: nn.Module, name: str, seen: set[int]) -> Iterator[tuple[str, list[str]]]:
    """Yield the names of the outermost containers of blocks, with the keys of the blocks."""
    if id(module) in seen:
        return
    seen.add(id(module))
    keys = _blocks_of(module)
    if keys:
        yield name, keys
    for key, child in module.named_children():
        if key not in keys:
            yield from _block_lists(child, f"{name}.{key}" if name else key, seen)


def _blocks_of(module: nn.Module) -> list[str]:
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return []
    # `named_children` would leave out the second of two names of one module.
    inside = module.named_modules(remove_duplicate=False)
    children = [(key, child) for key, child in inside if key and "." not in key]
    blocks = [(key, child) for key, child in children if is_block(child)]
    if isinstance(module, nn.ModuleList) and len(blocks) == len(children):
        return [key for key, _ in blocks]  # also of several classes, as hybrid models have them
    count = Counter(type(child) for _, child in blocks)
    return [key for key, child in blocks if count[type(child)] > 1]


def _only_list(root: nn.Module, lists: dict[str, list[str]]) -> str:
    name = type(root).__name__
    if any(_is_encoder_decoder(module) for module in root.modules()):
        raise NotImplementedError(
            f"`{name}` is an encoder-decoder model: its decoder needs the encoder's output in "
            "every layer, and a pipeline passes one hidden state on. Use `quantized_fsdp`."
        )
    if not lists:
        raise ValueError(
            f"`{name}` has no list of repeated blocks (a `ModuleList`, `ModuleDict` or "
            "`Sequential` of modules that have parameters in submodules of their own) that could "
            "be cut into stages. Keep the layers in one `nn.ModuleList`, or use `quantized_fsdp`."
        )
    repeated = {key: keys for key, keys in lists.items() if len(keys) > 1} or lists
    if len(repeated) > 1:
        longest = max(repeated, key=lambda key: len(repeated[key]))
        shown = ", ".join(f"`{key}` ({len(keys)} blocks)" for key, keys in repeated.items())
        raise NotImplementedError(
            f"`{name}` has several lists of blocks: {shown}. A pipeline cuts one list, through "
            "which one hidden state flows. If the others run whole on the first or last stage, "
            f"name the one to cut, such as `trunk={longest!r}`."
        )
    return next(iter(repeated))


def _is_encoder_decoder(module: nn.Module) -> bool:
    config: Any = getattr(module, "config", None)
    children = dict(module.named_children())
    both = {"encoder", "decoder"} <= children.keys()
    return getattr(config, "is_encoder_decoder", False) is True or (
        both and all(_holds_blocks(children[key]) for key in ("encoder", "decoder"))
    )


def _holds_blocks(module: nn.Module) -> bool:
    return any(len(keys) > 1 for _, keys in _block_lists(module, "", set()))


def _check_distinct(root: nn.Module, layers: tuple[str, ...]) -> None:
    first: dict[int, str] = {}
    for name in layers:
        module = root.get_submodule(name)
        other = first.setdefault(id(module), name)
        if other != name:
            raise NotImplementedError(
                f"`{name}` and `{other}` are one module: layers that are run several times cannot "
                "be cut into stages. Use `quantized_fsdp`."
            )
    inside = {id(m): name for name in layers for m in root.get_submodule(name).modules()}
    for name, _ in _children_around(root, layers):
        for module in root.get_submodule(name).modules():
            if id(module) in inside and not is_silent_container(module):
                raise NotImplementedError(
                    f"`{name}` holds a module of `{inside[id(module)]}`, which is one of the "
                    "layers to cut into stages. Keep it under one name only."
                )


# --- order of use, read from the source -------------------------------------------------------


def _used_before(orders: list[list[str]], key: str, trunk_key: str) -> bool | None:
    """Whether a child is used before the one with the layers; None if the code does not say."""
    for order in orders:
        if key in order and trunk_key in order:
            uses = [place for place, used in enumerate(order) if used == trunk_key]
            if not uses[0] < order.index(key) < uses[-1]:  # else one of these is no call
                return order.index(key) < uses[0]
    return None


def _orders_of_use(parent: nn.Module) -> list[list[str]]:
    """Return attributes of ``self`` in the order of use in forward and in the training step.

    For models that register their last norm before their layers, such as OPT.
    """
    if isinstance(parent, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return []
    methods: dict[str, Any] = {}
    for base in type(parent).__mro__:
        if base.__module__.partition(".")[0] not in _FRAMEWORKS:
            methods = {**vars(base), **methods}
    return [list(_uses(methods, name, ())) for name in ("forward", "training_step")]


def _uses(methods: dict[str, Any], method: str, callers: tuple[str, ...]) -> Iterator[str]:
    """Yield attributes that a method uses, also in methods that it calls."""
    function = methods.get(method)
    if not inspect.isfunction(function) or method in callers:
        return
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):  # no source, as of functions made at run time
        return
    yield from _walk(tree, methods, (*callers, method))


def _walk(node: ast.AST, methods: dict[str, Any], callers: tuple[str, ...]) -> Iterator[str]:
    if isinstance(node, ast.Call):  # the arguments are computed first
        for part in [*node.args, *(keyword.value for keyword in node.keywords)]:
            yield from _walk(part, methods, callers)
        if isinstance(node.func, ast.Name) and node.func.id == "self":
            yield from _uses(methods, "forward", callers)
        else:
            yield from _walk(node.func, methods, callers)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id == "self":
            yield node.attr
            yield from _uses(methods, node.attr, callers)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _walk(child, methods, callers)


def hidden_name(layer: nn.Module) -> str:
    """Return the name of the first argument of the layer's forward."""
    names = [
        name
        for name, parameter in inspect.signature(layer.forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return names[0] if names else "hidden_states"
