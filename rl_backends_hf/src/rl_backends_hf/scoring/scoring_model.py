"""Computes one number per token: the model's backbone, then its head on selected positions.

`ScoringModel` is the module that is trained and the root of FSDP2.

A scalar head (`ValueScoring`) has the layout of Transformers' sequence classification: a matrix [1, H] without bias,
`score.weight`, applied to the backbone's last hidden states, as `AutoModelForSequenceClassification` creates it for
`num_labels=1`. On a causal LM it is initialized with zeros, so that all values are 0 before the first step, on every rank and
for any seed (Huang et al. 2024, https://arxiv.org/abs/2403.17031). Vision-language models for which Transformers has no such
class get one of the same layout: their backbone, with the tower, and the head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
import transformers
from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from rl_backends_base import ScoringInput
from rl_backends_hf.pictures import FAMILIES, call_with_pictures, has_rope_grid
from rl_core.backend import CLASSIFIER, Head, refuse_other_head
from rl_core.data.generation_io import SampledSets
from rl_core.errors import NotSupportedError, UserError


class ScoringModel(nn.Module, ABC):
    """A Transformers model that returns one number per token.

    Args:
        model: a backbone with a head.
    """

    column: ClassVar[str]
    """Name of the numbers."""
    shift: ClassVar[int]
    """Offset from a token to the hidden state that scores it: 1 for next-token logits, 0 for a value head."""
    extra_forward_methods: ClassVar[tuple[str, ...]] = ("model_logits",)
    """Methods besides `forward` that compute with the weights; FSDP2 must register them."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.autocast: torch.dtype | None = None
        """Data type that float32 adapters are computed in; their own by default."""
        self.tower: Sequence[nn.Module] = ()
        """Modules of the vision tower, if each rank has shards of their trained weights."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """V, number of token ids of the model's input."""

    @abstractmethod
    def apply_head(self, hidden: torch.Tensor, targets: torch.Tensor, sets: SampledSets | None = None) -> torch.Tensor:
        """The head's outputs [M] float32 for hidden states [M, H] and tokens [M].

        For next-token logits, targets may also be [M, 1 + K], and the result then has the same shape. Log-probabilities are
        those among the tokens of `sets`, if they are given.
        """

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden_index: torch.Tensor,
        targets: torch.Tensor,
        attention: Mapping[str, Any],
        sets: SampledSets | None = None,
    ) -> torch.Tensor:
        """The number [M] float32 of each scored token; see `ScoringInput`."""
        return self.apply_head(self.hidden_states(input_ids, hidden_index, attention), targets, sets)

    def hidden_states(self, input_ids: torch.Tensor, hidden_index: torch.Tensor, attention: Mapping[str, Any]) -> torch.Tensor:
        """The backbone's last hidden states [M, H]."""
        attention = {"use_cache": False, "return_dict": True, **attention}
        base, pictures = self.model.base_model, attention.pop("pictures", None)
        if has_rope_grid(self.model) and "position_ids" in attention and attention["position_ids"].ndim == 2:
            # Only of four axes, the model reads where packed rows begin: the first are the positions in the row.
            attention["position_ids"] = attention["position_ids"].expand(4, *attention["position_ids"].shape)
        with torch.autocast(input_ids.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            if pictures is None:
                output = base(input_ids=input_ids, **attention)
            else:
                output = call_with_pictures(base, self.model, input_ids, pictures, **attention)
        hidden: torch.Tensor = output.last_hidden_state
        if self.tower and torch.is_grad_enabled():
            # With FSDP2, all ranks must sum gradients of the same weights, also if only some rows have pictures.
            weights = (each for module in self.tower for each in module.parameters(recurse=False) if each.requires_grad)
            hidden = hidden + sum(each.flatten()[0] * 0 for each in weights)
        return hidden.reshape(-1, hidden.shape[-1]).index_select(0, hidden_index)

    def model_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The model's own output for its used tokens, float32, for rows [b, T] of equal length."""
        logits: torch.Tensor = self.model(input_ids=input_ids, use_cache=False).logits[..., : self.vocab_size].float()
        return logits

    def score(self, microbatch: ScoringInput) -> torch.Tensor:
        """Numbers [b, T] (with candidates [b, T, 1 + K]) float32 of a microbatch; 0.0 for tokens that were not scored."""
        scored = self(microbatch.input_ids, microbatch.hidden_index, microbatch.targets, microbatch.attention, microbatch.sets)
        return microbatch.scatter(scored)


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

    def apply_head(self, hidden: torch.Tensor, targets: torch.Tensor, sets: SampledSets | None = None) -> torch.Tensor:
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
    _register_classifier(config)
    brings_own = CLASSIFIER in " ".join(getattr(config, "auto_map", None) or ())
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and not brings_own:
        raise UserError(
            f"{name} has model type {config.model_type}, for which Transformers {transformers.__version__} has no "
            f"*{CLASSIFIER}, which a scalar head requires. Use a model of a family that has one, such as llama, mistral, "
            "qwen2, qwen3, gemma2 or gemma3."
        )
    config.num_labels = 1


def _register_classifier(config: PretrainedConfig) -> None:
    """Give Transformers a sequence classifier for a family of vision-language models, if it has none."""
    kind = type(config)
    if config.model_type not in FAMILIES or kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return
    whole: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind]

    def build(self: Any, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, config, *args, **kwargs)
        del self.lm_head
        setattr(self, HEAD_NAME, nn.Linear(config.get_text_config(decoder=True).hidden_size, config.num_labels, bias=False))

    def forward(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> SequenceClassifierOutputWithPast:
        hidden = self.base_model(input_ids=input_ids, **{**kwargs, "return_dict": True}).last_hidden_state
        padding, columns = self.config.get_text_config(decoder=True).pad_token_id, torch.arange(input_ids.shape[1])
        is_token = torch.ones_like(input_ids) if padding is None else (input_ids != padding).int()
        last = (is_token * columns.to(input_ids.device)).argmax(dim=-1)  # as Transformers' own classifiers
        logits = getattr(self, HEAD_NAME)(hidden)[torch.arange(len(last), device=last.device), last]
        return SequenceClassifierOutputWithPast(logits=logits)

    own = {"__init__": build, "forward": forward, "_tied_weights_keys": {}, "get_output_embeddings": lambda _: None}
    name = f"{kind.__name__.removesuffix('Config')}{CLASSIFIER}"
    for key in (whole.__name__, config.model_type):  # how files name the weights
        if (names := get_checkpoint_conversion_mapping(key)) is not None:
            register_checkpoint_conversion_mapping(name, names, overwrite=True)
            break
    AutoModelForSequenceClassification.register(kind, type(name, (whole,), {**own, "__module__": __name__}), exist_ok=True)


def init_head(model: PreTrainedModel) -> None:
    """Set a new head, which the model's folder does not have, to zeros.

    Raises:
        NotSupportedError: see `scalar_head`.
    """
    nn.init.zeros_(scalar_head(model).weight)
