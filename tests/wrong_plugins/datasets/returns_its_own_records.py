"""Returns the records that it keeps, so that a reader who changes one changes the dataset."""

from wrong_plugins.datasets.base import Sums


class Dataset(Sums):
    def __init__(self, config):
        super().__init__(config)
        self.records = [self.record(index) for index in range(len(self))]

    def __getitem__(self, index):
        return self.records[index]
