"""Its tasks are numbers, but environments have names."""

from wrong_plugins.datasets.base import Sums


class Dataset(Sums):
    def record(self, index):
        return {**super().record(index), "task_name": index % 2}
