"""Reads the images of rows with the model's own processor: what stands for each in the text, and the tensors of the model.

A picture is decoded, resized and normalized once; rows that show it share the result, and nothing after the data runs a
processor. The image processor computes with Pillow, because another implementation gives other pixels.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from rl_core.data.generation_io import derived_seeds
from rl_core.data.hub import pretrained_location, published_file, read_model_config
from rl_core.data.images import ImageInputs, RowImage
from rl_core.data.tokenizer import encode
from rl_core.errors import ConfigError, DataError, with_key
from rl_core.plugins.component import did_you_mean
from rl_train.config.data_sections import ImagesConfig
from rl_train.data.conversations import read_content
from rl_train.data.image_sources import ImageSource, image_parts, source_of
from rl_train.data.special_tokens import media_ids, written_names

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_SEED, _SIDE = 20_260_601, 32
"""Seed and side in pixels of random pictures."""
_THUMBNAIL: Final = 96
"""Largest side of a thumbnail in pixels."""
_INSTALL = "pip install 'rl-train[images]'"
_OF_CALLS = {"return_tensors", "device", "data_format", "input_data_format", "disable_grouping"}
"""Arguments of calls of an image processor that are not settings."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TextImage(RowImage):
    """An image of a row, with what a rendered conversation has for it.

    Attributes:
        mark: What a chat template writes for an image.
        text: What replaces it: the placeholders of this image, and the tokens around and between them.
        lead: Number of tokens of the text before the first placeholder.
        width: Width of the picture before it was resized, in pixels.
        height: Its height.
        thumbnail: A small JPEG file as a `data:` URL; empty if the picture is a file that can be read later.
    """

    mark: str
    text: str = field(repr=False)
    lead: int
    width: int
    height: int
    thumbnail: str = field(default="", repr=False)


