"""The section `loss_fn` of distillation; imports no torch."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field, model_validator

from rl_core.config.schema import LossConfig

_HALF: Final = 0.5


class DistillationLossConfig(LossConfig):
    """How far the student is from its teacher, token by token."""

    divergence: Literal["forward_kl", "reverse_kl", "mixed_kl", "jsd"] = "forward_kl"
    """`forward_kl`: KL(teacher, student), which covers all that the teacher would say; `reverse_kl`: KL(student, teacher),
    which says nothing that the teacher would not; `mixed_kl`: a weighted mean of the two; `jsd`: the generalised
    Jensen-Shannon divergence of GKD."""
    topk: int | None = Field(default=64, ge=1)
    """K: compare the two on the teacher's so many likeliest tokens; null compares them on the sampled token alone, by policy
    gradient, for `reverse_kl`."""
    beyond_topk: Literal["bucket", "renormalize"] = "bucket"
    """What all other tokens are: `bucket`: one more, so that mass outside costs; `renormalize`: nothing."""
    mixed_kl_weight: float = Field(default=_HALF, gt=0.0, lt=1.0)
    """`mixed_kl`: weight of the forward KL; the reverse KL has the rest."""
    jsd_beta: float = Field(default=_HALF, gt=0.0, lt=1.0)
    """`jsd`: the teacher's share of the mixture; near 0 like `forward_kl`, near 1 like `reverse_kl`."""
    token_level_loss: bool = True
    """A mean over all tokens; else a mean of each sequence's own mean."""

    @property
    def num_candidates(self) -> int:
        return self.topk or 0

    @model_validator(mode="after")
    def _only_its_own_keys(self) -> DistillationLossConfig:
        if self.topk is None and self.divergence != "reverse_kl":
            raise ValueError(
                f"topk null compares the sampled tokens alone, which tells the reverse KL and no other: {self.divergence} "
                "needs the teacher's likeliest tokens. Set topk, or divergence: reverse_kl"
            )
        belongs = {
            "beyond_topk": self.topk is not None or self.beyond_topk == "bucket",
            "mixed_kl_weight": self.divergence == "mixed_kl" or self.mixed_kl_weight == _HALF,
            "jsd_beta": self.divergence == "jsd" or self.jsd_beta == _HALF,
        }
        for key, fits in belongs.items():
            if not fits:
                raise ValueError(f"divergence {self.divergence} with topk {self.topk} has no use for {key}: remove it")
        if self.topk == 1 and self.beyond_topk == "renormalize":
            raise ValueError("one token renormalised has probability 1 under anybody: raise topk, or use beyond_topk: bucket")
        return self
