"""Datasets that break a promise of datasets; all have sums with answers, in parts that can be replaced."""

import random
import time

from rl_core.errors import DataError
from rl_core.interfaces.records import Dataset


class Sums(Dataset):
    def __init__(self, config):
        self.config = config

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return self.record(index)

    def record(self, index):
        draw = self.generator(index)
        first, second = draw.randint(0, 99), draw.randint(0, 99)
        return {
            "messages": [{"role": "user", "content": f"{first}+{second}="}, *self.answer(first + second)],
            "extra_env_info": {"expected_answer": str(first + second)},
        }

    def generator(self, index):
        return random.Random(index)

    def answer(self, number):
        return [{"role": "assistant", "content": str(number)}]


class Right(Sums):
    """The right control: record i is a function of i, and with `bad: 3`, row 3 is bad."""

    def record(self, index):
        if index == getattr(self.config, "bad", None):
            raise DataError(f"row {index}: there is no number")
        return super().record(index)


class AnswersWithNumbers(Sums):
    """The content of its answers is a number, not a text."""

    def answer(self, number):
        return [{"role": "assistant", "content": number}]


class CountsItsInstances(Sums):
    """The first dataset of a process gets other records than the second."""

    first = True

    def __init__(self, config):
        super().__init__(config)
        self.seed = "train" if CountsItsInstances.first else "validation"
        CountsItsInstances.first = False

    def generator(self, index):
        return random.Random(f"{self.seed} {index}")


class DrawsAtEachRead(Sums):
    """Every read draws the next numbers of a generator."""

    def __init__(self, config):
        super().__init__(config)
        self.draw = random.Random(0)

    def generator(self, index):
        return self.draw


class DrawsFromTheGlobalGenerator(Sums):
    """Draws its numbers from the generator of the process when it is created."""

    def __init__(self, config):
        super().__init__(config)
        self.offset = random.randint(0, 10**9)

    def generator(self, index):
        return random.Random(index + self.offset)


class HasSetsInItsPrompt(Sums):
    """A key of its prompt is a set, which cannot be written as JSON."""

    def record(self, index):
        record = super().record(index)
        record["messages"][0]["tags"] = {index}
        return record


class HashesTexts(Sums):
    """Seeds by `hash` of a text, which is another number in each process."""

    def generator(self, index):
        return random.Random(hash(f"row {index}"))


class NamesATaskByNumber(Sums):
    """Its tasks are numbers, but environments have names."""

    def record(self, index):
        return {**super().record(index), "task_name": index % 2}


class NotesTheTime(Sums):
    """The metadata has the time at which the record was read."""

    def record(self, index):
        record = super().record(index)
        record["extra_env_info"]["read_at"] = time.time()
        return record


class ReturnsFunctions(Sums):
    """The metadata has a function, which cannot be pickled."""

    def record(self, index):
        record = super().record(index)
        record["extra_env_info"]["score"] = lambda text: float(text == "7")
        return record


class ReturnsItsOwnRecords(Sums):
    """Returns the records that it keeps, so that a reader who changes one changes the dataset."""

    def __init__(self, config):
        super().__init__(config)
        self.records = [self.record(index) for index in range(len(self))]

    def __getitem__(self, index):
        return self.records[index]


class ShufflesAfterEachEpoch(Sums):
    """Another order of the records as soon as the last one was read."""

    epoch = 0

    def __getitem__(self, index):
        record = super().__getitem__(index)
        self.epoch += index == len(self) - 1
        return record

    def generator(self, index):
        return random.Random(f"{self.epoch} {index}")


class StopsAtABadRow(Sums):
    """A bad row ends the data: with `bad: 3`, it has three records."""

    def __len__(self):
        return getattr(self.config, "bad", 40)