class ImageReader:
    """The images of a model's rows. It is an attribute of the tokenizer, `image_reader`, and loads the processor at first use.

    Args:
        model: The name of the model.
        config: Limits of files and of memory.
        check: Called before the processor is loaded; raises if the run cannot use images.
    """

    def __init__(self, model: str, config: ImagesConfig, check: Callable[[], None] = lambda: None) -> None:
        self.model, self.config = model, config
        self._check = check
        self._processor: Any = None
        self._placeholder_id = -1
        self._joins_images: bool | None = None
        self._lock = threading.Lock()
        self._kept = OrderedDict[str, TextImage]()
        self._bytes_kept = 0
        self.largest: list[TextImage] = []
        """The images of the row whose tensors have the most bytes so far."""

    def __deepcopy__(self, memo: object) -> ImageReader:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageReader, (self.model, self.config)

    @property
    def placeholder_id(self) -> int | None:
        """The token that stands for features of images, by the model's config; None for a model of text."""
        ids = media_ids(self.model)
        return next((ids[key] for key in ("image_token_id", "image_token_index") if key in ids), None)

    def read(self, sources: Sequence[ImageSource], tokenizer: Any) -> list[TextImage]:
        """The images of a row.

        Args:
            sources: In the order of the conversation.
            tokenizer: The tokenizer of the run.

        Raises:
            DataError: A picture cannot be read.
            ConfigError: The model has no image processor, or the run cannot use images.
        """
        with self._lock:
            self._load(tokenizer)
            if len(sources) > 1:
                self._refuse_joined_images()
            images = [self._read(source, f"image {number}", tokenizer) for number, source in enumerate(sources)]
            self.largest = max(self.largest, images, key=lambda row: sum(map(num_bytes, row)))
            return images

    def random_pictures(self, count: int, tokenizer: Any) -> list[tuple[list[int], TextImage]]:
        """Tokens of pictures of random pixels, and the pictures; none if no row of the run had images so far."""
        if self._processor is None:
            return []
        from PIL import Image

        pixels = [derived_seeds(_SEED, number, _SIDE * _SIDE * 3).to(torch.uint8).numpy().tobytes() for number in range(count)]
        with self._lock:
            images = [self._processed(Image.frombytes("RGB", (_SIDE, _SIDE), each), tokenizer) for each in pixels]
        return [(encode(image.text, tokenizer), image) for image in images]

    def _read(self, source: ImageSource, what: str, tokenizer: Any) -> TextImage:
        if isinstance(source.value, TextImage):
            return source.value
        try:
            content = source.content(self.config.max_file_mib << 20, self.config.section)
            key = _digest(content)
            if (found := self._kept.get(key)) is None:
                picture = decoded(content, self.config)
                found = self._processed(picture, tokenizer)
                if source.path is None:
                    found = replace(found, thumbnail=thumbnail(picture))
                self._kept[key] = found
                self._bytes_kept += num_bytes(found)
        except DataError as error:
            raise DataError(f"{what} ({source}): {error}" if str(source) not in str(error) else f"{what}: {error}") from error
        self._kept.move_to_end(key)
        while self._bytes_kept > self.config.cache_mib << 20 and len(self._kept) > 1:
            self._bytes_kept -= num_bytes(self._kept.popitem(last=False)[1])
        return found

    def _processed(self, picture: Image, tokenizer: Any) -> TextImage:
        processor = self._processor
        try:
            text, inputs = _result(processor, [picture])
        except ValueError as error:  # such as an aspect ratio that the model does not support
            raise DataError(
                f"{type(processor).__name__} cannot use it ({picture.width} x {picture.height}): {error}"
            ) from error
        ids = encode(text[0], tokenizer)
        count = ids.count(self._placeholder_id)
        if not count:
            raise DataError(
                f"{type(processor).__name__} writes {text[0][:80]!r} for it, without the token {self._placeholder_id} that "
                f"stands for features of the image: the tokenizer is not that of {self.model}"
            )
        return TextImage(
            digest=inputs.digest(),
            start=0,
            length=len(ids),
            placeholder_id=self._placeholder_id,
            num_placeholders=count,
            inputs=inputs,
            mark=processor.image_token,
            text=text[0],
            lead=ids.index(self._placeholder_id),
            width=picture.width,
            height=picture.height,
        )

    def _load(self, tokenizer: Any) -> None:
        if self._processor is not None:
            return
        self._check()
        with with_key("policy.model_name"):
            placeholder = self.placeholder_id
            if placeholder is None:
                raise ConfigError(
                    f"Rows have images, but {self.model} is a model of text: its config names no token for images. Use a "
                    "vision-language model, or leave the images out (`images_key: null` in the section of the dataset)."
                )
            if not getattr(tokenizer, "chat_template", None):
                raise ConfigError(
                    f"Rows have images, but the tokenizer of {self.model} has no chat template to place them. Set "
                    "policy.tokenizer.chat_template."
                )
            processor = load_processor(self.model, tokenizer)
        if self.config.processor_kwargs:
            with with_key(f"{self.config.section}.processor_kwargs"):
                _change_settings(self.config.processor_kwargs, processor, self.model)
        self._processor, self._placeholder_id = processor, placeholder

    def _refuse_joined_images(self) -> None:
        """Refuse several images in a row if the processor treats a picture differently next to others."""
        if self._joins_images is None:
            from PIL import Image

            pictures = [Image.new("RGB", size, (90, 160, 30)) for size in ((96, 64), (64, 160))]
            texts, _ = _result(self._processor, pictures)
            self._joins_images = texts != [_result(self._processor, [picture])[0][0] for picture in pictures]
        if self._joins_images:
            raise DataError(
                f"it has several images, and {type(self._processor).__name__} gives a picture other tokens next to others "
                "in a conversation, which is not supported. Use rows with one image"
            )


def image_settings(model: str, tokenizer: Any) -> str:
    """What decides the pixels and placeholders of a picture: models with equal settings can share its tensors.

    Raises:
        ConfigError: As `load_processor`.
    """
    processor = load_processor(model, tokenizer)
    return json.dumps([processor.image_processor.to_dict(), media_ids(model)], sort_keys=True, default=str)


def load_processor(model: str, tokenizer: Any) -> Any:
    """The processor of a model for images, with Pillow; the parts for video and audio are left out.

    Args:
        model: The name of the model.
        tokenizer: Its tokenizer, which is not changed.

    Raises:
        ConfigError: The model has no processor, or a package is missing.
    """
    from copy import deepcopy

    try:
        import PIL.Image  # noqa: F401
        from transformers import AutoImageProcessor

        location, options = pretrained_location(model)
        images = AutoImageProcessor.from_pretrained(location, backend="pil", **options)
        kind = _processor_class(model)
        settings, _ = kind.get_processor_dict(location, **options)
        given = {"image_processor": images, "tokenizer": deepcopy(tokenizer)}
        made = kind.from_args_and_dict([given.get(name) for name in kind.get_attributes()], settings)
    except ImportError as error:
        raise ConfigError(
            f"Rows have images, and reading them needs a package that is not installed ({error}): {_INSTALL}"
        ) from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise ConfigError(
            f"Rows have images, but the image processor of {model} cannot be loaded: {reason}. A model folder needs its "
            "preprocessor_config.json and processor_config.json; copy them from where the model was published."
        ) from error
    if getattr(images, "backend", "pil") != "pil" or len(made.tokenizer) != len(tokenizer):
        what = f"{type(images).__name__} has no version that uses Pillow"
        what = what if getattr(images, "backend", "pil") != "pil" else "its processor adds tokens that the tokenizer lacks"
        raise ConfigError(f"Rows have images, but the image processor of {model} cannot be used: {what}.")
    return made


