"""The wrong engines of this folder: what each does to a run, and what the error says. Policies: see `policies/`.

A `train` kind stops a plain `rlcore train` within three steps in float32. A `kit` kind cannot show in training: its samples and
log-probabilities are those of some right engine, so only calls that a run does not make can find it.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class WrongEngine:
    """One engine.

    Attributes:
        marker: whether training or only a conformance kit can find it.
        words: what the error must contain, in addition to the name of the class.
        changes: changes of the run's config.
        frozen: written after the checks, to see whether they find what they were not written for.
    """

    words: tuple[str, ...] = ()
    marker: Literal["train", "kit"] = "train"
    changes: dict[str, Any] = field(default_factory=dict)
    frozen: bool = False


ENGINES = {
    "swaps_two_rows": WrongEngine(words=("without its own prompt", "it begins with the prompt of row")),
    "returns_no_truncated": WrongEngine(words=("returned no column `truncated`",)),
    "drops_a_row": WrongEngine(words=("rows of `weight_version` for a call with",)),
    "returns_probabilities": WrongEngine(words=("It must be finite and at most 0",)),
    "returns_float64": WrongEngine(words=("`logprobs` as a tensor", "float64")),
    "returns_completions_only": WrongEngine(words=("without its own prompt", "must contain prompt and completion")),
    "returns_nan": WrongEngine(words=("log-probability of nan", "row 0")),
    "takes_a_model": WrongEngine(words=("cannot be used", "takes (config, model)")),
    "from_scratch_without_a_refit": WrongEngine(words=("does not define invalidate_kv_cache, prepare_refit_info",)),
    "keeps_its_first_weights": WrongEngine(words=("Step 2", "disagree at weight version 1")),
    "shifts_log_probabilities": WrongEngine(words=("outside of the completion", "It must be 0.0 there"), frozen=True),
    "returns_bits": WrongEngine(words=("nats on average",), frozen=True),
    "swaps_log_probabilities_of_two_rows": WrongEngine(words=("nats on average",), frozen=True),
    "rounds_log_probabilities": WrongEngine(words=("nats on average",), frozen=True),
    "pads_on_the_left": WrongEngine(words=("without its own prompt",), frozen=True),
    "counts_lengths_without_the_prompt": WrongEngine(words=("`unpadded_sequence_lengths`", "row 0"), frozen=True),
    "returns_int32_tokens": WrongEngine(words=("`output_ids` as a tensor", "int32"), frozen=True),
    "returns_a_log_probability_per_row": WrongEngine(words=("`logprobs` as a tensor", "It must be [B, T]"), frozen=True),
    "returns_lists": WrongEngine(words=("returned a list as `weight_version`",), frozen=True),
    "reports_old_versions": WrongEngine(
        words=("returned rows with `weight_version` -1, but the engine has the weights of",), frozen=True
    ),
    "leaves_out_the_log_probability_of_the_end": WrongEngine(words=("nats",), frozen=True),
    "samples_too_many_tokens": WrongEngine(words=("more than its limit (`max_new_tokens`)",), frozen=True),
    "samples_at_temperature_one": WrongEngine(
        words=("nats on average",), changes={"policy": {"generation": {"temperature": 0.5}}}, frozen=True
    ),
    "ignores_seeds": WrongEngine(marker="kit"),
    "decodes_greedily": WrongEngine(marker="kit"),
}
