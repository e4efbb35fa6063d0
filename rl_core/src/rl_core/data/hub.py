"""Locates models and reads their configs. The hub is queried once, because libraries retry an unreachable one for a minute."""

from __future__ import annotations

import logging
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from rl_core.errors import DataError
from rl_core.plugins.import_path import missing_target

_FILES: Final = ("config.json", "tokenizer_config.json", "tokenizer.json")
_FIX: Final = "Give the path of a model folder or .gguf file (one to install: docs/your_data.md), or a model's name on the hub"
_HUB: Final = "HF_ENDPOINT selects another hub, and HF_TOKEN gives access to gated models"
_log = logging.getLogger("rlcore")


def model_source(name: str) -> tuple[str, str | None]:
    """The path or hub name of a model, and the revision of `owner/name@revision`: a branch, a tag or a commit."""
    source, _, revision = name.rpartition("@")
    return (source, revision) if source and revision and not Path(name).expanduser().exists() else (name, None)


def names_code(name: str) -> bool:
    """Whether a name is the import path of a tokenizer's class or function, `module:name`."""
    module, _, attribute = name.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), attribute))


def pretrained_location(name: str) -> tuple[str, dict[str, str]]:
    """The argument and keyword arguments of `from_pretrained` that locate a model, its config or its tokenizer."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    source, revision = model_source(name)
    return str(Path(source).expanduser()), {"revision": revision or "main"}


def published_file(name: str, file: str) -> Path | None:
    """A file of a model's folder or of the hub's cache; None if it is not on this machine, or the name is that of no folder."""
    from transformers.utils import cached_file

    if names_code(name):
        return None
    location, options = pretrained_location(name)
    with suppress(OSError):  # the model is not there at all
        there: Any = {"local_files_only": True, "_raise_exceptions_for_missing_entries": False, **options}
        if "gguf_file" not in options and (found := cached_file(location, file, **there)):
            return Path(found)
    return None


def read_model_config(name: str, *, trust_remote_code: bool = False) -> Any:
    """The Transformers config of a model. That of a GGUF file is kept until the file changes."""
    from transformers import AutoConfig

    location, options = pretrained_location(name)
    file = Path(location, options.get("gguf_file", ""))
    if "gguf_file" in options and file.is_file():
        return deepcopy(_gguf_config(file, file.stat().st_mtime_ns))
    return AutoConfig.from_pretrained(location, trust_remote_code=trust_remote_code, **options)


@lru_cache(maxsize=4)
def _gguf_config(file: Path, changed_ns: int) -> Any:
    """Reading it takes seconds, because the vocabulary is in the same header."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)


def require_model(name: str, *, query_cached: bool = False) -> None:
    """Check that a model is an existing path, in the hub's cache, or available on the hub.

    Args:
        name: A path, or a name on the hub, as in `model_source`; of a tokenizer, also as in `names_code`.
        query_cached: Whether to query the hub even if the model is cached, and to log a warning if it does not respond.

    Raises:
        DataError: There is no such model, or it is not cached and the hub does not respond.
    """
    from huggingface_hub import constants, errors, try_to_load_from_cache

    if names_code(name):
        if (problem := missing_target(name)) is not None:
            raise DataError(f"{name!r} does not exist: {problem.rstrip('.')}")
        return
    source, revision = model_source(name)
    path = Path(source).expanduser()
    if path.exists():
        if revision is not None:
            raise DataError(f"{source} is a local path and has no revisions: remove `@{revision}`")
        return
    in_folder = path.parent.is_dir() and len(path.parts) > 1
    if in_folder or path.is_absolute() or path.suffix == ".gguf" or source.startswith(".") or source.count("/") > 1:
        searched = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise DataError(f"{name!r} does not exist{searched}. {_FIX}")
    try:
        is_cached = any(isinstance(try_to_load_from_cache(source, file, revision=revision), str) for file in _FILES)
        if not is_cached or (query_cached and not constants.HF_HUB_OFFLINE):
            _query_hub(source, revision)
    except errors.HFValidationError:
        raise DataError(f"{name!r} is not an existing path, and not a valid name of a model on the hub. {_FIX}") from None
    except DataError as error:
        if not is_cached:
            hub = "" if constants.HF_HUB_OFFLINE else f". {_HUB}"
            raise DataError(f"{name!r} is neither a local path nor in the hub's cache, and {error}. {_FIX}{hub}") from error
        _log.warning("%s. %s is read from the cache; HF_HUB_OFFLINE=1 skips the attempts to connect", error, name)


def _query_hub(name: str, revision: str | None) -> None:
    """Query the hub once; a DataError is a clause that the caller's message contains."""
    from huggingface_hub import HfApi, constants, errors

    if constants.HF_HUB_OFFLINE:
        raise DataError("the hub is not queried, because HF_HUB_OFFLINE is set")
    api = HfApi()
    try:
        api.model_info(name, revision=revision, timeout=10.0)
    except errors.RevisionNotFoundError:
        raise DataError(f"{name} on {api.endpoint} has no branch, tag or commit {revision!r}") from None
    except Exception as error:
        raise DataError(f"{api.endpoint} failed with {type(error).__name__}: {error}".splitlines()[0].rstrip(".")) from error
