"""Queries the model hub once, with a short timeout, because libraries retry an unreachable hub for a minute."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from rl_core.errors import DataError

TIMEOUT_S: Final = 10.0
_log = logging.getLogger("rlcore")


def refuse_unreachable(name: str, *, file: str) -> None:
    """Refuse the name of a model that is neither cached nor available on the hub; paths are not checked.

    If the hub does not respond and the model is cached, which its `file` shows, this only logs a warning.

    Raises:
        DataError: The hub does not respond, or has no such model.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if not _is_name(name) or constants.HF_HUB_OFFLINE:
        return
    try:
        query_hub(name)
    except DataError as error:
        if isinstance(try_to_load_from_cache(name, file), str):
            _log.warning("%s. %s is read from the cache; HF_HUB_OFFLINE=1 skips the attempts to connect", error, name)
            return
        raise DataError(
            f"{name!r} is neither a folder nor in the hub's cache, and {error}. Give the path of a model folder, or connect "
            "to the hub. Without network, HF_HUB_OFFLINE=1 uses cached models at once (HF_ENDPOINT selects another hub, "
            "HF_TOKEN gives access to gated models)"
        ) from error


def query_hub(name: str) -> None:
    """Check that the hub has a model, with a single request.

    Raises:
        DataError: The hub does not respond, or has no such model; the text is a clause that a caller's message contains.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.model_info(name, timeout=TIMEOUT_S)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        raise DataError(f"{api.endpoint} failed with {type(error).__name__}: {reason}") from error


def _is_name(name: str) -> bool:
    """Whether it is the name of a model on the hub: `owner/model` or `model`, and not an existing path."""
    return not Path(name).expanduser().exists() and name.count("/") <= 1 and not name.startswith((".", "/", "~"))
