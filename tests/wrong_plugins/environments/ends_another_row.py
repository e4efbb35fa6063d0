"""Reports the end of each row for the row after it."""

import torch
from wrong_plugins.environments.base import TwoTurns


class Environment(TwoTurns):
    def altered(self, right):
        return right._replace(terminateds=torch.arange(len(right.terminateds)) % 2 == 1)
