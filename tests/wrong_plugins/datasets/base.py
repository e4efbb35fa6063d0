"""What all datasets here have in common: sums with answers, whose parts can be replaced."""

import random

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
