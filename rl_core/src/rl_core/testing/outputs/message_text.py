"""The text of a message whose content may be a list of parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.errors import DataError, format_value


def text_of(content: Any, what: str) -> str:
    """The text of a message's content: the text itself, or its joined text parts. Errors name the message as `what`.

    Raises:
        DataError: It is neither, or a part is an image.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{what} has the content {format_value(content)}: expected a text or a list of text parts")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            is_image = kind in ("image", "image_url", "input_image")
            why = "images are not supported yet" if is_image else "only text is supported"
            raise DataError(f"{what} has a part of type {kind!r}: {why}. Remove the part or the row")
        texts.append(part["text"])
    return "".join(texts)
