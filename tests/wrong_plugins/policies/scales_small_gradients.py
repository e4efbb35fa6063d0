"""Scales every gradient to `max_grad_norm`, also smaller ones."""

import torch
from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Optimizer(torch.optim.SGD):
    def __init__(self, parameters, max_grad_norm, **kwargs):
        super().__init__(parameters, **kwargs)
        self.max_grad_norm = max_grad_norm

    def step(self, closure=None):
        weights = self.param_groups[0]["params"]
        norm = torch.stack([weight.grad.norm() for weight in weights]).norm()
        for weight in weights:
            weight.grad *= self.max_grad_norm / norm
        return super().step(closure)


class Policy(PolicyOf):
    worker = HFPolicyWorker

    def __init__(self, *, config, **kwargs):
        if config.max_grad_norm is not None:
            kwargs_of_step = {**config.optimizer.kwargs, "max_grad_norm": config.max_grad_norm}
            optimizer = type(config.optimizer)(name=f"{__name__}.Optimizer", kwargs=kwargs_of_step)
            config = config.model_copy(update={"optimizer": optimizer})
        super().__init__(config=config, **kwargs)
