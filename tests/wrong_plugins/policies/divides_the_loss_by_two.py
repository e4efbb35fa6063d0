"""Divides each loss by two."""

from wrong_plugins.policies.base import DividesTheLoss, PolicyOf


class Worker(DividesTheLoss):
    number = 2


class Policy(PolicyOf):
    worker = Worker
