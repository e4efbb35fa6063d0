"""Another order of the records as soon as the last one was read."""

import random

from wrong_plugins.datasets.base import Sums


class Dataset(Sums):
    epoch = 0

    def __getitem__(self, index):
        record = super().__getitem__(index)
        self.epoch += index == len(self) - 1
        return record

    def generator(self, index):
        return random.Random(f"{self.epoch} {index}")
