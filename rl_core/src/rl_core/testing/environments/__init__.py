"""Environments without a model: rollouts with given answers, and the checks of the conformance kit."""
