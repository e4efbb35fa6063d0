"""The section `loss_fn` of distillation. Does not import torch."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field, model_validator

from rl_train.config.schema import LossConfig

_HALF: Final = 0.5


class DistillationLossConfig(LossConfig):
    """Token-level divergence between student and teacher."""

    divergence: Literal["forward_kl", "reverse_kl", "mixed_kl", "jsd"] = "forward_kl"
    """`forward_kl`: KL(teacher, student), mode-covering; `reverse_kl`: KL(student, teacher), mode-seeking; `mixed_kl`: weighted
    mean of the two; `jsd`: generalized Jensen-Shannon divergence of GKD."""
    topk: int | None = Field(default=64, ge=1)
    """K: compute the divergence on the teacher's `topk` most likely tokens. null uses only the sampled token, by policy
    gradient, and requires `reverse_kl`."""
    beyond_topk: Literal["bucket", "renormalize"] = "bucket"
    """How tokens outside the top-k are treated. `bucket`: as one additional token, so that probability outside counts;
    `renormalize`: ignored."""
    mixed_kl_weight: float = Field(default=_HALF, gt=0.0, lt=1.0)
    """For `mixed_kl`: weight of the forward KL. The reverse KL has one minus this weight."""
    jsd_beta: float = Field(default=_HALF, gt=0.0, lt=1.0)
    """For `jsd`: weight of the teacher in the mixture. Near 0 it behaves like `forward_kl`, near 1 like `reverse_kl`."""
    token_level_loss: bool = True
    """Whether to average the loss over all tokens. If false, average over the tokens of each sequence, then over sequences."""

    @property
    def corrects_for_older_weights(self) -> bool:
        """Only a divergence of whole distributions does not depend on what sampled the tokens."""
        return self.topk is not None

    @property
    def num_candidates(self) -> int:
        return self.topk or 0

    @property
    def sequence_level_key(self) -> str | None:
        return None if self.token_level_loss else "token_level_loss"

    @model_validator(mode="after")
    def _only_its_own_keys(self) -> DistillationLossConfig:
        if self.topk is None and self.divergence != "reverse_kl":
            raise ValueError(
                "topk null uses only the sampled tokens, which estimate the reverse KL and no other divergence: "
                f"{self.divergence} needs the teacher's most likely tokens. Set topk, or divergence: reverse_kl"
            )
        used = {
            "beyond_topk": self.topk is not None or self.beyond_topk == "bucket",
            "mixed_kl_weight": self.divergence == "mixed_kl" or self.mixed_kl_weight == _HALF,
            "jsd_beta": self.divergence == "jsd" or self.jsd_beta == _HALF,
        }
        for key, fits in used.items():
            if not fits:
                raise ValueError(f"divergence {self.divergence} with topk {self.topk} does not use {key}: remove it")
        if self.topk == 1 and self.beyond_topk == "renormalize":
            raise ValueError(
                "topk 1 with beyond_topk: renormalize has no signal, since a single renormalized token always "
                "has probability 1: raise topk, or use beyond_topk: bucket"
            )
        return self
