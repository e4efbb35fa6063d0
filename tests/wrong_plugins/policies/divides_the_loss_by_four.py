"""Divides each loss by four."""

from wrong_plugins.policies.base import DividesTheLoss, PolicyOf


class Worker(DividesTheLoss):
    number = 4


class Policy(PolicyOf):
    worker = Worker
