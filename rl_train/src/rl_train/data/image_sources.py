"""Images in rows before they are read: the forms in which data has them, and the places in messages where they belong.

A message with images has as its content a list of parts, `{"type": "text", "text": ...}` and `{"type": "image", "image":
ImageSource}`. Does not import torch or Pillow.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from rl_core.errors import DataError, format_value

_IMAGES = ("image", "image_url", "input_image")
_OTHERS = ("video", "audio", "file")
"""What the types of parts that are refused by name begin with, after `input_`."""
_VALUES = ("image", "path", "url", "base64", "image_url")
"""Keys of an image in a part; the last is OpenAI's."""
IMAGE_FIELDS = ("images", "image")
"""Fields in which rows have images by default."""
_FORMS = "a path, a `data:` URL, bytes, {bytes, path}, or a PIL image"


@dataclass(frozen=True)
class ImageSource:
    """A picture of a row that is read when the row is tokenized.

    Attributes:
        value: A path, a `data:` URL, bytes, a PIL image, or a `TextImage` that was read.
        folder: The folder that relative paths start from; None for the working directory.
    """

    value: Any
    folder: Path | None = None

    @property
    def path(self) -> Path | None:
        """The file; None if the row contains the picture itself."""
        if not isinstance(self.value, str) or self.value.startswith("data:"):
            return None
        return Path(self.folder or "", self.value).expanduser()

    @property
    def identity(self) -> str:
        """The path as it is in the row with the size of the file, or a hash of the picture: equal wherever the data is."""
        if (path := self.path) is not None:
            return f"{self.value}:{path.stat().st_size if path.is_file() else None}"
        content = self.value if isinstance(self.value, str | bytes) else self.value.tobytes()
        return hashlib.blake2b(content.encode() if isinstance(content, str) else content, digest_size=16).hexdigest()

    def __str__(self) -> str:
        return str(self.value) if self.path is not None else "inline"

    def content(self, max_bytes: int, section: str = "data.images") -> Any:
        """The bytes of the file or in the row; a PIL image is returned itself.

        Args:
            max_bytes: The largest size of a file.
            section: The section of the limit, for errors.

        Raises:
            DataError: The file does not exist, cannot be read or is too large, or the `data:` URL is invalid.
        """
        if (path := self.path) is not None:
            try:
                size = path.stat().st_size
                content: Any = path.read_bytes() if size <= max_bytes else b""
            except OSError as error:
                where = (
                    f", from the folder of the data ({self.folder})"
                    if self.folder and not Path(self.value).is_absolute()
                    else ""
                )
                raise DataError(f"the file {self.value!r}{where} cannot be read: {error.strerror or error}") from error
        else:
            content = _from_data_url(self.value) if isinstance(self.value, str) else self.value
            size = len(content) if isinstance(content, bytes) else 0
        if size > max_bytes:
            raise DataError(
                f"the image {self} has {size / 2**20:.1f} MiB, but {max_bytes / 2**20:.1f} are allowed: save a smaller one, or "
                f"raise {section}.max_file_mib"
            )
        return content


def _from_data_url(url: str) -> bytes:
    header, comma, data = url[5:].partition(",")
    if not comma:
        raise DataError("a `data:` URL without a comma has no content")
    if not header.endswith(";base64"):
        return unquote_to_bytes(data)
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"the base64 of a `data:` URL is invalid ({error}), so the picture is incomplete or corrupt") from error


def source_of(value: Any, what: str) -> ImageSource:
    """An image in one of the forms that data has.

    Args:
        value: A path, a `file:` or `data:` URL, bytes, `{bytes, path}` as Hugging Face's image columns have it, `{url}` as
            OpenAI has it, or a PIL image.
        what: Names it in errors.

    Raises:
        DataError: It is something else, or a URL of the network.
    """
    if isinstance(value, ImageSource):
        return value
    if isinstance(value, Mapping):
        inner = next((value[key] for key in ("bytes", "path", "url") if value.get(key) is not None), None)
        if inner is not None and not isinstance(inner, Mapping):
            return source_of(inner, what)
    if isinstance(value, bytes | bytearray):
        return ImageSource(bytes(value))
    if isinstance(value, str) and value:
        scheme = urlsplit(value).scheme if "://" in value[:16] else ""
        if scheme == "file":
            return ImageSource(unquote(urlsplit(value).path))
        if scheme:
            raise DataError(f"{what} is the URL {value[:80]!r}, and images are not downloaded: save the file and give its path")
        return ImageSource(value)
    if type(value).__module__.partition(".")[0] == "PIL":
        return ImageSource(value)
    raise DataError(f"{what} is {format_value(value)}: expected {_FORMS}")


