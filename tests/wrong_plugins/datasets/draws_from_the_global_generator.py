"""Draws its numbers from the generator of the process when it is created."""

import random

from wrong_plugins.datasets.base import Sums


class Dataset(Sums):
    def __init__(self, config):
        super().__init__(config)
        self.offset = random.randint(0, 10**9)

    def generator(self, index):
        return random.Random(index + self.offset)
