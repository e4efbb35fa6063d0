"""The content of its answers is a number, not a text."""

from wrong_plugins.datasets.base import Sums


class Dataset(Sums):
    def answer(self, number):
        return [{"role": "assistant", "content": number}]
