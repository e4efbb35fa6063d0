"""Images of requests with token ids: the tensors that the client's model computes with, so nothing here runs a processor."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import load

from rl_core.data.images import ImageInputs, RowImage
from rl_core.errors import DataError
from rl_serve.errors import ApiError

if TYPE_CHECKING:
    from rl_serve.served_model import ServedModel


class TokenImage(BaseModel):
    """An image of a prompt of token ids; the fields are those of `rl_core.data.images.RowImage`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    digest: str
    start: int = Field(ge=0)
    length: int = Field(ge=1)
    placeholder_id: int = Field(ge=0)
    num_placeholders: int = Field(ge=1)
    tensors: str
    """The model's arguments: a file in the format of safetensors, in base64."""

    def read(self, where: str) -> RowImage:
        """The image.

        Raises:
            ApiError: the tensors cannot be read, are not finite, or are not those of the digest.
        """
        try:
            inputs = ImageInputs(load(base64.b64decode(self.tensors, validate=True)))
        except (SafetensorError, binascii.Error, ValueError) as error:
            reason = f"{where}.tensors is not a file in the format of safetensors in base64: {error}."
            raise ApiError(400, reason, param=f"{where}.tensors", code="invalid_image") from error
        if (found := inputs.digest()) != self.digest:
            reason = (
                f"{where}.tensors have the digest {found}, and {where}.digest is {self.digest}: they were changed on the way."
            )
            raise ApiError(400, reason, param=f"{where}.digest", code="invalid_image")
        if not all(bool(tensor.isfinite().all()) for tensor in inputs.values() if torch.is_floating_point(tensor)):
            reason = f"{where}.tensors have values that are NaN or infinite."
            raise ApiError(400, reason, param=f"{where}.tensors", code="invalid_image")
        return RowImage(**self.model_dump(exclude={"tensors"}), inputs=inputs)


def read_token_images(images: Sequence[TokenImage], token_ids: Sequence[int], model: ServedModel) -> list[RowImage]:
    """The images of a prompt of token ids, each at its placeholders.

    Raises:
        ApiError: the model reads none, there are too many, one cannot be read or is not at its tokens, or they are those of
            another model.
    """
    if not model.reads_images:
        raise ApiError(400, f"{model.name} does not read images.", param="images", code="unsupported_parameter")
    if len(images) > model.max_images:
        reason = f"The prompt has {len(images)} images: at most {model.max_images} are allowed (images.max_images)."
        raise ApiError(400, reason, param="images")
    own = model.tokenizer.image_reader.placeholder_id
    rows = []
    for number, image in enumerate(images):
        where = f"images[{number}]"
        if image.placeholder_id != own:
            raise ApiError(
                400,
                f"{where}.placeholder_id is {image.placeholder_id}, and the token for images of {model.name} is {own}: client "
                "and server have different models.",
                param=f"{where}.placeholder_id",
                code="invalid_image",
            )
        rows.append(image.read(where))
        try:
            rows[-1].placeholders(token_ids)
        except DataError as error:
            raise ApiError(400, f"{where}: {error}", param=where, code="invalid_image") from error
    return rows
