"""Creates the loss of a run, whose class may be a user's."""

from __future__ import annotations

from rl_core.errors import ConfigError, with_key
from rl_core.interfaces.loss import LossFunction
from rl_core.plugins.component import Component
from rl_core.plugins.registry import Registry
from rl_train.config.schema import LossConfig, RunConfig
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


def loss_of(config: RunConfig, registry: Registry) -> LossFunction:
    """The loss of a run.

    Raises:
        ConfigError: the config names none and the algorithm has no default, or its constructor raised.
        WrongKindError: its class is not a loss.
    """
    name = config.loss_fn.name or config.algorithm.default_loss
    if name is None:
        raise ConfigError(f"loss_fn.name is required. {config.algorithm_name} has no default loss.")
    with with_key("loss_fn"):
        return make_loss(registry.find("loss", name), config.loss_fn)
