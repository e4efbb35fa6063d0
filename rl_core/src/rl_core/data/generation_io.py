"""Input and output of a generation call: attention masks, checks of prompts, seeds of rows, and the output batch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.schema import pad_value
from rl_core.errors import ConfigError, DataError, NotSupportedError

if TYPE_CHECKING:
    from rl_core.data.images import RowImage

_READ = ("input_ids", "input_lengths", "attention_mask", "stop_strings", "sample_seeds", "max_new_tokens", "sampling", "images")
_TEMPERATURE = frozenset({"temperature", "top_p", "top_k"})
SETS, PROMPT_LOGPROBS = "sampled_sets", "prompt_logprobs"
MOST_SET_IDS = 1024
"""Largest set of kept tokens that is held as ids; a larger one is a bit mask."""


class SampledSets(TypedDict):
    """For each token of a row, the tokens that top-k, top-p and min-p kept when it was sampled.

    `counts` [T] int32 is the number of words of each token in `words` [N] int32: none if it was not sampled, or from all
    tokens; else the ids of the set (at most 1024), or -1 and a bit mask, whose bit i of word j stands for id 32 j + i.
    """

    counts: torch.Tensor
    words: torch.Tensor


def joined_sets(parts: Iterable[SampledSets | int]) -> SampledSets:
    """The sets of consecutive tokens; a number stands for as many tokens without a set."""
    none = torch.zeros(0, dtype=torch.int32)
    sets = [SampledSets(counts=none.new_zeros(part), words=none) if isinstance(part, int) else part for part in parts]
    return SampledSets(counts=torch.cat([each["counts"] for each in sets]), words=torch.cat([each["words"] for each in sets]))


def select_sets(sets: SampledSets, index: torch.Tensor | slice) -> SampledSets:
    """The sets of some tokens, by ascending indices or a slice."""
    chosen = torch.zeros_like(sets["counts"], dtype=torch.bool)
    chosen[index] = True
    return SampledSets(counts=sets["counts"][index], words=sets["words"][chosen.repeat_interleave(sets["counts"])])


def kept_tokens(sets: SampledSets) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token that has a set, as often as its set has members, and these, in any order: indices and ids [K] int64."""
    counts, words = sets["counts"].long(), sets["words"].long()
    token = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts)[token]
    masks = words[first] < 0
    in_mask = masks & (torch.arange(len(words), device=counts.device) > first)
    word, bit = ((words[in_mask].unsqueeze(1) >> torch.arange(32, device=counts.device)) & 1).nonzero(as_tuple=True)
    index = in_mask.nonzero().squeeze(1)[word]
    return torch.cat([token[~masks], token[index]]), torch.cat([words[~masks], (index - first[index] - 1) * 32 + bit])


