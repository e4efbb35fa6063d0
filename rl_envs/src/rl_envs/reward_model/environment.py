"""The environment `reward_model`: the reward of a conversation is its score by a trained reward model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.tokenizer import load_tokenizer
from rl_core.environments import Score, ScorerEnvironment
from rl_core.errors import ConfigError, DataError
from rl_core.interfaces.environment import Conversation
from rl_envs.config import RewardModelEnvironmentConfig
from rl_envs.reward_model.scorer import RewardModelScorer, reward_tokens

SCORE_KEY = "reward_model"
"""Metadata key of the score."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RewardModelEnvironment(ScorerEnvironment):
    """Scores whole conversations with the reward model's tokenizer and chat template; every row ends.

    The reward is `scale * (score - shift)`. `step` adds `reward_model` to a row's metadata: the `score`, and `is_cut` if the
    row was longer than `max_length`. Equal rows in equal batches have equal rewards.

    Args:
        config: `RewardModelEnvironmentConfig`, or a dict of its keys. `num_workers` is the number of
            environment workers; each has a copy of the model.

    Raises:
        UserError: `model_name` is not a reward model, or the device is not available.
    """

    config_class = RewardModelEnvironmentConfig
    config: RewardModelEnvironmentConfig

    def __init__(self, config: RewardModelEnvironmentConfig | Mapping[str, Any]) -> None:
        super().__init__(config)
        self._scorer = RewardModelScorer(
            self.config.model_name,
            dtype=_DTYPES[self.config.precision],
            device=_device(self.config.device),
            batch_size=self.config.batch_size,
        )
        self._tokenizer = load_tokenizer(
            self.config.tokenizer_name or self.config.model_name,
            chat_template=self.config.chat_template,
            chat_template_kwargs=self.config.chat_template_kwargs,
        )

    def score_batch(self, message_log_batch: list[Conversation], metadata: list[Any]) -> list[Score]:
        """Score B conversations, prompt and answers together.

        Raises:
            DataError: A conversation has no tokens.
        """
        rows = [reward_tokens(log, self._tokenizer) for log in message_log_batch]
        for log, row in zip(message_log_batch, rows, strict=True):
            if not row:
                raise DataError(f"A conversation has no tokens, so it cannot be scored: {log}")
        longest = self.config.max_length
        scores = self._scorer.scores([row[-longest:] for row in rows])
        rewards = self.config.scale * (scores - self.config.shift)
        return [
            Score(reward, metadata={SCORE_KEY: {"score": score, "is_cut": len(row) > longest}}, reply=f"{score:.3f}")
            for row, score, reward in zip(rows, scores.tolist(), rewards.tolist(), strict=True)
        ]

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """`score_mean`, `score_std`, `score_min`, `score_max`, before shift and scale, and `cut_frac`."""
        infos = [info[SCORE_KEY] for info in batch["extra_env_info"]]
        scores = torch.tensor([each["score"] for each in infos])
        return batch, {
            "score_mean": float(scores.mean()),
            "score_std": float(scores.std(correction=0)),
            "score_min": float(scores.min()),
            "score_max": float(scores.max()),
            "cut_frac": sum(each["is_cut"] for each in infos) / len(infos),
        }


def _device(wanted: str) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device: cuda, but torch {torch.__version__} sees no GPU in the environment's process. Use auto, or give the "
            "process a GPU."
        )
    return torch.device(wanted)
