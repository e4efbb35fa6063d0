"""Engines that sample rows with images wrongly; their tokens, lengths and versions are right."""

import copy
from dataclasses import replace

import torch
from wrong_plugins.engines import EngineOf

from rl_backends_hf.generation import HFGenerationWorker


class ImageEngineOf(EngineOf):
    capabilities = (*EngineOf.capabilities, "images")


class Right(ImageEngineOf):
    """The right control."""

    class Worker(HFGenerationWorker):
        pass


class ChangesImages(HFGenerationWorker):
    """Computes each row with what `changed` returns instead of its images."""

    def changed(self, images, others):
        raise NotImplementedError

    def prefill(self, rows):
        shown = [row.prompt.images for row in rows]
        for row, others in zip(rows, [*shown[1:], *shown[:1]], strict=True):
            row.prompt = replace(row.prompt, images=self.changed(row.prompt.images, others))
        return super().prefill(rows)


class ShowsThePictureOfAnotherRow(ImageEngineOf):
    """Computes a row with the pictures of the next one."""

    class Worker(ChangesImages):
        def changed(self, images, others):
            fits = [image.num_placeholders for image in images] == [image.num_placeholders for image in others]
            return [replace(other, start=image.start) for image, other in zip(images, others, strict=True)] if fits else images


class SwapsThePicturesOfARow(ImageEngineOf):
    """Computes with the pictures of a row in the reverse order."""

    class Worker(ChangesImages):
        def changed(self, images, others):
            swapped = reversed(images)
            return [replace(other, start=image.start) for image, other in zip(images, swapped, strict=True)]


class PlacesFeaturesOneTokenLater(ImageEngineOf):
    """Moves the features of each picture by one token."""

    class Worker(HFGenerationWorker):
        def build(self):
            model = super().build()
            call = model.model.get_image_features

            def encode(**given):
                output = call(**given)
                output.pooler_output = tuple(each.roll(1, 0) for each in output.pooler_output)
                return output

            model.model.get_image_features = encode
            return model


class ForgetsThePositionsOfPictures(ImageEngineOf):
    """Numbers the tokens after a picture as if it were text, while decoding."""

    class Worker(HFGenerationWorker):
        def prefill(self, rows):
            logits = super().prefill(rows)
            for row in rows:
                row.state = None
            return logits


class KeepsTheFirstTower(ImageEngineOf):
    """Computes with the vision tower of its start, whatever it receives."""

    class Worker(HFGenerationWorker):
        def build(self):
            model = super().build()
            self.first = {name: each.clone() for name, each in model.named_parameters() if ".visual." in name}
            return model

        def weights_changed(self):
            super().weights_changed()
            with torch.no_grad():
                for name, each in self.model.named_parameters():
                    if name in self.first:
                        each.copy_(self.first[name])


class EncodesPicturesWithTheFirstTower(ImageEngineOf):
    """Holds and reports what it receives, but computes features with a copy of the first tower."""

    class Worker(HFGenerationWorker):
        def build(self):
            model = super().build()
            first = copy.deepcopy(model.model.visual)
            call = model.model.get_image_features

            def encode(**given):
                now, model.model.visual = model.model.visual, first
                try:
                    return call(**given)
                finally:
                    model.model.visual = now

            model.model.get_image_features = encode
            return model
