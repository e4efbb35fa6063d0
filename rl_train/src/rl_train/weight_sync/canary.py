"""The canary: a few rows that the engine samples and the policy scores after each refit, to compare their log-probabilities.

Fingerprints prove that every weight arrived. They do not cover what an engine does with it afterwards: fusing, packing,
quantizing, keeping an old copy, or sampling from a different distribution. The canary covers that: it compares the
log-probabilities of the same tokens, computed by the engine's own kernels and by the policy's.

Half of the prompts are random tokens. The other half repeat a short pattern, which exposes a repetition penalty: after random
tokens a model rarely repeats one. If rows of the run have images, half of both begin with one of two pictures of random pixels,
so that what computes their features is covered too.

The rule, with e the mean |difference| of log-probabilities per sampled token, in nats:

- Both sides compute in float32: e must be at most `EXACT_TOLERANCE`.
- A side rounds to bfloat16 or less: e for equal weights depends on model, kernels and device, so the first sync of a run
  measures it, with `FIRST_TOLERANCE` as the limit. Later syncs may have `MARGIN` times that error (at least
  `LEAST_TOLERANCE`). An engine one optimizer step behind at a learning rate of 1e-5 has more than twice the first error.
  If adapters are merged, `FIRST_TOLERANCE` is the limit of all syncs: the first one is made before they have an effect.
- `policy.generation.canary_tolerance` replaces both.

If rollouts are streamed and continue over refits, the canary's rows are streamed over the first refit that changes the weights:
an engine may sample complete batches correctly, but single rows with an older copy of the weights, or rows in progress with old
keys and values. Only tokens of the new weights are compared, with `FIRST_TOLERANCE` if a side rounds.

The mean over few tokens is noisy: |difference| has a standard deviation about as large as its mean. So the first sync measures
`_ROUNDS` times as many rows as later ones, and a later sync beyond its tolerance is measured again with that many rows before
the run is stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from rl_core.config.schema import PolicyConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import derived_seeds
from rl_core.data.images import RowImage
from rl_core.errors import WeightSyncError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface
from rl_core.testing.outputs.models import check_version, generated, scored
from rl_train.logprob_agreement import TokenDifferences, rows_to_score, sampled_tokens
from rl_train.weight_sync.device_memory import DeviceMemory

_log = logging.getLogger(__name__)

EXACT_TOLERANCE = 1e-3
"""Nats per token if both sides compute in float32: measured are 1e-6 (a million parameters) to 1e-5 (135 million)."""
FIRST_TOLERANCE = 0.1
"""Nats per token at the first sync if a side rounds. Measured in bfloat16 with 135 million parameters: 0.04 to 0.06 for
equal weights, 0.19 with a repetition penalty of 1.3 in the engine, 0.6 with temperature 0.7 against 1."""
MARGIN = 1.5
"""Allowed error of later syncs, as a multiple of the first one. Measured one optimizer step behind at lr 1e-5: 2.1 to 2.9."""
LEAST_TOLERANCE = 0.005
"""Nats per token that are always allowed if a side rounds: probability ratios are then within half a percent of 1."""
_EXACT_ROWS = 4
_ROUNDED_ROWS = 16
_ROUNDS = 4
PROMPT_TOKENS = 16
_PATTERN_TOKENS = 4
_NEW_TOKENS = 4
_STREAMED_TOKENS = 16
"""New tokens of a row that is streamed: more, so that rows are in progress when the weights change."""
_RESCORED_ROWS = 4
_SEED = 20_240_601

RowStreaming = Callable[[BatchedDataDict[Any], bool], AbstractContextManager[Callable[[], BatchedDataDict[Any]]]]
"""Streams rows (the first argument; the second is whether to decode greedily) from the beginning of the block to its end, each
repeatedly. The function waits until every row has tokens of the engine's weights at the time of the call, and returns them as a
`GenerationOutputSpec` with `token_versions`, and `newest_version` [B] int64, that of the last token of each row."""
_MOST_REFITS = 3
"""Number of refits with streamed rows until some of them were in progress when the weights changed."""


@dataclass
class CanaryCalibration:
    """The error of the first sync of a run, which determines the tolerance of later syncs.

    It is saved with the run's checkpoints, so a resumed run uses the error measured before its first step, not that of its
    engine after the resume. It is measured again only if the arithmetic has changed.

    Attributes:
        sides: the arithmetic that it was measured for: backends, precisions, device, temperature.
        error: mean |difference| of log-probabilities, in nats per token; None before the first sync.
    """

    sides: str = ""
    error: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """State for the checkpoint."""
        return {"sides": self.sides, "error": self.error}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from the checkpoint."""
        self.sides, self.error = state["sides"], state["error"]

    def tolerance(self, sides: str) -> float | None:
        """Maximum error of a sync, in nats per token; None if none was measured for this arithmetic."""
        if self.error is None:
            return None
        if sides != self.sides:
            _log.warning(
                "the canary's first error was measured with %s and is measured again, because the run now has %s",
                self.sides,
                sides,
            )
            return None
        return max(MARGIN * self.error, LEAST_TOLERANCE)

    def record(self, sides: str, error: float) -> None:
        """Store the error of the first sync."""
        self.sides, self.error = sides, error


