"""The metadata has a function, which cannot be pickled."""

from wrong_plugins.datasets.base import Sums


class Dataset(Sums):
    def record(self, index):
        record = super().record(index)
        record["extra_env_info"]["score"] = lambda text: float(text == "7")
        return record