def _change_settings(kwargs: Mapping[str, Any], processor: Any, model: str) -> None:
    """Replace settings of the image processor of a processor.

    Raises:
        ConfigError: It has no such setting, or cannot use its value.
    """
    from PIL import Image

    kind, (location, options) = type(processor.image_processor), pretrained_location(model)
    known = sorted(kind.valid_kwargs.__annotations__.keys() - _OF_CALLS)
    for name in kwargs.keys() - known:
        raise ConfigError(f"{kind.__name__} of {model} has no setting {name!r}.{did_you_mean(name, known)} It has {known}.")
    try:
        processor.image_processor = kind.from_pretrained(location, **options, **kwargs)
        _result(processor, [Image.new("RGB", (_SIDE, _SIDE))])
    except Exception as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise ConfigError(f"{kind.__name__} of {model} cannot use {dict(kwargs)}: {reason}.") from error


def _processor_class(model: str) -> Any:
    """The class of a model's processor, which may lack what is not for images."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    names = []
    for file in ("processor_config.json", "preprocessor_config.json"):
        if (found := published_file(model, file)) is not None:
            names.append(json.loads(found.read_text(encoding="utf-8")).get("processor_class"))
    name = next(filter(None, names), None)
    base = getattr(transformers, name, None) if name else None
    base = base or PROCESSOR_MAPPING[type(read_model_config(model))]

    def check(self: Any, name: str, argument: Any) -> Any:
        return None if argument is None else base.check_argument_for_proper_class(self, name, argument)

    return type(base.__name__, (base,), {"check_argument_for_proper_class": check})


def _result(processor: Any, pictures: list[Image]) -> tuple[list[str], ImageInputs]:
    """What a processor writes for pictures of one conversation, and the model's arguments."""
    text = processor.image_token * len(pictures)
    result = processor(
        text=[text],
        images=[pictures],
        return_text_replacement_offsets=True,
        return_tensors="pt",
        text_kwargs={"add_special_tokens": False},
    )
    offsets = result.pop("text_replacement_offsets")[0]
    of_text = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
    tensors = {name: value for name, value in result.items() if name not in of_text and isinstance(value, torch.Tensor)}
    return [each["replacement"] for each in offsets], ImageInputs(tensors)


def num_bytes(image: RowImage) -> int:
    """Size of an image's tensors in bytes."""
    return sum(tensor.nbytes for tensor in image.inputs.values())


