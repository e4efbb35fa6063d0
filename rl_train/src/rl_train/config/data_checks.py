"""Checks that the configured datasets have the record kind that the algorithm reads. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rl_core.config.diagnostics import listed
from rl_core.config.schema import RunConfig
from rl_core.config.source_tree import KeyPath
from rl_core.plugins.component import did_you_mean
from rl_core.plugins.static_lookup import missing_target

# Located by folder, because rl_train.config must not import rl_train.data.
_PACKAGED_PROMPTS = Path(__file__).parents[1] / "data" / "prompt_configs"
_KINDS = {"conversations": "prompts or conversations", "pairs": "pairs of a chosen and a rejected answer"}


def data_conflicts(run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Datasets with the wrong record kind, processors that cannot be imported, and missing prompt templates."""
    wanted = "pairs" if run.algorithm.needs_preferences else "conversations"
    for key, section in run.data.sections().items():
        at: KeyPath = ("data", *key.split(".", 1))
        if section.processor is not None and (problem := missing_target(section.processor)) is not None:
            yield (*at, "processor"), f"{section.processor} cannot be imported: {problem}"
        if key == "validation" and not validates(run):
            continue
        if section.record_kind not in (None, wanted):
            remedy = "`preference` reads pairs from JSON lines" if wanted == "pairs" else "`jsonl` reads JSON lines"
            yield (
                (*at, "dataset_name"),
                f"{section.dataset_name} has {_KINDS[str(section.record_kind)]}, but {run.algorithm_name} needs "
                f"{_KINDS[wanted]}. Use another dataset: {remedy}.",
            )
    prompt = run.data.prompt
    if prompt is not None and prompt.prompt_config is not None:
        problem = prompt_problem(prompt.prompt_config)
        if problem is not None:
            yield ("data", "prompt", "prompt_config"), problem


def validates(run: RunConfig) -> bool:
    """Whether validation is enabled."""
    algorithm = run.algorithm
    return algorithm.val_period > 0 or algorithm.val_at_start or algorithm.val_at_end


def prompt_problem(path_or_name: str) -> str | None:
    """Why a prompt template cannot be found; None if it is a file or a packaged name."""
    if Path(path_or_name).is_file() or (_PACKAGED_PROMPTS / f"{path_or_name}.yaml").is_file():
        return None
    names = sorted(str(path.relative_to(_PACKAGED_PROMPTS).with_suffix("")) for path in _PACKAGED_PROMPTS.rglob("*.yaml"))
    meant = did_you_mean(path_or_name, names)
    return f"there is neither a file nor a packaged prompt {path_or_name!r}.{meant} Packaged prompts: {listed(names)}."
