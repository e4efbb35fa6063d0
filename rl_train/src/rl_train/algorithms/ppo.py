"""PPO: samples answers, estimates advantages with a critic, and takes clipped policy-gradient steps; also trains the critic.

Follows https://arxiv.org/abs/1707.06347 with the advantages of https://arxiv.org/abs/1506.02438, in the form used
for language models (https://arxiv.org/abs/1909.08593): a token is an action, the reward is that of the last token, and each
token may have a KL penalty to the reference policy. Departures:
  1. policy and critic are two models with separate optimizers, not one model with a weighted sum of losses;
  2. no KL penalty unless `loss_fn` enables it, in the reward or in the loss, with a constant weight unless
     `loss_fn.adaptive_kl` adapts it; no entropy bonus;
  3. tokens between turns are not actions and are not discounted: a token leads to the next *sampled* one;
  4. the length limit is part of the task: a truncated answer has no further reward, unless `gae.bootstrap_truncated` is set;
  5. advantages are normalized over all tokens of a step, not within each minibatch;
  6. the scoring pass is skipped if a step makes one optimizer step (the ratio is 1) or the ratio is to the sampler.

Notation: P prompts, G samples per prompt, B = P·G rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.policy import ValueInterface
from rl_core.testing.outputs.models import scored
from rl_train.algorithms.estimators import token_penalties, whiten
from rl_train.algorithms.losses.value import MseValueLossFn
from rl_train.algorithms.policy_configs import GAEConfig, PPOConfig
from rl_train.algorithms.rewards import RewardShaping, clip_advantages, kl_penalty
from rl_train.algorithms.sft import train_epochs
from rl_train.rollouts.advantages import are_equal
from rl_train.run import Run
from rl_train.step import Batch, declared, log, optimize, refit, rollouts, score, validate


def train(config: PPOConfig, run: Run) -> None:
    """Train `run.policy` and `run.value` up to step `config.max_num_steps`, starting after `run.first_step`."""
    config.check_warmup(config.max_num_steps)
    critic, value_loss_fn = declared(run.value, "a critic"), MseValueLossFn(config.value_loss)
    shape, penalize = RewardShaping(config, run.config), kl_penalty(run)

    validate(run, step=0)
    for step in run.steps():
        refit(run)

        batch = rollouts(run, step, config.num_prompts_per_step)
        run.metrics.add(shape(batch))

        score(run, batch, also=penalize.required_keys)
        run.metrics.add(penalize(batch))
        add_values(run, batch)

        targets = compute_gae_targets(batch, config.gae)
        batch["returns"] = targets.returns
        batch["advantages"], clipped = clip_advantages(targets.advantages, batch["token_mask"], config)
        run.metrics.add(targets.metrics | clipped)

        epochs = partial(train_epochs, passes=config.ppo_epochs, seed=(config.seed, step))
        train_critic(run, batch, partial(epochs, critic, value_loss_fn))
        if step > config.critic_warmup_steps:
            optimize(run, batch, partial(epochs, run.policy, run.loss_fn))

        log(run, batch, step)
        validate(run, step)


def add_values(run: Run, batch: Batch) -> None:
    """Add `prev_values`, the critic's value after each token."""
    critic: ValueInterface = declared(run.value, "a critic")
    with run.timed("score"):
        run.free_memory_for(critic)
        batch["prev_values"] = scored(critic.get_values, batch)["values"]


def train_critic(run: Run, batch: Batch, train: Callable[[Batch], Mapping[str, Any]]) -> None:
    """Train the critic on the returns of the batch."""
    critic: ValueInterface = declared(run.value, "a critic")
    with run.timed("train_value"):
        critic.prepare_for_training()
        run.metrics.add(critic_metrics(train(critic_rows(batch))))
        critic.finish_training()


@dataclass(frozen=True, kw_only=True)
class GAETargets:
    """Advantages and returns of the tokens of a step."""

    advantages: torch.Tensor
    """[B, T] float32; 0.0 on tokens that are not trained."""
    returns: torch.Tensor
    """[B, T] float32, target of the value after each token; 0.0 if the next token is not trained."""
    metrics: dict[str, float]
    """Statistics of advantages and values."""


def compute_gae_targets(batch: BatchedDataDict[Any], config: GAEConfig) -> GAETargets:
    """Advantages and returns of a step's rows.

    The reward of a row is assigned to its last trained token; penalties are subtracted at each token.

    Args:
        batch: `rewards`, `prev_values`, `token_mask`, `sample_mask`, `truncated`, and `token_penalties` if the KL is in the
            reward.
        config: the section `gae`.
    """
    mask = batch["token_mask"] * batch["sample_mask"].unsqueeze(-1)
    rewards = at_last_trained(batch["rewards"], batch["token_mask"]) - token_penalties(batch)
    values = state_values(batch["prev_values"])
    bootstrap = None
    if config.bootstrap_truncated:
        after_all = (batch["prev_values"] * is_last_trained(batch["token_mask"])).sum(-1)
        bootstrap = torch.where(batch["truncated"], after_all, 0.0)

    def advantages_at(lam: float | torch.Tensor) -> torch.Tensor:
        return generalized_advantages(rewards, values, batch["token_mask"], gamma=config.gamma, lam=lam, bootstrap=bootstrap)

    adaptive = config.length_adaptive_alpha
    advantages = advantages_at(config.lam if adaptive is None else adaptive_lambda(batch["token_mask"], adaptive))
    of_value = advantages if config.value_lam is None else advantages_at(config.value_lam)
    returns = (of_value + values) * batch["token_mask"]
    trained = advantages[mask > 0]
    metrics = {
        "value/explained_variance": explained_variance(values, returns, mask),
        "advantage/mean": float(trained.mean()) if trained.numel() else 0.0,
        "advantage/std": float(trained.std(correction=0)) if trained.numel() else 0.0,
    }
    return GAETargets(
        advantages=whiten(advantages, mask) if config.normalize_advantages else advantages,
        returns=as_targets(returns),
        metrics=metrics,
    )


