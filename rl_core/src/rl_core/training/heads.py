"""Compares the head type in a model's saved config with the one that a section requests."""

from __future__ import annotations

from typing import Any, Final, Literal

from rl_core.errors import UserError

Head = Literal["tokens", "scalar"]
"""`policy.head`."""

CLASSIFIER: Final = "ForSequenceClassification"
"""Suffixes of Transformers' classes with a head for sequence scores."""


def refuse_other_head(config: Any, head: Head, *, name: str) -> None:
    """Check that a saved model, by its Hugging Face config, supports this head; a causal LM supports both.

    Raises:
        UserError: it was saved with another head.
    """
    classifier = next((name for name in getattr(config, "architectures", None) or () if name.endswith(CLASSIFIER)), None)
    if classifier is None:
        return
    if head == "tokens":
        raise UserError(
            f"{name} is a {classifier}, which scores whole sequences and does not predict tokens. It can be a value or "
            "reward model (`head: scalar`); a policy must be a causal LM.",
            key="head",
        )
    if config.num_labels != 1:
        raise UserError(
            f"{name} is a {classifier} with {config.num_labels} labels, but a scalar head has one. Use a reward or value model "
            "(`num_labels` 1), or a causal LM, which gets a new head."
        )
