"""The rule for relative paths: relative to the working directory, else to the file that contains them.

The rule applies to fields annotated as `Annotated[str, INPUT_PATH]` or `Annotated[str, NAME_OR_PATH]`. Outputs of a run (the
run folder, checkpoints) are not marked, and are relative to the working directory. Independent of the sections.
"""

from __future__ import annotations

from dataclasses import dataclass
from os.path import isdir, isfile  # False for a name that is too long for the file system; Path would raise
from pathlib import Path


@dataclass(frozen=True)
class PathRule:
    """Marks a field that may contain a path.

    Attributes:
        must_exist: Whether a path that does not exist is an error; otherwise it is unchanged, as the name of something.
    """

    must_exist: bool


INPUT_PATH = PathRule(must_exist=True)
"""A file or folder that the run reads."""
NAME_OR_PATH = PathRule(must_exist=False)
"""The name of something (a model of a hub, a packaged template), or the path of a file or folder."""


_DATA_SUFFIXES = {".safetensors", ".json", ".jinja", ".model", ".spm", ".tiktoken"}
_VOCABULARIES = {"merges.txt", "vocab.txt"}


def model_path_problem(name_or_path: str) -> str | None:
    """Why a local path is not a Transformers model; None if it is one, or the name of a model on the hub.

    Args:
        name_or_path: The value of a key `model_name`.
    """
    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf":
        return None if isfile(path) else f"there is no GGUF file {name_or_path}."
    if isfile(path):
        return (
            f"{name_or_path} is a file, but a model is a folder with config.json and weights, or a .gguf file. "
            f"Use a folder written by `save_pretrained`, such as {path.parent}."
        )
    if isdir(path) and not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            return (
                f"{name_or_path} contains only a LoRA adapter, not a whole model. Merge it into its base with `rlcore "
                "convert CHECKPOINT --to hf --merge OUTPUT` and use OUTPUT."
            )
        return f"{name_or_path} has no config.json, so it is not a model folder.{_checkpoint_hint(path)}"
    return None


def _checkpoint_hint(path: Path) -> str:
    """Where a model is in the folder: the last checkpoint of a run, or a folder at most three levels below."""
    for pattern in ("policy/weights", "*/policy/weights", "checkpoints/*/policy/weights", "*", "*/*", "*/*/*"):
        if inner := sorted(path.glob(f"{pattern}/config.json")):
            return f" {'The weights of a checkpoint are' if 'policy' in pattern else 'A model is'} in {inner[-1].parent}."
    return " Use a folder written by `save_pretrained` or `rlcore convert`."


def model_files(folder: Path) -> list[str]:
    """Paths in a model folder of its weights, configs, tokenizer and templates: data only, no Python and no pickles."""
    files = [path for path in folder.iterdir() if path.is_file()]
    files = [path for path in files if path.suffix in _DATA_SUFFIXES or path.name in _VOCABULARIES]
    files += folder.glob("additional_chat_templates/*.jinja")
    return sorted(path.relative_to(folder).as_posix() for path in files)