def with_image_parts(content: Any, what: str) -> list[dict[str, Any]] | None:
    """The parts of a content that has images, each with its `ImageSource`, or None if `images` of the row has it.

    Args:
        content: The content of a message.
        what: Names the message in errors.

    Returns:
        The parts; None if the content has no images.

    Raises:
        DataError: A part is neither text nor an image, or its image has no known form.
    """
    if not isinstance(content, list):
        return None
    kinds = [str(part.get("type")) if isinstance(part, Mapping) else "" for part in content]
    for kind in kinds:
        if kind.removeprefix("input_").startswith(_OTHERS):
            raise DataError(
                f"{what} has a part of type {kind!r}: only text and images are supported. Remove the part or the row"
            )
    if not any(kind in _IMAGES for kind in kinds):
        return None
    parts: list[dict[str, Any]] = []
    for number, (kind, part) in enumerate(zip(kinds, content, strict=True)):
        if kind in _IMAGES:
            given = next((part[key] for key in _VALUES if part.get(key) is not None), None)
            if isinstance(given, str) and part.get("base64") is given:
                given = given if given.startswith("data:") else f"data:;base64,{given}"
            source = None if given is None else source_of(given, f"image {number} of {what}")
            parts.append({"type": "image", "image": source})
        elif kind in ("text", "input_text") and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            raise DataError(f"{what} has a part {format_value(part)}: expected a part of the type 'text' or 'image'")
    return parts


def image_parts(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The parts of messages that are images, in their order."""
    contents = (message.get("content") for message in messages)
    return [part for content in contents if isinstance(content, list) for part in content if part.get("type") == "image"]


def texts_of(message: Mapping[str, Any], image: str | None = None) -> list[str]:
    """The texts of a message in their order, with `image` instead of each image if it is given."""
    content = message.get("content") or ""
    parts = [{"text": content}] if isinstance(content, str) else content
    return [text for part in parts if (text := part.get("text", image)) is not None]


def described_image(part: Mapping[str, Any]) -> str:
    """Name, size and digest of an image that a message refers to, for people."""
    name = Path(part["path"]).name if part.get("path") else "no file"
    size = f"{part['width']} x {part['height']} pixels" if part.get("width") else ""
    return ", ".join(filter(None, (name, size, f"digest {str(part['digest'])[:8]}" if part.get("digest") else "")))


def described(content: Any) -> str:
    """The text of a content, with a description of each image."""
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    return "".join(part["text"] if "text" in part else f"[image: {described_image(part)}]" for part in parts)


def images_of_row(row: Mapping[str, Any], key: str | None, *, is_named: bool) -> tuple[Any, str | None]:
    """The images that a row has apart from its messages, and the name of their field.

    Args:
        row: Its fields.
        key: The field that has them, `images_key`; None for none.
        is_named: Whether the config names this field, so that rows must have it; otherwise `image` may replace it.

    Raises:
        DataError: The named field is missing.
    """
    if key is None or key in row:
        return (None, None) if key is None else (row[key], key)
    if is_named:
        raise DataError(f"the field {key!r} (`images_key`) is missing: the row has {sorted(row)}")
    return row.get(IMAGE_FIELDS[1]), IMAGE_FIELDS[1]


def folder_of(path: Any) -> Path | None:
    """The folder of data at a path, from which the paths of its images start; None if it is not in files."""
    place = None if path is None else Path(path).expanduser()
    return None if place is None else place if place.is_dir() else place.parent if place.is_file() else None


def placed(messages: list[dict[str, Any]], images: Any, *, key: str | None, folder: Path | None) -> list[dict[str, Any]]:
    """Messages in which each image part has its image.

    Parts without an image get those of the row's field, in their order. If there are none, the images are put in front of the
    text of the first message of the user, as TRL does.

    Args:
        messages: The conversation, from `conversations.read_messages`.
        images: The row's images, or one of them; None without any.
        key: The name of that field, for errors.
        folder: The folder that relative paths start from.

    Raises:
        DataError: There are not as many images as parts, there is no message of the user, or an image has no known form.
    """
    if images is None and not image_parts(messages):
        return messages
    listed = images if isinstance(images, list | tuple) else [] if images is None else [images]
    sources = [source_of(image, f"image {number} of the field {key!r}") for number, image in enumerate(listed)]
    found = [dict(message) for message in messages]
    empty = sum(part["image"] is None for part in image_parts(found))
    if sources and not empty:
        first = next((message for message in found if message["role"] == "user"), None)
        if first is None:
            raise DataError(f"the field {key!r} has images, but no message has the role 'user'")
        content = first["content"]
        text = [{"type": "text", "text": content}] if isinstance(content, str) else content
        first["content"] = [*({"type": "image", "image": None} for _ in sources), *text]
    elif empty != len(sources):
        field = f"the field {key!r} has {len(sources)} images" if sources else "the row has no field with images (`images_key`)"
        raise DataError(
            f"the messages have {empty} parts of type 'image' without an image, but {field}: the numbers must match"
        )
    remaining = iter(sources)
    for message in found:
        if isinstance(message["content"], list):
            message["content"] = [
                {**part, "image": _in_folder(part["image"] or next(remaining), folder)} if part["type"] == "image" else part
                for part in message["content"]
            ]
    return found


def _in_folder(source: ImageSource, folder: Path | None) -> ImageSource:
    return (
        replace(source, folder=folder) if folder is not None and source.folder is None and source.path is not None else source
    )


def image_identity(value: Any) -> str:
    """For `json.dumps`: what hashes of rows have for an image.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(value, ImageSource):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return value.identity
