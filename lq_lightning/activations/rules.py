"""Rules that would do nothing are refused: a pattern with a typo must not pass for a setting."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from .policy import ActivationPolicy, ActivationRule, SiteKind
from .sites import Site, is_checkpointed, policy_kind

__all__ = ["check_rules"]


def _kind(module: nn.Module, site: Site) -> SiteKind | None:
    """What a site that takes a codec now is; layers that could be checkpointed while they are."""
    kind = policy_kind(site)
    if kind == "checkpoint" and not is_checkpointed(module):
        return None
    return kind


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def check_rules(
    model: nn.Module, sites: Iterable[tuple[nn.Module, Site]], policy: ActivationPolicy
) -> None:
    """Refuse rules without effect.

    Args:
        model: The model.
        sites: Modules and sites that were found in it.
        policy: The rules. One that only sets ``matmul`` may name any module.

    Raises:
        ValueError: A rule matches no module, or only modules that keep nothing by themselves, such
            as a block whose norms and projections have the names that count, or only modules of
            other kinds.
    """
    if not policy.rules:
        return
    modules = {name: module for name, module in model.named_modules() if name}
    kinds = [(site.name, _kind(module, site)) for module, site in sites]
    for rule in policy.rules:
        matching = [name for name in modules if fnmatchcase(name, rule.module)]
        kept = [name for name, kind in kinds if kind and rule.kind in (None, kind)]
        if not matching:
            raise _no_module(rule, model, list(modules), kept)
        found = any(fnmatchcase(name, rule.module) for name in kept)
        if not found and not rule.recompute and rule.matmul is None:
            others = [each for each in kinds if each[0] in matching and each[1]]
            if others:
                raise _other_kind(rule, *others[0])
            raise _no_site(rule, matching, modules[matching[0]], kept)


def _no_module(
    rule: ActivationRule, model: nn.Module, modules: list[str], kept: list[str]
) -> ValueError:
    near = difflib.get_close_matches(rule.module, modules, 3, 0.5) or kept[:3]
    return ValueError(
        f"`ActivationRule(module={rule.module!r})` matches no module of `{type(model).__name__}`. "
        "Patterns are compared with whole names as in `named_modules()`"
        + (f", such as {_quoted(near)}" if near else "")
        + "; `*` stands for any characters, dots included."
    )


def _other_kind(rule: ActivationRule, name: str, kind: SiteKind | None) -> ValueError:
    return ValueError(
        f"`ActivationRule(module={rule.module!r}, kind={rule.kind!r})` has no effect: nothing that "
        f"it names is of this kind; `{name}` is of kind={kind!r}."
    )


def _no_site(
    rule: ActivationRule, matching: list[str], module: nn.Module, kept: list[str]
) -> ValueError:
    inside = [name for name in kept if name.startswith(tuple(f"{m}." for m in matching))]
    if inside:
        advice = (
            f"name what is in it ({_quoted(inside[:3])}), for all of it "
            f"`module={rule.module + '.*'!r}`."
        )
    else:
        advice = "remove the rule."
    return ValueError(
        f"`ActivationRule(module={rule.module!r})` has no effect: `{matching[0]}` "
        f"({type(module).__name__}) keeps nothing by itself that could have a code; {advice}"
    )
