"""Moved to `rl_train.trainers.trainers`."""

import warnings

from rl_train.trainers.trainers import *  # noqa: F403

warnings.warn("rl_train.runtime.trainers has moved to rl_train.trainers.trainers.", DeprecationWarning, stacklevel=2)
