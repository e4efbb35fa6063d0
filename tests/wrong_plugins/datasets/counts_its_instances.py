"""The first dataset of a process gets other records than the second."""

import random

from wrong_plugins.datasets.base import Sums


class Dataset(Sums):
    first = True

    def __init__(self, config):
        super().__init__(config)
        self.seed = "train" if Dataset.first else "validation"
        Dataset.first = False

    def generator(self, index):
        return random.Random(f"{self.seed} {index}")
