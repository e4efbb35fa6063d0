"""Overrides that make a run fit into memory. Each is tried by planning again with it; nothing is suggested untried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rl_core.errors import ConfigError
from rl_core.plugins.registry import Registry
from rl_train.config.schema import RunConfig
from rl_train.plan.memory_plan import MemoryPlan
from rl_train.plan.planner import memory_planner
from rl_train.plan.rows import microbatch

_WORTH_IT = 0.99
"""An override is kept if it reduces the peak to at most this fraction."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Overrides, and the plan with all of them.

    Attributes:
        overrides: `key=value` each, to be given after the config; empty if none helps.
        plan: The plan of the run with them.
    """

    overrides: tuple[str, ...]
    plan: MemoryPlan


def suggest(
    run: RunConfig, registry: Registry, plan: MemoryPlan, plan_with: Callable[[Sequence[str]], MemoryPlan]
) -> Suggestion:
    """The first overrides that make a run fit, or all that reduce its peak if they do not suffice.

    Those that do not change results come first.

    Args:
        run: The config.
        registry: Used to look up the backends, which suggest overrides as well.
        plan: Its plan, which does not fit.
        plan_with: Plans the config with overrides; raises `ConfigError` if they are invalid.
    """
    kept: dict[str, str] = {}
    best = plan
    for override in _candidates(run, registry):
        key = override.partition("=")[0]
        tried = {**kept, key: override}
        try:
            planned = plan_with(list(tried.values()))
        except ConfigError:  # the override does not apply to this config, such as a key that another backend has
            continue
        if planned.peak <= _WORTH_IT * best.peak:
            kept, best = tried, planned
        if best.fits:
            break
    return Suggestion(overrides=tuple(kept.values()), plan=best)


def _candidates(run: RunConfig, registry: Registry) -> Iterator[str]:
    """Overrides to try, in this order."""
    policy = run.policy
    for training in (True, False):
        batch, (key, _, least) = microbatch(run, policy, training=training), policy.microbatch_limit(training=training)
        size = batch.rows if least == 1 else batch.rows * batch.length
        while size > least:
            size = max(least, size // 2)
            yield f"policy.{key}={size}"
    if not policy.activation_checkpointing:
        yield "policy.activation_checkpointing=true"
    planners = [] if policy.generation is None else [memory_planner(registry, "generation", policy.generation)]
    for planner in (*planners, memory_planner(registry, "policy", policy)):
        yield from () if planner is None else planner.saving_overrides()
    if policy.precision != "bfloat16":
        yield "policy.precision=bfloat16"
