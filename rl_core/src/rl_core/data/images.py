"""Images of rows: the tensors that a model's processor returns for a picture, and which tokens of the row stand for it.

A row with images has both its tokens, with the placeholders of each image, and the tensors that the model's forward pass takes
for it, in the column `images`: per row a list of `RowImage` in the order of their tokens, or None. Engine and policy get the
same tensors, so a picture is read and resampled once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rl_core.data.batched_data_dict import BorrowedColumn, arrived_column, portable_column
from rl_core.errors import DataError


class ImageInputs(dict[str, torch.Tensor]):
    """Arguments of the model's forward pass for one picture.

    Such as `pixel_values` [patches, values] float32 and `image_grid_thw` [1, 3] int64. Along axis 0, those of several pictures
    are concatenated. Must not be changed: rows that show the same picture share it, also after they were sent to another
    process in one batch.
    """

    def digest(self) -> str:
        """Hash of names, dtypes, shapes and values: 32 hexadecimal digits."""
        hashed = hashlib.blake2b(digest_size=16)
        for name in sorted(self):
            tensor = self[name].detach().cpu().contiguous()
            hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            hashed.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return hashed.hexdigest()

    def __reduce__(self) -> tuple[Callable[..., ImageInputs], tuple[Any, ...]]:
        return _arrived, ({name: portable_column(tensor) for name, tensor in self.items()},)

    def __deepcopy__(self, memo: object) -> ImageInputs:
        return self


def _arrived(columns: Mapping[str, Any]) -> ImageInputs:
    arrived = {name: arrived_column(column) for name, column in columns.items()}
    return ImageInputs({name: each.tensor() if isinstance(each, BorrowedColumn) else each for name, each in arrived.items()})


@dataclass(frozen=True, kw_only=True, eq=False)
class RowImage:
    """One image of a row.

    Attributes:
        digest: `ImageInputs.digest` of the inputs. Prompts with equal tokens and other digests are other prompts.
        start: Index in the row of the first token that belongs to the image, such as the one that opens it.
        length: Number of tokens that belong to it, with those that open, divide and close its tiles.
        placeholder_id: The token that the model replaces by a feature of the image. Such a token outside of all images was
            sampled, or is text.
        num_placeholders: How many of the image's tokens have that id.
        inputs: The model's arguments.
    """

    digest: str
    start: int
    length: int
    placeholder_id: int
    num_placeholders: int
    inputs: ImageInputs = field(repr=False)

    @property
    def end(self) -> int:
        """Index of the first token after the image."""
        return self.start + self.length

    def placeholders(self, tokens: Sequence[int]) -> list[int]:
        """Indices of the image's placeholders among the tokens of its row.

        Raises:
            DataError: The image is outside of the row, or has another number of placeholders there than it says.
        """
        span = range(max(self.start, 0), min(self.end, len(tokens)))
        places = [at for at in span if tokens[at] == self.placeholder_id]
        if len(places) != self.num_placeholders or self.start < 0:
            raise DataError(
                f"An image has {self.num_placeholders} placeholders (id {self.placeholder_id}), but its tokens "
                f"{self.start} to {self.end - 1} of the row contain {len(places)}. Positions in `images` are those of the row."
            )
        return places

    def moved(self, offset: int) -> RowImage:
        """The same image, starting `offset` tokens later."""
        return replace(self, start=self.start + offset)

    def __deepcopy__(self, memo: object) -> RowImage:
        return self


def prompt_identity(images: Sequence[RowImage] | None) -> tuple[tuple[int, str], ...]:
    """What distinguishes prompts with equal tokens: position and digest of each image; empty without images."""
    return tuple((image.start, image.digest) for image in images or ())