@dataclass(frozen=True, kw_only=True)
class LengthLimits:
    """Limits of every row.

    Attributes:
        vocab_size: ids must be smaller.
        max_model_len: maximum number of tokens of prompt and completion.
        max_new_tokens: maximum number of tokens of a completion.
    """

    vocab_size: int
    max_model_len: int
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One input row, without padding.

    Attributes:
        number: row number in the batch.
        tokens: the prompt's tokens.
        limit: maximum number of completion tokens, within `max_model_len`.
        seed: of its random draws.
        stop_strings: strings that end it: those of all rows, and its own.
        sampling: its own options, replacing the engine's: see `GenerationDatumSpec`.
        images: its images, in the order of their tokens.
    """

    number: int
    tokens: list[int]
    limit: int
    seed: int
    stop_strings: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    images: Sequence[RowImage] = ()


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished row.

    Attributes:
        prompt: tokens of the prompt.
        tokens: sampled tokens, including the end-of-sequence token.
        logprobs: of each sampled token, in nats.
        truncated: ended by a limit, not by a stop.
        weight_version: oldest version of the weights that sampled it.
        token_versions: version of each sampled token; None if all have `weight_version`.
        top_logprobs: the most likely tokens at each position, if they were requested.
        sampled_sets: of all tokens of the row, if they were requested.
        prompt_logprobs: of the prompt's tokens, as in `GenerationOutputSpec`, if they were requested.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    truncated: bool
    weight_version: int
    token_versions: Sequence[int] | None = None
    top_logprobs: Sequence[Sequence[tuple[int, float]]] | None = None
    sampled_sets: SampledSets | None = None
    prompt_logprobs: Sequence[Sequence[tuple[int, float]]] | None = None


@dataclass(kw_only=True, eq=False)
class SampledRow:
    """A prompt and its completion so far, for backends that draw tokens themselves.

    Attributes:
        prompt: the row.
        tokens: tokens drawn so far.
        logprobs: log-probability of each, in nats.
        stopped: ended by an end token or a stop string.
    """

    prompt: Prompt
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False

    @property
    def sequence(self) -> list[int]:
        """Prompt and completion."""
        return self.prompt.tokens + self.tokens

    def completion(self, *, weight_version: int) -> Completion:
        """The finished row, sampled by weights of version `weight_version`."""
        return Completion(
            prompt=self.prompt.tokens,
            tokens=self.tokens,
            logprobs=self.logprobs,
            truncated=not self.stopped,
            weight_version=weight_version,
        )


class PromptReader:
    """Reads the batches of one engine replica; rows without a seed get one from the replica's seed and the number of the call.

    Args:
        limits: limits of every row.
        stop_strings: strings that end every row, in addition to its own.
        reads_text: whether there is a tokenizer, which stop strings require.
        reads_sampling: whether rows may have their own temperature (`sampling`).
        row_options: further options that rows may have (`sampling`).
        reads_images: whether rows may have images.
        seed: for batches without `sample_seeds`.
        rank: index of the replica, because replicas with one seed would sample the same rows.
    """

    def __init__(
        self,
        limits: LengthLimits,
        *,
        stop_strings: Iterable[str] = (),
        reads_text: bool = True,
        reads_sampling: bool = False,
        row_options: Collection[str] = (),
        reads_images: bool = False,
        seed: int = 0,
        rank: int = 0,
    ) -> None:
        self._reads_images = reads_images
        self.limits, self._options = limits, {*row_options, *(_TEMPERATURE if reads_sampling else ())}
        self._stop_strings, self._reads_text = tuple(stop_strings), reads_text
        self._seed, self._calls = seed * 1_000_003 + rank, 0

    def read(self, data: Mapping[str, Any]) -> list[Prompt]:
        """The rows of a batch, in order; see `GenerationDatumSpec`.

        Raises:
            DataError: an empty prompt, an id outside the vocabulary, no space for a token, or a stop string that is empty or
                cannot be found; names the row.
            NotSupportedError: rows have their own temperature, and the engine samples at one; or another option that it lacks;
                or images, and it reads none.
        """
        self._calls += 1
        refuse_text(data)
        if not isinstance(data, BatchedDataDict):
            data = BatchedDataDict({key: data[key] for key in _READ if key in data})
        batch = with_input_lengths(data)
        lengths: list[int] = batch["input_lengths"].tolist()
        prompts = [tokens[: max(length, 0)] for tokens, length in zip(batch["input_ids"].tolist(), lengths, strict=True)]
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            _check_prompt(number, prompt, length, self.limits)
        images = image_column(data, reads_images=self._reads_images, reader="This generation engine")
        own_sampling = batch["sampling"] if "sampling" in batch else [None] * len(prompts)
        _check_options(own_sampling, self._options)
        seeds = batch["sample_seeds"] if "sample_seeds" in batch else derived_seeds(self._seed, self._calls, len(prompts))
        limits = _row_limits(batch, prompts, self.limits)
        stops = _row_stop_strings(batch, len(prompts), self._stop_strings, reads_text=self._reads_text)
        rows = zip(prompts, limits, seeds.tolist(), stops, own_sampling, images or [None] * len(prompts), strict=True)
        return [
            Prompt(
                number=number,
                tokens=prompt,
                limit=limit,
                seed=own_seed,
                stop_strings=strings,
                sampling=sampling or {},
                images=shown or (),
            )
            for number, (prompt, limit, own_seed, strings, sampling, shown) in enumerate(rows)
        ]


def image_column(data: Mapping[str, Any], *, reads_images: bool, reader: str) -> list[Sequence[RowImage] | None] | None:
    """The column `images` of a batch; None if no row has images.

    Raises:
        NotSupportedError: a row has images, and `reader`, such as "The policy", reads none.
    """
    column: list[Sequence[RowImage] | None] = data.get("images", [])
    with_images = [row for row, images in enumerate(column) if images]
    if with_images and not reads_images:
        raise NotSupportedError(
            f"{reader} does not read images, but {len(with_images)} of {len(column)} rows have some (the first is row "
            f"{with_images[0]}). Use `backend: hf` with a vision-language model, or data without images."
        )
    return column if with_images else None


def refuse_text(data: Any) -> None:
    """Raise a DataError if a caller passed text instead of columns of token ids."""
    if not isinstance(data, Mapping):
        raise DataError(
            f"Expected a BatchedDataDict with `input_ids` [B, T] and `input_lengths` [B], found {type(data).__name__}. "
            "For text, call generate_text(prompts), which returns text."
        )


def to_output(completions: Sequence[Completion], *, has_options: bool = False) -> BatchedDataDict[Any]:
    """Finished rows as a `GenerationOutputSpec`, in the order given.

    Args:
        completions: the rows.
        has_options: whether the call has the column `sampling`; its output then has `top_logprobs`, `prompt_logprobs` and
            `sampled_sets` even if no row requested them, so that all parts of a call have the same columns.
    """
    has_alternatives = has_options or any(row.top_logprobs is not None for row in completions)
    alternatives = [None if row.top_logprobs is None else [list(top) for top in row.top_logprobs] for row in completions]
    sets, scores = [row.sampled_sets for row in completions], [row.prompt_logprobs for row in completions]
    lengths = [len(row.prompt) + len(row.tokens) for row in completions]
    output_ids = torch.full((len(completions), max(lengths, default=0)), int(pad_value("output_ids")), dtype=torch.int64)
    logprobs, versions = torch.zeros(output_ids.shape, dtype=torch.float32), torch.full(output_ids.shape, -1)
    for index, (row, length) in enumerate(zip(completions, lengths, strict=True)):
        output_ids[index, :length] = torch.tensor([*row.prompt, *row.tokens])
        logprobs[index, len(row.prompt) : length] = torch.tensor(row.logprobs)
        versions[index, len(row.prompt) : length] = torch.as_tensor(row.token_versions or row.weight_version)
    return BatchedDataDict(
        {
            "output_ids": output_ids,
            "generation_lengths": torch.tensor([len(row.tokens) for row in completions], dtype=torch.int64),
            "unpadded_sequence_lengths": torch.tensor(lengths, dtype=torch.int64),
            "logprobs": logprobs,
            "truncated": torch.tensor([row.truncated for row in completions], dtype=torch.bool),
            "weight_version": torch.tensor([row.weight_version for row in completions], dtype=torch.int64),
            "token_versions": versions,
            **({"top_logprobs": alternatives} if has_alternatives else {}),
            **({PROMPT_LOGPROBS: scores} if has_options or any(each is not None for each in scores) else {}),
            **({SETS: sets} if has_options or any(each is not None for each in sets) else {}),
        }
    )


def end_token_ids(*sources: Any, further: Iterable[int] | None = None, repeated: int | None = None) -> frozenset[int]:
    """Ids that end a completion: the `eos_token_id` (an int, a list or None) of each source that is not None, and `further`.

    Raises:
        ConfigError: `repeated`, the `eos_token_id` of the config, is of no source.
    """
    ids: set[int] = set()
    for source in sources:
        configured = getattr(source, "eos_token_id", None)
        ids.update([configured] if isinstance(configured, int) else configured or ())
    if repeated is not None and repeated not in ids:
        raise ConfigError(
            f"eos_token_id is {repeated}, but the end-of-sequence tokens of the model are {sorted(ids)}, and they always end a "
            "completion. Remove the key, or use stop_token_ids, which adds further tokens.",
            key="policy.generation.eos_token_id",
        )
    return frozenset(ids.union(further or ()))


def _check_options(own_sampling: Sequence[Mapping[str, Any] | None], supported: Collection[str]) -> None:
    unsupported = sorted({name for options in own_sampling for name in options or ()}.difference(supported))
    if _TEMPERATURE & {*unsupported}:
        raise NotSupportedError("This engine samples all rows at one temperature. Remove the column `sampling`.")
    if unsupported:
        raise NotSupportedError(
            f"This engine does not support {', '.join(unsupported)} in the column `sampling`. Supported: "
            f"{', '.join(sorted(supported)) or 'none'}."
        )


def _check_prompt(number: int, prompt: list[int], length: int, limits: LengthLimits) -> None:
    if not prompt or length != len(prompt):
        raise DataError(
            f"Row {number} has input length {length}, but input_ids has {len(prompt)} positions: a prompt needs at least one "
            "token, all of them inside input_ids. Drop the row, or begin it with a start token."
        )
    if length >= limits.max_model_len:
        raise DataError(
            f"Row {number} has a prompt of {length} tokens, which leaves no space for a completion within max_model_len = "
            f"{limits.max_model_len}. Raise policy.max_total_sequence_length (up to the model's limit) or drop the row."
        )
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        outside = next(token for token in prompt if not 0 <= token < limits.vocab_size)
        raise DataError(
            f"Row {number} has token id {outside}, but the model's embedding has rows for ids 0 to {limits.vocab_size - 1}. "
            "Tokenize with the model's own tokenizer. If you already do, drop the row, or give the model rows for its added "
            "tokens."
        )


def _row_limits(batch: BatchedDataDict[Any], prompts: list[list[int]], limits: LengthLimits) -> list[int]:
    own = batch["max_new_tokens"].tolist() if "max_new_tokens" in batch else [limits.max_new_tokens] * len(prompts)
    for number, limit in enumerate(own):
        if limit < 1:
            raise DataError(f"Row {number} has max_new_tokens = {limit}: it must be at least 1.")
    return [
        min(limit, limits.max_new_tokens, limits.max_model_len - len(prompt))
        for limit, prompt in zip(own, prompts, strict=True)
    ]


def _row_stop_strings(
    batch: BatchedDataDict[Any], rows: int, common: tuple[str, ...], *, reads_text: bool
) -> list[tuple[str, ...]]:
    own = batch["stop_strings"] if "stop_strings" in batch else [None] * rows
    merged = [(*common, *(strings or ())) for strings in own]
    for number, strings in enumerate(merged):
        if any(not string for string in strings):
            raise DataError(f"Row {number}: stop strings must not be empty.")
        if strings and not reads_text:
            raise DataError(
                f"Row {number} has stop strings {list(strings)}, which require a tokenizer. Set policy.tokenizer.name."
            )
    return merged


def lengths_from_attention_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """Number of tokens of each row, [B] int64, from a mask [B, T] with 1 on tokens and 0 on padding.

    Raises:
        DataError: A row is padded on the left or has gaps, or an entry is neither 0 nor 1.
    """
    if attention_mask.ndim != 2:
        raise DataError(f"attention_mask has shape {list(attention_mask.shape)}: expected [B, T]")
    if bool(((attention_mask != 0) & (attention_mask != 1)).any()):
        raise DataError("attention_mask has values other than 0 and 1: use 1 on tokens and 0 on padding")
    mask = attention_mask.to(torch.int64)
    lengths = mask.sum(1)
    expected = torch.arange(mask.shape[1], device=mask.device) < lengths.unsqueeze(1)
    wrong = (mask.bool() != expected).any(1).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise DataError(
            f"attention_mask of row {row} is {_brief(mask[row])}: tokens must come first, followed by padding, without gaps "
            "(set padding_side='right' in the tokenizer)"
        )
    return lengths


def with_input_lengths(data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """The batch with `input_lengths` [B] instead of an `attention_mask` [B, T]; the same batch if it has no mask.

    This is the only conversion of masks: everything behind the policy and generation interfaces reads lengths.

    Raises:
        DataError: The batch has neither of them, the mask is not right-padded, or the two contradict each other.
    """
    if "attention_mask" not in data:
        if "input_lengths" not in data:
            raise DataError(f"a batch for a model needs input_lengths [B] (or attention_mask [B, T]): found {sorted(data)}")
        return data
    lengths = lengths_from_attention_mask(data["attention_mask"])
    if "input_lengths" in data and not torch.equal(lengths, data["input_lengths"].to(lengths)):
        raise DataError(
            f"input_lengths is {_brief(data['input_lengths'])}, but attention_mask counts {_brief(lengths)}: pass only one"
        )
    accepted = data.copy()
    del accepted["attention_mask"]
    accepted["input_lengths"] = lengths
    return accepted


def _brief(values: torch.Tensor) -> str:
    listed = values.tolist()
    return str(listed) if len(listed) <= 16 else f"{listed[:16]}..."


def mix(state: torch.Tensor) -> torch.Tensor:
    """A bijection of int64 whose outputs look independent (Steele, Lea, Flood 2014), elementwise."""
    # The multipliers are 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB.
    state = (state ^ shift_right(state, 30)) * -4658895280553007687
    state = (state ^ shift_right(state, 27)) * -7723592293110705685
    return state ^ shift_right(state, 31)


def shift_right(state: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift as of uint64: `>>` of int64 copies the sign bit."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def derived_seeds(seed: int, call: int, rows: int) -> torch.Tensor:
    """[rows] int64, distinct seeds for the rows of one call, if the batch has none."""
    base = mix(mix(torch.tensor([seed])) + call)
    return mix(base + torch.arange(rows))
