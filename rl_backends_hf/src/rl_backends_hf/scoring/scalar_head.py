"""A model with a scalar head: one number per token, in the layout of Transformers' sequence classification.

The head is a matrix [1, H] without bias, `score.weight`, applied to the backbone's last hidden states, as
`AutoModelForSequenceClassification` creates it for `num_labels=1`. On a causal LM it is initialized with zeros, so that all
values are 0 before the first step, on every rank and for any seed (Huang et al. 2024, https://arxiv.org/abs/2403.17031).
"""

from __future__ import annotations

from typing import Final

import torch
import transformers
from torch import nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PretrainedConfig, PreTrainedModel

from rl_backends_hf.scoring.scoring_model import ScoringModel
from rl_core.backend import CLASSIFIER, Head, refuse_other_head
from rl_core.errors import NotSupportedError, UserError

HEAD_NAME: Final = "score"


class ValueScoring(ScoringModel):
    """A model that returns its scalar head's value after each token.

    Args:
        model: a sequence classifier with one label.

    Raises:
        NotSupportedError: its head is not one row without bias on a backbone.
    """

    column = "values"
    shift = 0

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        scalar_head(model)

    @property
    def head(self) -> nn.Linear:
        """The scalar head."""
        return scalar_head(self.model)

    @property
    def vocab_size(self) -> int:
        """V, number of rows of the embedding."""
        size: int = self.model.config.get_text_config().vocab_size
        return size

    def apply_head(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Value [M] float32 of each hidden state; computed in float32, because bfloat16 has steps of about 0.01 near 2."""
        return nn.functional.linear(hidden.float(), self.head.weight.float()).squeeze(-1)


def scalar_head(model: PreTrainedModel) -> nn.Linear:
    """The head of a sequence classifier with one label.

    Raises:
        NotSupportedError: its head is not one row without bias on a backbone.
    """
    head = getattr(model, HEAD_NAME, None)
    shapes = {name: tuple(tensor.shape) for name, tensor in head.named_parameters()} if isinstance(head, nn.Linear) else {}
    if not isinstance(head, nn.Linear) or shapes != {"weight": (1, head.in_features)} or model.base_model is model:
        raise NotSupportedError(
            f"{type(model).__name__} has no head `{HEAD_NAME}` with one row and no bias on a backbone, as decoder classifiers "
            "have (LlamaForSequenceClassification, Qwen2ForSequenceClassification...). Use a model of such a family."
        )
    return head


def prepare_head(config: PretrainedConfig, head: Head, *, name: str) -> None:
    """Check that a model can be loaded with this head, and set the head in its config.

    Args:
        config: the model's config; changed in place.
        head: `policy.head`.
        name: the model's, for errors.

    Raises:
        UserError: the model was saved with another head, or its family has no scalar head.
    """
    refuse_other_head(config, head, name=name)
    if head == "tokens":
        return
    brings_own = CLASSIFIER in " ".join(getattr(config, "auto_map", None) or ())
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and not brings_own:
        raise UserError(
            f"{name} has model type {config.model_type}, for which Transformers {transformers.__version__} has no "
            f"*{CLASSIFIER}, which a scalar head requires. Use a model of a family that has one, such as llama, mistral, "
            "qwen2, qwen3, gemma2 or gemma3."
        )
    config.num_labels = 1


def init_head(model: PreTrainedModel) -> None:
    """Set a new head, which the model's folder does not have, to zeros.

    Raises:
        NotSupportedError: see `scalar_head`.
    """
    nn.init.zeros_(scalar_head(model).weight)
