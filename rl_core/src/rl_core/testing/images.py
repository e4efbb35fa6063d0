"""Promises of policies and engines with the capability `images`, for a vision-language model of the test class."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import SkipTest
from unittest.mock import patch

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.images import RowImage
from rl_core.testing.promises import declares, promise
from rl_core.testing.reference import FIRST_BYTE, VOCABULARY, ReferenceModel


class PictureModel(ReferenceModel):
    """A model that reads images: `logits` takes those of a row as well, in the order of their tokens, or none."""

    @abstractmethod
    def picture(self, seed: int) -> tuple[list[int], RowImage]:
        """At most 10 tokens of a random picture, and the picture at its place in them; even seeds have equal tokens."""


@contextmanager
def _reading_pictures(tests: Any) -> Iterator[None]:
    """A block in which the component has loaded the class's `picture_model`."""
    if tests.picture_model is None:
        raise SkipTest("`picture_model` of the test class is not set")
    with patch.object(type(tests), "model", tests.picture_model), tests.created_with():
        yield


def _rows(model: PictureModel, *, seed: int) -> BatchedDataDict[Any]:
    """Rows with one picture, two and none; some have equal tokens and other pictures, as have rows of another seed."""
    generator, rows, shown = torch.Generator(), [], []
    for pictures in ((0,), (2,), (4, 6), (6, 4), (), (1,), (3, 8)):
        generator.manual_seed(len(pictures))
        words = torch.randint(FIRST_BYTE + 8, VOCABULARY - 2, (3, 4), generator=generator).tolist()
        tokens, images = words.pop(), []
        for picture in pictures:
            own, image = model.picture(picture + 20 * seed)
            images.append(image.moved(len(tokens)))
            tokens += own + words.pop()
        rows.append(torch.tensor(tokens))
        shown.append(images or None)
    ids, lengths = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])
    return BatchedDataDict(input_ids=ids, input_lengths=lengths, images=shown, sample_seeds=torch.arange(len(rows)))


@promise(
    "Each feature of a row's images replaces the token at its position; prompts that differ only in images are different.",
    applies=declares("images"),
    after="test_a_refit_brings_the_trained_weights",
)
def test_rows_are_sampled_with_their_images(self: Any) -> str:
    """The promise of engines."""
    with _reading_pictures(self):
        for seed in (0, 1, 2):
            if seed == 2 and not self.section().has_own_weights:
                self._refitted(seed=34)
            rows = _rows(self.model, seed=seed)
            found: str = self._compared(self._generate(rows), when="with images in its prompt", images=rows["images"])
    return found


@promise(
    "Each feature of a row's images replaces the token at its position; what computes features is trained, and sent.",
    applies=declares("images"),
    after=("test_a_step_moves_the_weights_as_that_of_the_reference", "test_sent_weights_are_the_trained_weights"),
)
def test_rows_are_trained_with_their_images(self: Any) -> str:
    """The promise of policies."""
    with _reading_pictures(self):
        for seed in (0, 1):
            rows = _rows(self.model, seed=seed)
            position = torch.arange(rows["input_ids"].shape[1])
            last = (position < rows["input_lengths"][:, None]) & (position >= rows["input_lengths"][:, None] - 3)
            rows |= {"token_mask": last.float(), "sample_mask": torch.ones(rows.size), "advantages": last * position.cos()}
            self._check_sent()
            self._check_weights("with images", rows=rows)
            self._stepped(rows)
            found: str = self._check_weights("with images, after a step", rows=rows)
    return found
