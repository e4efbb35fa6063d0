"""Moved to `rl_train.trainers.trainer_data`."""

import warnings

from rl_train.trainers.trainer_data import *  # noqa: F403

warnings.warn("rl_train.runtime.python_data has moved to rl_train.trainers.trainer_data.", DeprecationWarning, stacklevel=2)