def read_images(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> tuple[list[dict[str, Any]], list[TextImage]]:
    """Read the images of a conversation.

    Args:
        messages: Contents may be lists of parts with images.
        tokenizer: With an `ImageReader`.

    Returns:
        The messages, whose image parts have `digest`, and `path` if the picture is a file; and the images in their order.

    Raises:
        DataError: The tokenizer has no reader, or a picture cannot be read.
    """
    read = [_joined(message) for message in messages]
    parts = image_parts(read)
    if not parts:
        return read, []
    reader = vars(tokenizer).get("image_reader")
    if reader is None:
        raise DataError("it has images, which are read only by runs, not with a tokenizer alone: see docs/images.md")
    sources = [source_of(part["image"], f"image {number}") for number, part in enumerate(parts)]
    images = reader.read(sources, tokenizer)
    written = iter([_reference(source, image) for source, image in zip(sources, images, strict=True)])
    for message in read:
        if isinstance(message.get("content"), list):
            message["content"] = [next(written) if part["type"] == "image" else part for part in message["content"]]
    return read, images


def _joined(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of any dataset, whose content is a text, or a list of parts if it has images."""
    role, content = message["role"], message.get("content")
    parts = isinstance(content, list)
    return {**message, "content": read_content(content, role, f"a message of the role {role!r}") if parts else content}


def _reference(source: ImageSource, image: TextImage) -> dict[str, Any]:
    """An image part for environments and logs: JSON, without pixels."""
    path = {} if source.path is None else {"path": str(source.path)}
    return {"type": "image", **path, "digest": image.digest, "width": image.width, "height": image.height}


def with_images(text: str, images: Sequence[RowImage], tokenizer: Any) -> str:
    """A rendered conversation with what stands for each image instead of what the template has written.

    Raises:
        DataError: The template has not written each image once.
    """
    if not images:
        return text
    texts = [image for image in images if isinstance(image, TextImage)]
    names = written_names(tokenizer)
    mark = names(texts[0].mark)
    pieces = text.split(mark)
    if len(pieces) - 1 != len(images):
        raise DataError(
            f"the conversation has {len(images)} images, but its text has {mark!r} {len(pieces) - 1} times: use a chat "
            "template that writes it once for each image (policy.tokenizer.chat_template), and no such text in messages"
        )
    return pieces[0] + "".join(names(image.text) + piece for image, piece in zip(texts, pieces[1:], strict=True))


def located(images: Sequence[RowImage], tokens: Sequence[int]) -> list[RowImage]:
    """The images with their places in the tokens of the conversation.

    Raises:
        DataError: The tokens do not have the placeholders of all images.
    """
    if not images:
        return []
    places = [place for place, token in enumerate(tokens) if token == images[0].placeholder_id]
    if len(places) != sum(image.num_placeholders for image in images):
        raise DataError(
            f"the conversation has {len(places)} placeholders for {len(images)} images that need "
            f"{sum(image.num_placeholders for image in images)}: a message has the text of a placeholder"
        )
    result: list[RowImage] = []
    for image in images:
        lead = image.lead if isinstance(image, TextImage) else 0
        result.append(replace(image, start=places[0] - lead))
        places = places[image.num_placeholders :]
    return result


def _digest(content: Any) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    if not isinstance(content, bytes):
        hashed.update(f"{content.mode} {content.size}".encode())
        content = content.tobytes()
    hashed.update(content)
    return hashed.hexdigest()


def decoded(content: Any, limits: ImagesConfig) -> Image:
    """The picture of a file as RGB.

    It is turned as its EXIF orientation says. Transparent parts become white, 16 bits become 8, CMYK and palettes become RGB.

    Args:
        content: The bytes of a file, or a PIL image.
        limits: The largest number of pixels.

    Raises:
        DataError: It is broken, truncated, animated, too large, or of another format.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        picture = Image.open(io.BytesIO(content), formats=_FORMATS) if isinstance(content, bytes) else content
        width, height = picture.size
        if width * height > limits.max_megapixels * 1_000_000:
            raise DataError(
                f"it has {width} x {height} pixels, but {limits.max_megapixels} million are allowed: save it smaller, or raise "
                f"{limits.section}.max_megapixels"
            )
        frames = getattr(picture, "n_frames", 1)
        if frames > 1 and picture.format != "MPO":  # photos of some phones, whose first frame is the photo
            raise DataError(f"it is animated or has several pages ({frames}): save one frame as a file")
        picture.load()
        if isinstance(content, bytes):
            ImageOps.exif_transpose(picture, in_place=True)
            return _as_rgb(picture)
        return _as_rgb(ImageOps.exif_transpose(picture))
    except UnidentifiedImageError as error:
        raise DataError(f"it is not an image of a supported format ({', '.join(_FORMATS)}), or it is corrupt") from error
    except Image.DecompressionBombError as error:
        raise DataError(f"it is refused: {error}") from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise DataError(f"it is corrupt or truncated ({error}): replace the file or remove the row") from error


def thumbnail(picture: Image) -> str:
    """A small JPEG file of a picture in RGB as a `data:` URL."""
    file, scale = io.BytesIO(), min(1.0, _THUMBNAIL / max(picture.size))
    width, height = (max(1, round(side * scale)) for side in picture.size)
    picture.resize((width, height), reducing_gap=2.0).save(file, "JPEG", quality=75)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _as_rgb(picture: Image) -> Image:
    from PIL import Image

    if picture.mode in ("I", "F") or picture.mode.startswith("I;16"):
        import numpy as np

        values = np.asarray(picture)
        if picture.mode == "F" or values.min() < 0 or values.max() > 0xFFFF:
            raise DataError(f"its values have 32 bits (mode {picture.mode}), whose range is unknown: save it with 8 bits")
        picture = Image.fromarray((values.astype(np.uint32) // 257).astype(np.uint8))
    if picture.has_transparency_data:
        layer = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", layer.size, (255, 255, 255, 255)), layer)
    return picture if picture.mode == "RGB" else picture.convert("RGB")
