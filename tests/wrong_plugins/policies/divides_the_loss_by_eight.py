"""Divides each loss by eight."""

from wrong_plugins.policies.base import DividesTheLoss, PolicyOf


class Worker(DividesTheLoss):
    number = 8


class Policy(PolicyOf):
    worker = Worker