@dataclass(frozen=True, kw_only=True)
class TemperatureCorrection:
    """Converts scores of a policy to the temperature of its engine, if the policy scores at another.

    Attributes:
        factor: the policy's temperature divided by the engine's.
        vocab_size: V of the policy.
    """

    factor: float
    vocab_size: int

    def logprobs(self, policy: ColocatablePolicyInterface, rows: BatchedDataDict[Any]) -> torch.Tensor:
        """[B, T] float32, in nats; computed a few rows at a time, since each token needs the whole distribution."""
        chunks = []
        for start in range(0, rows.size, _RESCORED_ROWS):
            chunk = rows.select_indices(torch.arange(start, min(start + _RESCORED_ROWS, rows.size)))
            topk = scored(policy.get_topk_logprobs, chunk, self.vocab_size)
            sampled_index = (topk["topk_token_ids"] == chunk["input_ids"].unsqueeze(-1)).int().argmax(dim=-1, keepdim=True)
            chunks.append(torch.log_softmax(topk["topk_logprobs"] * self.factor, dim=-1).gather(-1, sampled_index).squeeze(-1))
        return torch.cat(chunks)


@dataclass(frozen=True, kw_only=True)
class Canary:
    """Rows that are sampled and scored.

    Attributes:
        rows: a `GenerationDatumSpec` with distinct prompts, so that every replica gets some.
        more_rows: many more rows, for the first sync of a process and for one beyond its tolerance.
        tolerance: maximum mean |difference| of log-probabilities, in nats per token; None to calibrate.
        greedy: take the most likely tokens; needed if sampling is filtered (top-p, top-k), since log-probabilities are then
            those of the filtered distribution.
        calibration: the error of the first sync.
        sides: the arithmetic of both sides, see `CanaryCalibration`.
        temperature_correction: for a policy that scores at a temperature other than the engine's.
        scored_rows: minimum number of rows that are scored together with `more_rows`, so that there are two microbatches.
    """

    rows: BatchedDataDict[Any]
    more_rows: BatchedDataDict[Any]
    tolerance: float | None
    greedy: bool = False
    calibration: CanaryCalibration = field(default_factory=CanaryCalibration)
    sides: str = ""
    temperature_correction: TemperatureCorrection | None = None
    scored_rows: int = 0

    def check(self, policy: ColocatablePolicyInterface, generation: GenerationInterface, *, thorough: bool = False) -> float:
        """Sample with the engine and score with the policy; returns the mean |difference| in nats per sampled token.

        Args:
            policy: scores the rows.
            generation: samples them.
            thorough: compare `more_rows` at once, scored in several microbatches.

        Raises:
            WeightSyncError: the difference exceeds the tolerance or is not a number; names the token with the largest one.
        """
        generation.prepare_for_generation()
        return self._check(policy, lambda rows: self._sample(generation, rows), thorough=thorough)

    def sample(
        self, generation: GenerationInterface, *, thorough: bool = False
    ) -> Callable[[ColocatablePolicyInterface], float]:
        """Sample now; returns `check` for a policy that scores the rows later, when the engine has freed its memory."""
        generation.prepare_for_generation()
        more = self._sample(generation, self.more_rows)
        few = more if thorough else self._sample(generation, self.rows)
        return lambda policy: self._check(policy, lambda rows: few if rows is self.rows else more, thorough=thorough)

    @property
    def streamed_rows(self) -> BatchedDataDict[Any]:
        """`more_rows` with more new tokens."""
        limits = self.more_rows["max_new_tokens"] * (_STREAMED_TOKENS // _NEW_TOKENS)
        return BatchedDataDict({**self.more_rows, "max_new_tokens": limits})

    def check_streamed(
        self, policy: ColocatablePolicyInterface, generation: GenerationInterface, output: BatchedDataDict[Any]
    ) -> float:
        """Compare the tokens of the current weights in rows that were streamed (`RowStreaming`); otherwise as `check`."""
        check_version(generation, BatchedDataDict({"weight_version": output["newest_version"]}))
        current = output["token_versions"] == output["newest_version"].unsqueeze(1)
        differences = self._compare(policy, output, self.more_rows, at_least=0, compared=current)
        # Kernels for single rows round in another way than those for batches, which the calibration was measured with.
        allowed = FIRST_TOLERANCE if self.tolerance is None else self.tolerance
        return self._check_difference(differences, allowed, "; the rows were streamed, as those of rollouts are")

    def _check(
        self,
        policy: ColocatablePolicyInterface,
        sampled: Callable[[BatchedDataDict[Any]], BatchedDataDict[Any]],
        *,
        thorough: bool,
    ) -> float:
        def compare(rows: BatchedDataDict[Any]) -> TokenDifferences:
            return self._compare(policy, sampled(rows), rows, at_least=self.scored_rows if rows is self.more_rows else 0)

        if self.tolerance is not None:
            return self._check_difference(compare(self.more_rows if thorough else self.rows), self.tolerance, "")
        allowed = self.calibration.tolerance(self.sides)
        if allowed is None:
            first = self._check_difference(compare(self.more_rows), FIRST_TOLERANCE, " at the first sync")
            self.calibration.record(self.sides, first)
            return first
        if not thorough:
            error = compare(self.rows).mean
            if error <= allowed:
                return error
        rule = f", {MARGIN:g} times the error of the first sync" if allowed > LEAST_TOLERANCE else ""
        return self._check_difference(compare(self.more_rows), allowed, rule)

    def _sample(self, generation: GenerationInterface, rows: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        output = generated(generation, rows, greedy=self.greedy)
        # An engine that labels new rows as old would exempt them from every comparison with the current policy.
        check_version(generation, output)
        return output

    def _compare(
        self,
        policy: ColocatablePolicyInterface,
        output: BatchedDataDict[Any],
        rows: BatchedDataDict[Any],
        *,
        at_least: int,
        compared: torch.Tensor | None = None,
    ) -> TokenDifferences:
        data = rows_to_score(output, rows)
        if self.temperature_correction is None:
            scores = scored(policy.get_logprobs, _with_other_rows(data, at_least))["logprobs"][: data.size]
        else:
            scores = self.temperature_correction.logprobs(policy, data)
        if compared is None:
            compared = sampled_tokens(output)
        return TokenDifferences(output["output_ids"], scores, output["logprobs"], compared=compared)

    def _check_difference(self, differences: TokenDifferences, allowed: float, rule: str) -> float:
        if differences.mean <= allowed:
            return differences.mean
        row, position = at = differences.worst()
        raise WeightSyncError(
            "After the refit every weight has arrived, but the generation backend computes log-probabilities that differ "
            f"from the policy's: over {differences.num_tokens} canary tokens they differ by {differences.mean:.3g} nats on "
            f"average (allowed: {allowed:.3g}{rule}) and by {float(differences.sizes[at]):.3g} at most: token "
            f"{int(differences.token_ids[at])} at position {position} of row {row} has {differences.values_at(at)}. "
            "The engine computes with an older copy of a weight or with older keys and values, samples from a distribution "
            "other than the one that the policy scores, or rounds much more than the policy; or the policy scores at another "
            f"temperature, or returns scores in another order than its rows ({self.sides or 'unknown backends'}). `rlcore "
            "check logprobs` shows where they differ. If this difference is acceptable for training, set "
            "policy.generation.canary_tolerance."
        )


def make_canary(
    token_ids: Sequence[int],
    *,
    num_receivers: int,
    max_length: int,
    exact: bool,
    tolerance: float | None = None,
    greedy: bool = False,
    calibration: CanaryCalibration | None = None,
    sides: str = "",
    temperature_correction: TemperatureCorrection | None = None,
    scored_rows: int = 0,
    pictures: Sequence[tuple[Sequence[int], RowImage]] = (),
) -> Canary:
    """Create a canary of random and of repetitive prompts.

    Args:
        token_ids: the vocabulary, without special tokens.
        num_receivers: maximum number of replicas; each gets 4 rows, or 16 if a side rounds.
        max_length: maximum number of tokens in a row.
        exact: both sides compute in float32.
        tolerance: overrides `EXACT_TOLERANCE` or the calibrated one.
        greedy: see `Canary`.
        calibration: that of the run; a new one by default.
        sides: see `CanaryCalibration`.
        temperature_correction: see `Canary`.
        scored_rows: see `Canary`.
        pictures: tokens of a picture and the picture; half of the rows have one in front of their text.
    """
    vocabulary = torch.tensor(sorted(token_ids), dtype=torch.int64)
    count = (_EXACT_ROWS if exact else _ROUNDED_ROWS) * num_receivers
    return Canary(
        rows=_with_pictures(_rows(vocabulary, count, max_length, stream=0), pictures, max_length),
        more_rows=_with_pictures(_rows(vocabulary, count * _ROUNDS, max_length, stream=2), pictures, max_length),
        tolerance=EXACT_TOLERANCE if tolerance is None and exact else tolerance,
        greedy=greedy,
        calibration=calibration if calibration is not None else CanaryCalibration(),
        sides=sides,
        temperature_correction=temperature_correction,
        scored_rows=scored_rows,
    )


def rows_of_two_microbatches(model: PolicyConfig) -> int:
    """Number of the canary's rows that one rank scores in at least two microbatches."""
    if model.sequence_packing.enabled or model.dynamic_batching.enabled:
        budget = model.sequence_packing.logprob_mb_tokens if model.sequence_packing.enabled else None
        return -(-(budget or model.dynamic_batching.logprob_mb_tokens) // PROMPT_TOKENS) + 1
    return 2 * model.logprob_batch_size


def _with_other_rows(rows: BatchedDataDict[Any], count: int) -> BatchedDataDict[Any]:
    """`rows`, and further rows behind them up to `count`: the same tokens backwards, so that mixed-up microbatches differ."""
    missing = count - rows.size
    if missing <= 0:
        return rows
    others = rows["input_ids"].flip(1).repeat(-(-missing // rows.size), 1)[:missing]
    lengths = torch.full((missing,), others.shape[1], dtype=torch.int64)
    images = {"images": [*rows["images"], *[None] * missing]} if "images" in rows else {}
    return BatchedDataDict(
        {
            "input_ids": torch.cat([rows["input_ids"], others]),
            "input_lengths": torch.cat([rows["input_lengths"], lengths]),
            **images,
        }
    )


def _rows(vocabulary: torch.Tensor, rows: int, max_length: int, *, stream: int) -> BatchedDataDict[Any]:
    """Prompts of random tokens, and for every second one of a repeated random pattern."""
    width = max(1, min(PROMPT_TOKENS, max_length // 2))
    ids = vocabulary[derived_seeds(_SEED, stream, rows * width).abs() % len(vocabulary)].view(rows, width)
    pattern = min(_PATTERN_TOKENS, width)
    ids[1::2] = ids[1::2, torch.arange(width) % pattern]
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.full((rows,), width, dtype=torch.int64),
            "sample_seeds": derived_seeds(_SEED, stream + 1, rows),
            "max_new_tokens": torch.full((rows,), min(_NEW_TOKENS, max_length - width), dtype=torch.int64),
        }
    )


def _with_pictures(
    rows: BatchedDataDict[Any], pictures: Sequence[tuple[Sequence[int], RowImage]], max_length: int
) -> BatchedDataDict[Any]:
    """Half of the rows, chosen so that each replica gets some, have one of the pictures and as much of their text as fits."""
    room = max_length - int(rows["max_new_tokens"].max())
    pictures = [(tokens, image) for tokens, image in pictures if len(tokens) < room]
    if not pictures:
        return rows
    prompts, images = list(rows["input_ids"].unbind()), list[list[RowImage] | None]([None] * rows.size)
    for row in range(rows.size):
        if row.bit_count() % 2 == 0:
            tokens, image = pictures[row // 2 % len(pictures)]
            prompts[row], images[row] = torch.cat([torch.tensor(tokens), prompts[row]])[:room], [image]
    ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    return BatchedDataDict(
        {**rows, "input_ids": ids, "input_lengths": torch.tensor([len(each) for each in prompts]), "images": images}
    )


class StreamedCanary:
    """Streams the rows of a canary over the first refit that changes the weights.

    Args:
        rows: streams them as rollouts are.
        over_refits: whether rows may be in progress at a refit.
    """

    def __init__(self, rows: RowStreaming, *, over_refits: bool) -> None:
        self._rows, self._over_refits = rows, over_refits
        self._due = _MOST_REFITS

    @contextmanager
    def over_refit(
        self, canary: Canary, policy: ColocatablePolicyInterface, generation: GenerationInterface
    ) -> Iterator[Callable[[], dict[str, float]]]:
        """Stream rows during the block if that is due; the function ends and compares them.

        The function returns `refit/canary_error` in nats per token, or nothing.

        Raises:
            WeightSyncError: the canary failed.
        """
        if not self._due:
            yield dict
            return
        with self._rows(canary.streamed_rows, canary.greedy) as finish:

            def compare() -> dict[str, float]:
                output = finish()
                error = canary.check_streamed(policy, generation, output)
                were_in_progress = bool((output["weight_version"] < output["newest_version"]).any())
                self._due = 0 if were_in_progress or not self._over_refits else self._due - 1
                return {"refit/canary_error": error}

            yield compare

    def sample(self, canary: Canary, generation: GenerationInterface) -> Callable[[ColocatablePolicyInterface], float]:
        """Stream rows now; returns `Canary.check_streamed` for a policy that scores them later."""
        with self._rows(canary.streamed_rows, canary.greedy) as finish:
            output = finish()
        return lambda policy: canary.check_streamed(policy, generation, output)


class RefitCanary:
    """The canary of a run: after the first refit of every generation worker, or on request.

    Args:
        make: creates the rows that both sides score, once both have loaded.
        calibration: that of the canary; a run saves it with its checkpoints.

    Attributes:
        streamed: the canary as rollouts are sampled; None if they are sampled in batches or not during training.
    """

    def __init__(self, make: Callable[[], Canary], calibration: CanaryCalibration | None = None) -> None:
        self._make = make
        self.calibration = calibration if calibration is not None else CanaryCalibration()
        self.streamed: StreamedCanary | None = None
        self._canary: Canary | None = None
        self._unscored: Callable[[ColocatablePolicyInterface], float] | None = None
        """Scores the canary's rows of the last refit, if the policy had to leave the device first."""
        self._restarts: int | None = None
        """Restarts of the engine when the canary last ran."""

    def request(self) -> None:
        """Run in the next `sync`, whatever it transfers."""
        self._restarts = None

    def is_due(self, restarts: int) -> bool:
        """Whether workers have not passed it yet, after this number of restarts of the engine."""
        return self._restarts != restarts

    def run(
        self, policy: ColocatablePolicyInterface, engine: GenerationInterface, *, restarts: int, memory: DeviceMemory
    ) -> dict[str, float]:
        """Compare the engine after a refit with the policy, now, or in `score` if both have to share the device memory.

        Raises:
            WeightSyncError: the canary failed.
        """
        is_first = self._canary is None
        self._canary = self._canary or self._make()
        if memory.limited:
            self._unscored = self._canary.sample(engine, thorough=is_first)
            self._restarts = restarts
            return {}
        error = self._canary.check(policy, engine, thorough=is_first)
        memory.free_for_engine()
        self._restarts = restarts
        return {"refit/canary_error": error}

    def score(self, policy: ColocatablePolicyInterface) -> dict[str, float]:
        """Compare the rows of the last `run` that the policy has not scored yet; no metrics if there are none."""
        score, self._unscored = self._unscored, None
        return {} if score is None else {"refit/canary_error": score(policy)}

    def check(self, policy: ColocatablePolicyInterface, engine: GenerationInterface, memory: DeviceMemory) -> float:
        """Compare with many rows now, between rollouts and training; returns the error in nats per token."""
        self._unscored = None
        self._canary = self._canary or self._make()
        if self.streamed is not None:
            score = self.streamed.sample(self._canary, engine)
        else:
            score = self._canary.sample(engine, thorough=True)
        memory.free_for_model(policy)
        return score(policy)

    def over_refit(
        self, policy: ColocatablePolicyInterface, engine: GenerationInterface
    ) -> AbstractContextManager[Callable[[], dict[str, float]]]:
        """`StreamedCanary.over_refit`, if rows can be streamed."""
        if self.streamed is None or self._canary is None:
            return nullcontext(dict)
        if engine.restarted_replicas() is not None:  # rows would wait for weights that only this refit brings
            return nullcontext(dict)
        return self.streamed.over_refit(self._canary, policy, engine)