def critic_rows(batch: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """The rows to train the critic on: `token_mask` is 1 at the positions of the values of trained tokens' states.

    A scalar head computes a value after it has read a token, so the value of the state in which token t is sampled is at t - 1.
    Advantages are at the positions of tokens, like log-probabilities; returns are at the positions of values.
    """
    columns = ("input_ids", "input_lengths", "sample_mask", "returns", "prev_values")
    rows: BatchedDataDict[Any] = BatchedDataDict({key: batch[key] for key in columns})
    if "prompt_id" in batch:
        rows["prompt_id"] = batch["prompt_id"]
    rows["token_mask"] = as_targets(batch["token_mask"])
    return rows


def critic_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of the critic's training call, as `value/grad_norm` and so on."""
    groups = {f"value/lr/{name}": lr for name, lr in result.get("group_lrs", {}).items()}
    own = {f"value/{name}": result[name] for name in ("grad_norm", "lr", "num_optimizer_steps")}
    return own | groups | dict(result["metrics"])


def state_values(values: torch.Tensor) -> torch.Tensor:
    """[B, T] the value of the state in which token t is sampled, from values [B, T] after token t.

    Position 0 has 0.0: the first token is never sampled.
    """
    return torch.nn.functional.pad(values[:, :-1], (1, 0))


def as_targets(per_token: torch.Tensor) -> torch.Tensor:
    """[B, T] values of token t moved to t - 1, where a scalar head computes them; the inverse of `state_values`."""
    return torch.nn.functional.pad(per_token[:, 1:], (0, 1))


def generalized_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: float,
    lam: float | torch.Tensor,
    bootstrap: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, T] float32 advantages, 0.0 on tokens that are not trained.

    https://arxiv.org/abs/1506.02438, equations 11, 12 and 16. With t_1 < ... < t_n the trained tokens of a row, V_k the value
    of the state in which t_k is sampled, and r_k the reward of t_k:

        delta_k = r_k + gamma V_(k+1) - V_k
        A_k     = delta_k + gamma lam A_(k+1)
        R_k     = A_k + V_k, the target of the critic

    The next state of a token is that of the next *trained* token. V_(n+1) is 0 if the row has ended.

    Args:
        rewards: [B, T] reward of each trained token.
        values: [B, T] the value of the state in which each token is sampled (`state_values`).
        mask: [B, T]; above 0 for trained tokens.
        gamma: discount from a trained token to the next.
        lam: 1 uses the whole return, 0 a single step; a number, or [B] one per row.
        bootstrap: [B] value of what follows the last trained token; 0 by default, for rows that have ended.
    """
    # In float64: with gamma = lam = 1 the rounding errors of thousands of sums would add up.
    rewards, values = rewards.double(), values.double()
    next_value = torch.zeros_like(rewards[:, 0]) if bootstrap is None else bootstrap.double()
    decay = gamma * torch.as_tensor(lam, dtype=torch.float64)
    next_advantage = torch.zeros_like(next_value)
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(mask.shape[1])):
        trained = mask[:, t] > 0
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + decay * next_advantage
        advantages[:, t] = advantage.masked_fill(~trained, 0.0)
        next_advantage = torch.where(trained, advantage, next_advantage)
        next_value = torch.where(trained, values[:, t], next_value)
    return advantages.float()


def adaptive_lambda(mask: torch.Tensor, alpha: float) -> torch.Tensor:
    """[B] lam = 1 - 1 / (alpha n) for rows of n trained tokens, never below 0, so that long rows have a longer horizon.

    Source: https://arxiv.org/abs/2504.05118, section 4.2.
    """
    return (1.0 - 1.0 / (alpha * (mask > 0).sum(-1).clamp(min=1))).clamp(min=0.0)


def at_last_trained(numbers: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, T] the number [B] of each row at its last trained token, and 0.0 elsewhere."""
    return torch.where(is_last_trained(mask), numbers.unsqueeze(-1), 0.0)


def is_last_trained(mask: torch.Tensor) -> torch.Tensor:
    """[B, T] bool: True at the last trained token of a row, if it has one."""
    trained = mask > 0
    remaining = trained.flip(-1).cumsum(-1).flip(-1)
    return trained & (remaining == 1)


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """Fraction of the variance of the returns that the values explain: 1 is all, 0 is no better than a constant.

    0.0 if the returns are all equal up to rounding.

    Args:
        values: [B, T].
        returns: [B, T].
        mask: [B, T]; above 0 for trained tokens.
    """
    trained = mask > 0
    actual, error = returns.double()[trained], (returns.double() - values.double())[trained]
    if actual.numel() == 0 or bool(are_equal(actual.min(), actual.max())):
        return 0.0
    return 1.0 - float(error.var(correction=0) / actual.var(correction=0))
