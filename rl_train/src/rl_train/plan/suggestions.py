"""What to do about a run that does not fit into memory: overrides, each tried by planning again, and the warning of a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rl_core.errors import ConfigError, RLCoreError
from rl_core.plugins.registry import Registry
from rl_train.config.schema import RunConfig
from rl_train.files import available_memory, format_size
from rl_train.plan.microbatches import microbatch
from rl_train.plan.planner import MemoryPlan, memory_planner, plan_memory

_log = logging.getLogger("rlcore")
_WORTH_IT: Final = 0.99
"""An override is kept if it reduces the peak to at most this fraction."""
_WORTH_PLANNING: Final = 0.3
"""A run whose rough estimate is below this fraction of the available memory is not planned, because planning takes seconds."""


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


def warn_if_too_large(run: RunConfig, registry: Registry) -> None:
    """Log a warning if a run on CPUs of this machine needs more memory than is available.

    Runs on several nodes or GPUs are not checked, because their memory is not known here, nor are models without a local
    config.json.
    """
    available = available_memory()
    if run.cluster.num_nodes > 1 or rough_bytes(run) < _WORTH_PLANNING * available:
        return
    from rl_core.dispatch.worker_facade import local_device

    if run.cluster.use_gpus or local_device() == "cuda":
        return
    try:
        plan = plan_memory(run, registry, on_gpu=False, limit=available)
    except RLCoreError as error:  # the run itself reports it, with its location
        _log.info("the memory of the run was not planned: %s", error)
        return
    if plan.fits is False:
        process = plan.largest_process
        _log.warning(
            "This run needs about %s, but %s are available. The peak is in phase %s, mostly %s of %s. "
            "`rlcore plan CONFIG` shows each part and overrides that reduce it.",
            format_size(plan.peak),
            format_size(available),
            plan.peak_phase,
            process.largest_part,
            process.name,
        )


def rough_bytes(run: RunConfig) -> float:
    """A rough estimate of the policy's memory in training, in bytes, from its config.json alone; 0.0 if there is none.

    16 bytes per weight with Adam, 12 L H^2 + V H weights, and 34 float32 activations of 2 bytes per token, layer and hidden
    unit, doubled for float32 (https://arxiv.org/abs/2205.05198, section 4), and three logits per token.
    """
    try:
        shape = json.loads((Path(run.policy.model_name).expanduser() / "config.json").read_text(encoding="utf-8"))
        layers, hidden, vocabulary = (int(shape[key]) for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
    batch = microbatch(run, run.policy, training=True)
    tokens = batch.rows * batch.length
    weights = 12 * layers * hidden**2 + vocabulary * hidden
    return 16.0 * weights + 68.0 * tokens * layers * hidden + 12.0 * min(tokens, 4096) * vocabulary
