"""What the saved config of a model says that it ends in, and whether that can be what a section asks for; loads nothing."""

from __future__ import annotations

from typing import Any, Final, Literal

from rl_core.errors import UserError

Head = Literal["tokens", "scalar"]
"""`policy.head`."""

CLASSIFIER: Final = "ForSequenceClassification"
"""How Transformers' classes end that have a head of numbers for a sequence."""


def classifier_of(config: Any) -> str | None:
    """The class of a classifier that a model was saved as; None where it was saved as another.

    Args:
        config: the model's Hugging Face config.
    """
    return next((name for name in getattr(config, "architectures", None) or () if name.endswith(CLASSIFIER)), None)


def refuse_other_head(config: Any, head: Head, *, name: str) -> None:
    """Make sure that a saved model can end in such a head; a causal LM can end in either.

    Args:
        config: the model's Hugging Face config.
        head: `policy.head`.
        name: the model's, for errors.

    Raises:
        UserError: it was saved with another one.
    """
    classifier = classifier_of(config)
    if classifier is None:
        return
    if head == "tokens":
        raise UserError(
            f"{name} is a {classifier}: it ends in scores of whole sequences and predicts no tokens. It serves as a value or "
            "reward model (`head: scalar`); a policy needs a causal LM."
        )
    if config.num_labels != 1:
        raise UserError(
            f"{name} is a {classifier} of {config.num_labels} labels, and a scalar head has one. Give a reward or value model "
            "(`num_labels` 1), or a causal LM, on which a fresh head is put."
        )
