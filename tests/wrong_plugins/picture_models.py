"""Engines and policies that confuse the pictures of rows; each is the Transformers one with another worker.

The rows of `TwoPictures` have pictures of equal size, so their tokens are equal and only what the model computes is wrong.
"""

import copy
from dataclasses import replace

import torch
from pictures.shapes import TwoShapes, shapes_of
from wrong_plugins.engines import EngineOf
from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.generation import HFGenerationWorker
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.backend import weights_of

IMAGES = ("images",)


class TwoPictures(TwoShapes):
    """Rows of two pictures, and a question about the second."""

    def __getitem__(self, index):
        record = super().__getitem__(index)
        content = record["messages"][0]["content"]
        content.insert(0, {"type": "image", "image": shapes_of(index + 10_000, seed=self.seed)[0]})
        return record


class PictureEngineOf(EngineOf):
    capabilities = EngineOf.capabilities + IMAGES


class PicturePolicyOf(PolicyOf):
    capabilities = PolicyOf.capabilities + IMAGES


def shown_instead(image, other):
    """`image` at its place with the pixels of `other`."""
    return replace(image, inputs=other.inputs, digest=other.digest)


class OtherImages(HFGenerationWorker):
    """Samples with other images of its rows; `other` takes and returns the column."""

    def generate(self, data, *, greedy=False):
        if data.get("images"):
            data["images"] = self.other(data["images"])
        return super().generate(data, greedy=greedy)


class RightWithPictures(PictureEngineOf):
    """The right control."""

    class Worker(OtherImages):
        def other(self, rows):
            return rows


class ShowsThePictureOfAnotherRow(PictureEngineOf):
    """Shows each row the pictures of another row."""

    class Worker(OtherImages):
        def other(self, rows):
            shown = [row for row in rows if row]
            others = iter([*shown[1:], *shown[:1]])
            return [row and [shown_instead(*pair) for pair in zip(row, next(others), strict=True)] for row in rows]


class ShowsPicturesInReversedOrder(PictureEngineOf):
    """Shows the last picture of a row first."""

    class Worker(OtherImages):
        def other(self, rows):
            return [row and [shown_instead(*pair) for pair in zip(row, row[::-1], strict=True)] for row in rows]


class ShowsThePicturesOfThePreviousCall(PictureEngineOf):
    """Keeps the pixels of its first call with as many rows."""

    class Worker(OtherImages):
        def other(self, rows):
            kept = self.__dict__.setdefault("_kept", {}).setdefault((len(rows), sum(map(len, filter(None, rows)))), rows)
            return [
                row and [shown_instead(*pair) for pair in zip(row, old, strict=True)]
                for row, old in zip(rows, kept, strict=True)
            ]


class CountsOnePlaceholderLess(PictureEngineOf):
    """Leaves out the last placeholder of each picture."""

    class Worker(OtherImages):
        def other(self, rows):
            return [
                row and [replace(each, length=each.length - 1, num_placeholders=each.num_placeholders - 1) for each in row]
                for row in rows
            ]


class PlacesPicturesOneTokenLater(PictureEngineOf):
    """Takes the place of a picture from the row without its first token."""

    class Worker(OtherImages):
        def other(self, rows):
            return [row and [each.moved(1) for each in row] for row in rows]


class KeepsItsFirstTower(PictureEngineOf):
    """Computes features with a copy of its first tower, but receives, digests and reports that of the policy."""

    class Worker(HFGenerationWorker):
        def setup(self):
            facts = super().setup()
            self._received = self.model
            sampling = copy.copy(self.model)
            sampling._modules = {**self.model._modules, "model": copy.copy(self.model.model)}
            sampling.model._modules = {**self.model.model._modules, "visual": copy.deepcopy(self.model.model.visual)}
            self.attach(sampling, self.config)
            return facts

        def replaceable_weights(self):
            return weights_of(self._received)


class SendsItsFirstTower(PicturePolicyOf):
    """Sends the trained language model with the tower that it was loaded with."""

    class worker(HFPolicyWorker):
        _first = None

        def iter_weights(self, names=None):
            if self._first is None:
                self._first = {name: tensor.clone() for name, tensor in super().iter_weights() if "visual" in name}
            return ((name, self._first.get(name, tensor)) for name, tensor in super().iter_weights(names))


class TrainsOnThePicturesOfAnotherRow(PicturePolicyOf):
    """Scores rows with their pictures, and trains them with those of another."""

    class worker(HFPolicyWorker):
        def train_step(self, microbatches, *args, **kwargs):
            return super().train_step(map(self.confused, microbatches), *args, **kwargs)

        def confused(self, rows):
            pairs = zip(rows["images"], rows["images"][::-1], strict=True)
            rows["images"] = [[shown_instead(*pair) for pair in zip(*row, strict=True)] for row in pairs]
            return rows


class ShiftsPositionsAfterPictures(PicturePolicyOf):
    """Gives every token after a picture the coordinates of the token before."""

    class worker(HFPolicyWorker):
        def _lay_out(self, rows, **how):
            if rows.images is not None and how.get("positions") is not None:
                positions = how["positions"].clone()
                for row, images in enumerate(rows.images):
                    end = images[-1].end if images else 0
                    if end:
                        positions[:, row, end:] -= 1
                how["positions"] = positions
            return super()._lay_out(rows, **how)


class EncodesPicturesTwiceAsBright(PicturePolicyOf):
    """Trains on pixels that were normalized again."""

    class worker(HFPolicyWorker):
        def form(self, rows):
            inputs = super().form(rows)
            if (pictures := inputs.attention.get("pictures")) is not None and torch.is_grad_enabled():
                calls = [({**given, "pixel_values": given["pixel_values"] * 2}, count) for given, count in pictures.calls]
                inputs.attention["pictures"] = replace(pictures, calls=calls)
            return inputs
