"""Creates the loss of a run, whose class may be a user's."""

from __future__ import annotations

from rl_core.interfaces.loss import LossFunction
from rl_core.plugins.component import Component
from rl_train.config.schema import LossConfig
from rl_train.user_code import reporting_errors


def make_loss(component: Component, section: LossConfig) -> LossFunction:
    """The loss of a section.

    Raises:
        WrongKindError: its class is not a `LossFunction`.
        ConfigError: its constructor raised.
    """
    loss_class = component.load(expect=LossFunction)
    with reporting_errors(f"The loss {component.name}", loss_class):
        loss: LossFunction = loss_class(section)
    return loss
