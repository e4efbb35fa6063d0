"""Table of all batch keys: shape, dtype, unit, padding and writer. It does not depend on an algorithm or a backend.

`docs/batch_keys.md` is generated from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType


@dataclass(frozen=True)
class KeySpec:
    """Specification of one batch key.

    Attributes:
        name: The key.
        shape: Its axes, from B (rows), T (tokens) and K (candidates); `[B]` for a list column.
        dtype: The name of a torch dtype, or `list` for a column of Python objects.
        unit: Unit of the numbers; empty for other objects.
        padding: Value after the end of a row (right padding); None for a column without a token axis.
        written_by: Module or component that writes the column.
        meaning: One-line description.
        holds_tokens: Whether it holds token ids, which a batch for a model pads with the tokenizer's padding id.
    """

    name: str
    shape: str
    dtype: str
    unit: str
    padding: int | float | bool | None
    written_by: str
    meaning: str
    holds_tokens: bool = False

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.shape.count(",") + 1


def _column(
    shape: str, name: str, dtype: str, unit: str, written_by: str, meaning: str, *, holds_tokens: bool = False
) -> KeySpec:
    zero: int | float = 0 if dtype == "int64" else 0.0
    padding = None if shape == "[B]" else zero
    return KeySpec(name, shape, dtype, unit, padding, written_by, meaning, holds_tokens)


_rows, _tokens, _per_candidate = (partial(_column, shape) for shape in ("[B]", "[B, T]", "[B, T, K]"))
_NATS = "nats"
_ID = "token id"
_TABLE = (
    _tokens("input_ids", "int64", _ID, "data, rollouts", "Input tokens of the model.", holds_tokens=True),
    _rows("input_lengths", "int64", "tokens", "data, rollouts", "Number of tokens in the row, without padding."),
    _tokens(
        "attention_mask",
        "int64",
        "",
        "external callers",
        "1 on tokens, 0 on padding. Accepted only by public entry points, which convert it to `input_lengths`.",
    ),
    _tokens("token_mask", "float32", "", "rollouts, data", "1 on trained tokens, else 0."),
    _rows("sample_mask", "float32", "", "rollouts, data", "0 excludes the row from every loss and count."),
    _tokens("advantages", "float32", "reward", "algorithms", "Advantage of each trained token."),
    _tokens("prev_logprobs", "float32", _NATS, "policy", "Log-probs under the policy before this step."),
    _tokens("generation_logprobs", "float32", _NATS, "generation", "Log-probs reported by the sampler."),
    _tokens("reference_policy_logprobs", "float32", _NATS, "policy", "Log-probs under the frozen reference policy."),
    _tokens("logprobs", "float32", _NATS, "policy, generation", "Log-probs, as returned by a backend."),
    _tokens("reference_logprobs", "float32", _NATS, "policy", "Reference log-probs, as returned by a backend."),
    _per_candidate("topk_token_ids", "int64", _ID, "policy", "The K most likely tokens at each position, in descending order."),
    _per_candidate("topk_logprobs", "float32", _NATS, "policy", "Their log-probs, as returned by a backend."),
    _tokens("teacher_logprobs", "float32", _NATS, "algorithms", "Log-probs under the teacher."),
    _per_candidate("teacher_topk_token_ids", "int64", _ID, "algorithms", "`topk_token_ids` of the teacher."),
    _per_candidate("teacher_topk_logprobs", "float32", _NATS, "algorithms", "`topk_logprobs` of the teacher."),
    _tokens("teacher_spans", "int64", "", "algorithms", "Span of text that a teacher with other tokens scores; 0 for none."),
    _rows("teacher_numbers", "int64", "", "algorithms", "Number of the row's teacher, if tasks have several, from 0."),
    _per_candidate(
        "candidate_logprobs",
        "float32",
        _NATS,
        "policy",
        "Log-probs, with gradient, of the tokens named by a loss (`candidates_key`); 0.0 at untrained positions.",
    ),
    _rows("margins", "float32", "reward", "data", "Required score margin of a pair's chosen row; the same in both rows."),
    _rows("label", "list", "", "data", "bool: whether the answer is desirable; becomes `desirable`."),
    _rows("desirable", "float32", "", "data", "1 if the label of the answer is desirable, 0 if it is undesirable."),
    _rows("kl_estimates", "float32", _NATS, "algorithms", "KL to the reference policy, estimated from all rows; equal in all."),
    _rows(
        "accuracies", "float32", "", "algorithms", "Fraction of answers with the other label that the reward orders correctly."
    ),
    _tokens("values", "float32", "reward", "value model", "Output of the scalar head after each token."),
    _tokens("prev_values", "float32", "reward", "value model", "`values` before this step."),
    _tokens("returns", "float32", "reward", "algorithms", "Target of the scalar head after each token."),
    _tokens("output_ids", "int64", _ID, "generation", "Prompt and completion tokens.", holds_tokens=True),
    _rows("generation_lengths", "int64", "tokens", "generation", "Number of completion tokens."),
    _rows("unpadded_sequence_lengths", "int64", "tokens", "generation", "Number of prompt and completion tokens."),
    _rows("truncated", "bool", "", "generation", "True if a length limit ended the completion."),
    _rows("weight_version", "int64", "optimizer steps", "generation", "Oldest version of the weights that sampled the row."),
    _tokens("token_versions", "int64", "optimizer steps", "generation", "Weight version of sampled tokens; -1 on others."),
    _tokens("stale_mask", "float32", "", "algorithms", "1 on trained tokens that older weights sampled, else 0."),
    _tokens("high_covariance", "float32", "", "losses", "1 on tokens whose covariance of advantage and log-prob is high."),
    _tokens("token_turns", "int64", "turns", "rollouts", "Turn that sampled each token, from 1; 0 on other tokens."),
    _tokens("comparison", "float32", "", "training checks", "1 where scores may be compared with training, 2 also the engine."),
    _rows("row_numbers", "int64", "", "training checks", "Number of the row, from 1; negative if it has no gradient."),
    _rows("rewards", "float32", "reward", "environments", "Reward from the environment, after the algorithm's shaping."),
    _rows("baseline_rewards", "float32", "reward", "rollouts", "Reward of a greedy rollout of the row's prompt (ReMax)."),
    _rows("reward_parts", "list", "reward", "environments", "dict: named rewards; `rewards` is their weighted sum."),
    _rows("reward_weights", "list", "", "rollouts", "dict: weights of the named rewards that are not 1."),
    _rows("turn_rewards", "list", "reward", "rollouts", "list[float]: weighted reward of each turn of the rollout."),
    _rows("scored", "bool", "", "environments", "False if the row could not be scored; it then counts in no statistic."),
    _tokens("token_penalties", "float32", "reward", "algorithms", "Penalty of each token: the KL, if it is in the reward."),
    _rows("group_ids", "int64", "", "rollouts", "Group id, shared by the samples of one prompt."),
    _rows("rollout_ids", "int64", "", "rollouts", "Rollout of the row. Its rows are its segments, in order."),
    _rows(
        "prompt_id",
        "int64",
        "",
        "rollouts, data",
        "Id of one occurrence of a prompt: rows with the same id begin with the same tokens, which may be computed once.",
    ),
    _rows("sample_seeds", "int64", "", "rollouts", "Random seed of the sample."),
    _rows("max_new_tokens", "int64", "tokens", "agents, servers", "Limit of new tokens, in addition to that of the config."),
    _rows(
        "sampling", "list", "", "servers", "dict or None: options of the row, such as its temperature, replacing the engine's."
    ),
    _rows("top_logprobs", "list", _NATS, "generation", "list or None: (id, log-prob) of the most likely tokens, by position."),
    _rows(
        "prompt_logprobs",
        "list",
        _NATS,
        "generation",
        "list or None: (id, log-prob) of each token of the prompt and of the most likely ones.",
    ),
    _rows("sampled_sets", "list", "", "generation, rollouts", "SampledSets or None: what top-p, top-k and min-p have kept."),
    _rows("stream_tokens", "bool", "", "servers", "The row is also returned while it is sampled."),
    _rows("unfinished", "bool", "", "generation", "True in the output of a row that is still sampled; absent otherwise."),
    _rows("session_ids", "list", "", "rollouts", "str or None: conversation that the row continues."),
    _rows("images", "list", "", "data, environments", "list[RowImage] or None: images in the tokens, in their order."),
    _rows("stop_strings", "list", "", "data, environments", "list[str] or None: strings that end a completion."),
    _rows("failures", "list", "", "generation", "str or None: why the engine could not sample the row."),
    _rows("messages", "list", "", "rollouts, generation", "list of {role, content}: the conversation, with the completion."),
    _rows("message_log", "list", "", "data, rollouts", "list of {role, content, token_ids, ...}."),
    _rows("task_name", "list", "", "data", "str: name of the environment that responds and scores."),
    _rows("extra_env_info", "list", "", "data, environments", "dict: the environment's data for the row."),
    _rows("tools", "list", "", "data", "list or None: functions that the chat template shows the model."),
    _rows("prefill", "list", "", "data", "str: the beginning of the answer, with which the prompt ends."),
    _rows("feedback", "list", "", "rollouts", "str: text of the environment after the last turn; empty without any."),
    _rows("idx", "list", "", "data", "int: index of the row in its dataset."),
    _rows("length", "int64", "tokens", "data", "Number of tokens in the prompt's message log."),
    _rows("loss_multiplier", "float32", "", "data", "0 if the row must not be trained on; becomes `sample_mask`."),
    _tokens("token_ids", "int64", _ID, "data", "Tokens of a flattened message log.", holds_tokens=True),
    _tokens("token_loss_mask", "float32", "", "data", "1 on tokens of trained roles; becomes `token_mask`."),
    _rows("message_log_chosen", "list", "", "data", "The conversation with the chosen answer, as `message_log`."),
    _rows("message_log_rejected", "list", "", "data", "The same with the rejected answer."),
    _rows("length_chosen", "int64", "tokens", "data", "Number of tokens in the conversation with the chosen answer."),
    _rows("length_rejected", "int64", "tokens", "data", "The same with the rejected answer."),
    _rows("role", "list", "", "data", "list[str]: roles of a flattened message log."),
    _rows("content", "list", "", "data", "list[str]: texts of a flattened message log."),
)

SCHEMA: Mapping[str, KeySpec] = MappingProxyType({spec.name: spec for spec in _TABLE})


def pad_value(key: str) -> int | float | bool:
    """Padding value of a column; 0 for a key that is not in the table."""
    spec = SCHEMA.get(key)
    return 0 if spec is None or spec.padding is None else spec.padding
