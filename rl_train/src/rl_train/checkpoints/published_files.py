"""The files with which a model was published, carried over to its checkpoints and conversions.

What training changes for itself, and what another version of a library writes, stays out of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rl_core.config.section import model_files
from rl_core.data.hub import published_file
from rl_core.data.tokenizer import TOKENIZER_CODE, save_tokenizer
from rl_core.errors import DataError

_CONFIG = "config.json"
_GENERATION = "generation_config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TEMPLATES = ("chat_template.*", "additional_chat_templates/*")
_CODE_SUFFIXES = (".py", ".pkl", ".pickle", ".pt", ".pth")
_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "tekken.json"),
    *("*.model", "*.spm", "*.tiktoken"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)


def carry_over_config(folder: Path, *, model: str) -> None:
    """Write config.json and generation_config.json of a folder as they were published, if that is on this machine.

    In config.json, fields that Transformers reads with another value from the folder have that value, such as the data type. A
    file that could not express this is left unchanged.

    Args:
        folder: a Transformers model folder; one of another format is left unchanged.
        model: name of the published model.
    """
    source = published_file(model, _CONFIG)
    if source is None or not (folder / _CONFIG).is_file():
        return
    (folder / _GENERATION).unlink(missing_ok=True)
    if (generation := published_file(model, _GENERATION)) is not None:
        shutil.copyfile(generation, folder / _GENERATION)
    written, merged = (json.loads(file.read_text(encoding="utf-8")) for file in (folder / _CONFIG, source))
    after, before = _as_read(written), _as_read(merged)
    for key in {key for key in after | before if after.get(key) != before.get(key)}:
        name = "torch_dtype" if key == "dtype" and "torch_dtype" in merged else key
        if key in written:
            merged[name] = written[key]
        else:
            merged.pop(name, None)
    if merged.get("model_type") == written.get("model_type") and _as_read(merged) == after:
        (folder / _CONFIG).write_text(json.dumps(merged, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _as_read(content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json as Transformers reads them, without the version that wrote it."""
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = CONFIG_MAPPING[content["model_type"]] if content.get("model_type") in CONFIG_MAPPING else PretrainedConfig
    fields: dict[str, Any] = known.from_dict(json.loads(json.dumps(content))).to_dict()
    return {key: value for key, value in fields.items() if key != "transformers_version"}


def carry_over_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer of `load_policy_tokenizer` as it was published, but with the chat template of the config.

    The settings of the model's processor, which reads images, are carried over as well, with those of the config.

    Files of another tokenizer in the folder are removed. Transformers writes a tokenizer of a GGUF file or of user code.
    """
    from rl_core.data.adapted_tokenizer import AdaptedTokenizer  # imports Transformers

    name, is_own_template = getattr(tokenizer, "published", (None, True))
    patterns = (*_TOKENIZER, *(_TEMPLATES if is_own_template else ()))
    config = None if name is None else published_file(name, _TOKENIZER_CONFIG) or published_file(name, "tokenizer.json")
    files = {} if config is None else {file: (config.parent / file).read_bytes() for file in _matching(config.parent, patterns)}
    for file in _matching(folder, (*_TOKENIZER, *_TEMPLATES)):
        (folder / file).unlink()
    if not files:
        write = _write_code if isinstance(tokenizer, AdaptedTokenizer) else save_tokenizer
        write(tokenizer, folder)
        return
    for file, content in files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(content)
    if (reader := vars(tokenizer).get("image_reader")) is not None and reader.config.processor_kwargs:
        _change_image_processor(folder, reader.config.processor_kwargs)
    if not is_own_template:
        settings = json.loads(files.get(_TOKENIZER_CONFIG, b"{}"))
        tokenizer.save_chat_templates(folder, settings, None, True)  # also removes the template from the settings
        (folder / _TOKENIZER_CONFIG).write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")


def _write_code(tokenizer: Any, folder: Path) -> None:
    """Write the files and the template of a tokenizer that is code, and their names as `TOKENIZER_CODE`."""
    with TemporaryDirectory() as written:
        save_tokenizer(tokenizer, Path(written))
        tokenizer.save_chat_templates(written, {}, None, True)
        names = sorted(path.relative_to(written).as_posix() for path in Path(written).rglob("*") if path.is_file())
        if taken := [name for name in names if name in (_CONFIG, _GENERATION) or name.endswith(".safetensors")]:
            raise DataError(
                f"`save` of the tokenizer {tokenizer.name_or_path} wrote {', '.join(taken)}, which would replace files of the "
                "model. Give its files other names."
            )
        copy_files(Path(written), folder, names)
    (folder / TOKENIZER_CODE).write_text("\n".join([tokenizer.name_or_path, *names, ""]), encoding="utf-8")


def copy_files(source: Path, output: Path, names: Iterable[str]) -> None:
    """Copy files of a folder, which may be in its subfolders."""
    for name in names:
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, output / name)


def tokenizer_code(folder: Path) -> tuple[str | None, list[str]]:
    """The import path and the files of the tokenizer of a model folder; None and no files if it is not code.

    Names outside the folder, Python files and pickles are left out.
    """
    record = folder / TOKENIZER_CODE
    if not record.is_file():
        return None, []
    code, *names = record.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    paths = [Path(name) for name in names if (folder / name).is_file() and not name.startswith("pytorch_model")]
    data = [path for path in paths if not path.is_absolute() and ".." not in path.parts and path.suffix not in _CODE_SUFFIXES]
    return code, [TOKENIZER_CODE, *map(Path.as_posix, data)]


def _change_image_processor(folder: Path, kwargs: Mapping[str, Any]) -> None:
    """Replace settings in the file that Transformers reads: processor_config.json if it has those of the image processor."""
    for name in ("processor_config.json", "preprocessor_config.json"):
        settings: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8")) if (folder / name).is_file() else {}
        of_images = settings.get("image_processor") if name == "processor_config.json" else settings
        if of_images:
            of_images.update(kwargs)
            (folder / name).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            return


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[str]:
    return [name for name in model_files(folder) if any(fnmatch(name, pattern) for pattern in patterns)]
