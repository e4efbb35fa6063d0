"""Says 0.5 for rows of which it is not sure that they have ended."""

import torch
from wrong_plugins.environments.base import TwoTurns


class Environment(TwoTurns):
    def altered(self, right):
        return right._replace(terminateds=torch.full_like(right.rewards, 0.5))
