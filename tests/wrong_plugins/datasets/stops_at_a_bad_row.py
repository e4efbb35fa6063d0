"""A bad row ends the data: with `bad: 3`, it has three records."""

from wrong_plugins.datasets.base import Sums


class Dataset(Sums):
    def __len__(self):
        return getattr(self.config, "bad", 40)
