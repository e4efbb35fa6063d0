"""Moved to `rl_train.logprob_agreement`."""

import warnings

from rl_train.logprob_agreement import *  # noqa: F403

warnings.warn("rl_train.validation has moved to rl_train.logprob_agreement.", DeprecationWarning, stacklevel=2)
