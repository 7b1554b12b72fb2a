"""Rules that would do nothing are refused: a pattern with a typo must not pass for a setting."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from .policy import ActivationPolicy, ActivationRule
from .sites import HookSite, Site, policy_kind

__all__ = ["check_rules"]


def _keeps(module: nn.Module, site: Site) -> bool:
    """Whether a site takes a codec now; layers that could be checkpointed only while they are."""
    if isinstance(site, HookSite) and site.kind == "checkpoint":
        return bool(getattr(module, "gradient_checkpointing", True))
    return policy_kind(site) is not None


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
            as a block whose norms and projections have the names that count.
    """
    if not policy.rules:
        return
    modules = {name: module for name, module in model.named_modules() if name}
    kept = [site.name for module, site in sites if _keeps(module, site)]
    for rule in policy.rules:
        matching = [name for name in modules if fnmatchcase(name, rule.module)]
        if not matching:
            raise _no_module(rule, model, list(modules), kept)
        found = any(fnmatchcase(name, rule.module) for name in kept)
        if not found and not rule.recompute and rule.matmul is None:
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
