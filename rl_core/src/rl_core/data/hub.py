"""Asks the model hub once, quickly, before libraries that would retry an unreachable one for a minute; imports no torch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from rl_core.errors import DataError

TIMEOUT_S: Final = 10.0
_log = logging.getLogger("rlcore")


def refuse_unreachable(name: str, *, file: str) -> None:
    """Refuse the name of a model that is neither cached nor on a hub that answers; paths are not looked at.

    A hub that does not answer is only a warning for a model that is in the cache.

    Args:
        name: As `from_pretrained` takes it.
        file: A file of the model that the cache would hold.

    Raises:
        DataError: The hub does not answer, or has no such model.
    """
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    if not _is_name(name) or constants.HF_HUB_OFFLINE:
        return
    api = HfApi()
    try:
        api.model_info(name, timeout=TIMEOUT_S)
    except Exception as error:
        answer = f"{api.endpoint} answered: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if isinstance(try_to_load_from_cache(name, file), str):
            _log.warning("%s. %s is read from the cache; HF_HUB_OFFLINE=1 skips the attempts to connect", answer, name)
            return
        raise DataError(
            f"{name!r} is neither a folder nor in the hub's cache, and {answer}. Give the path of a model folder, or connect "
            "to the hub. Without network, HF_HUB_OFFLINE=1 uses cached models at once (HF_ENDPOINT names another hub, HF_TOKEN "
            "opens gated models)"
        ) from error


def _is_name(name: str) -> bool:
    """Whether it can only be the name of a model of the hub: `owner/model` or `model`, and no such path."""
    return not Path(name).expanduser().exists() and name.count("/") <= 1 and not name.startswith((".", "/", "~"))
