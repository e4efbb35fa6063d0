"""Conformance of generation backends: what they sample is compared with a reference model of the kit."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple
from unittest import SkipTest

import torch

from rl_core.config.schema import DeadlineConfig, GenerationConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.tokenizer import decode
from rl_core.errors import DataError, RLCoreError, WeightSyncError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.worker import GenerationFacts
from rl_core.plugins.component import Kind
from rl_core.testing import adapters, images, reference
from rl_core.testing.comparisons import check_facts, check_logprobs, check_sets, check_unchanged, section_of
from rl_core.testing.outputs.models import check_version, generated
from rl_core.testing.promises import Condition, Conformance, Found, creation, declares, errors_of_workers, must_raise, promise
from rl_core.testing.reference import Llama, ReferenceModel, ReferenceSender

TEMPERATURE, LIMIT = 0.7, 12
_ROWS = 24
_VISIBLE = 94
"""Number of visible characters of ASCII, each of which is a token."""
_DEVIATIONS = 6.0
"""Standard deviations of a sum of log-probabilities; a right engine exceeds it in one of 10^9 calls."""
_FORM, _TRUNCATED, _SEEDS, _AGREES, _REFIT = (
    "test_outputs_have_the_documented_form",
    "test_truncated_rows_are_reported",
    "test_seeds_are_independent_of_other_rows",
    "test_log_probabilities_equal_the_reference",
    "test_a_refit_brings_the_trained_weights",
)


class _Subject(NamedTuple):
    """An engine, and what sends its weights."""

    engine: GenerationInterface
    sender: ReferenceSender

    def shutdown(self) -> None:
        self.sender.leave_refit()
        self.engine.shutdown()


_REFITTED = Condition(text="the engine has its own weights", holds=lambda tests: not tests.section().has_own_weights)
_STOP_TOKENS = [*range(100, 140)]
_FILTERS = {"top_k": 4, "top_p": 0.8}
_FILTERED = Condition(
    text="neither `top_k` nor `top_p` is declared", holds=lambda tests: bool(_FILTERS.keys() & tests.capabilities())
)
_OWN_OPTIONS: tuple[dict[str, Any] | None, ...] = ({"temperature": 1.3}, {"top_k": 3}, None, {"top_p": 0.6})
"""Options of the rows, in turn."""


class GenerationConformance(Conformance[_Subject]):
    """Promises of generation backends.

    Attributes:
        tolerance: largest difference of a log-probability from the reference, in nats; for float32.
        model: the model that it is tested with; an engine of a model that is not in Transformers defines its own.
        picture_model: the model that rows with images are tested with.
    """

    kind = Kind.GENERATION
    minimum = 15
    tolerance: ClassVar[float] = 1e-3
    model: ClassVar[ReferenceModel] = Llama()
    picture_model: ClassVar[images.PictureModel | None] = None

    @classmethod
    def section(cls) -> GenerationConfig:
        """The engine's section: the model of the kit, with a temperature other than 1."""
        values = {"model_name": str(cls._folder / "model"), "temperature": TEMPERATURE, "max_new_tokens": LIMIT}
        values |= {"backend": cls.component, **cls.config}
        section = section_of(cls.registered(), GenerationConfig, values)
        return adapters.for_adapted_policy(section) if cls.model.adapted and "lora_adapters" in cls.capabilities() else section

    @classmethod
    def create(cls) -> _Subject:
        weights = cls.model.make_weights()
        cls.model.save(cls._folder / "model", weights)
        sender = ReferenceSender(weights, cls._folder)
        cls._exits.callback(sender.leave_refit)
        section = cls.with_settings(cls.section())
        cls._exits.enter_context(reference.one_thread())
        engine = cls.registered().load()(config=section, cluster=cls.cluster(), deadlines=DeadlineConfig())
        if not isinstance(engine, GenerationInterface):
            raise Found(f"{type(engine).__name__} is not a subclass of rl_core.interfaces.GenerationInterface.")
        cls._exits.callback(engine.shutdown)
        engine.prepare_for_generation()
        if not section.has_own_weights:
            sender.refit(engine, cls.capabilities())
            engine.invalidate_kv_cache()
        return _Subject(engine, sender)

    test_it_is_created_from_its_section = creation(
        "It is created with `config`, `cluster` and `deadlines`, and loads a folder in the format of Transformers."
    )

    @promise("It returns the required facts of `GenerationFacts` when it has loaded, each with its type.")
    def test_facts_are_those_of_the_model(self) -> str:
        return check_facts(self._engine, GenerationFacts, vocab_size=reference.VOCABULARY)

    @promise("Outputs have the columns, types, lengths and order of `GenerationOutputSpec`, and begin with the prompts.")
    def test_outputs_have_the_documented_form(self) -> None:
        output = self._generate(self._rows())
        check_version(self._engine, output)

    @promise("The log-probability of each sampled token is that of the reference at the configured temperature.", after=_FORM)
    def test_log_probabilities_equal_the_reference(self) -> str:
        return self._compared(self._generate(self._rows()))

    @promise("Tokens are drawn from the distribution of the reference at the configured temperature.", after=_AGREES)
    def test_tokens_are_drawn_from_the_distribution(self) -> str:
        output = self._generate(self._rows(seed=5))
        total, variance = 0.0, 0.0
        for start, end, tokens in _spans(output):
            distributions = self.model.log_distributions(
                self.subject().sender.received, tokens[: end - 1], temperature=TEMPERATURE
            )[start - 1 :].double()
            means = (distributions.exp() * distributions).sum(dim=-1)
            squares = (distributions.exp() * distributions.square()).sum(dim=-1)
            drawn = distributions.gather(1, tokens[start:end, None])[:, 0]
            total, variance = total + float((drawn - means).sum()), variance + float((squares - means.square()).sum())
        deviations = total / variance**0.5
        if abs(deviations) > _DEVIATIONS:
            kind = "too likely" if deviations > 0 else "too unlikely"
            raise Found(
                f"the sampled tokens are {kind}: the sum of their log-probabilities is {abs(deviations):.0f} standard "
                "deviations from that of tokens drawn from the distribution. Sample at the configured temperature."
            )
        return f"{deviations:.1f} standard deviations"

    @promise("`greedy` takes the most likely token at each position, up to the end token or the limit.", after=_FORM)
    def test_greedy_takes_the_most_likely_tokens(self) -> None:
        for row, (found, expected) in enumerate(self._greedy()):
            if found[: len(expected)] != expected[: len(found)]:
                raise Found(f"row {row} has the tokens {found}, and the most likely ones are {expected}.")

    @promise("A completion that ends by itself includes its end-of-sequence token.", after=_FORM)
    def test_the_end_token_is_kept(self) -> str:
        ended = 0
        for row, (found, expected) in enumerate(self._greedy()):
            if expected[-1] == reference.EOS and found == expected[:-1]:
                raise Found(f"row {row} ends before its end token {reference.EOS}: {found}. It must be {expected}.")
            ended += expected[-1] == reference.EOS
        return f"{ended} rows ended by themselves"

    @promise("`truncated` is true for rows that a limit ended, and false for rows that ended by themselves.", after=_FORM)
    def test_truncated_rows_are_reported(self) -> str:
        output = self._generate(self._rows(), greedy=True)
        for row, (start, end, tokens) in enumerate(_spans(output)):
            is_cut = int(output["generation_lengths"][row]) == LIMIT and int(tokens[end - 1]) != reference.EOS
            is_ended = int(tokens[end - 1]) == reference.EOS
            if bool(output["truncated"][row]) is not is_cut and (is_cut or is_ended):
                raise Found(
                    f"row {row} has {end - start} tokens, the last is {int(tokens[end - 1])}, and `truncated` is {not is_cut}."
                )
        return f"{int(output['truncated'].sum())} of {output.size} rows"

    @promise("`max_new_tokens` of a row limits that row.", after=_FORM)
    def test_limits_of_rows_are_kept(self) -> None:
        rows = self._rows()
        rows["max_new_tokens"] = torch.arange(rows.size) % 4 + 1
        self._generate(rows)

    @promise("The tokens of a row depend on its seed, not on the other rows of the call or on their order.", after=_FORM)
    def test_seeds_are_independent_of_other_rows(self) -> None:
        rows = self._rows()
        chosen = torch.tensor([7, 2, 11])
        whole = _completions(self._generate(rows))
        some = _completions(self._generate(BatchedDataDict({key: value[chosen] for key, value in rows.items()})))
        for number, row in enumerate(chosen.tolist()):
            if some[number] != whole[row]:
                raise Found(
                    f"row {row} has the tokens {whole[row]} among {rows.size} rows, and {some[number]} among {len(chosen)}."
                )

    @promise(
        "A row ends with the token that completes one of its `stop_strings` in the text of its completion; it is not "
        "`truncated`, and other rows are not affected.",
        after=(_SEEDS, "test_the_end_token_is_kept", _TRUNCATED),
    )
    def test_stop_strings_end_their_rows(self) -> str:
        if not self._facts.get("reads_text", True):
            raise SkipTest("the engine has no tokenizer")
        rows, tokenizer = self._rows(seed=21), reference.byte_tokenizer()
        rows["input_ids"] = torch.where(rows["input_ids"] > 0, rows["input_ids"] % _VISIBLE + reference.FIRST_BYTE, 0)
        whole = _completions(self._generate(rows))
        prompts = [ids[:length].tolist() for ids, length in zip(rows["input_ids"], rows["input_lengths"], strict=True)]
        stops = [_stop_strings(number, *row, tokenizer) for number, row in enumerate(zip(prompts, whole, strict=True))]
        output = self._generate(BatchedDataDict({**rows, "stop_strings": stops}))
        for row, (found, tokens, strings) in enumerate(zip(_completions(output), whole, stops, strict=True)):
            expected, is_ended = _until(tokens, strings, tokenizer)
            if found != expected:
                raise Found(
                    f"row {row} with the stop strings {strings} has the text {decode(tokenizer, found)!r}. It must be "
                    f"{decode(tokenizer, expected)!r}, with the last token of a stop string; without one, the row is "
                    f"{decode(tokenizer, tokens)!r} after the prompt {decode(tokenizer, prompts[row])!r}."
                )
            if is_ended and bool(output["truncated"][row]):
                raise Found(f"row {row} ends with one of its stop strings {strings}, and is `truncated`.")
        return f"{sum(tokens != ended for tokens, ended in zip(whole, _completions(output), strict=True))} rows ended earlier"

    @promise(
        "A row's own `temperature`, `top_k` and `top_p` (column `sampling`) replace the engine's in that row.", after=_AGREES
    )
    def test_options_of_a_row_are_its_own(self) -> str:
        if not self._facts.get("reads_sampling", False):
            raise SkipTest("the facts have no `reads_sampling`")
        rows, kinds = self._rows(seed=22), len(_OWN_OPTIONS)
        output = self._generate(BatchedDataDict({**rows, "sampling": [_OWN_OPTIONS[row % kinds] for row in range(_ROWS)]}))
        for number, options in enumerate(_OWN_OPTIONS):
            own = {"temperature": TEMPERATURE, "top_k": None, "top_p": 1.0, **(options or {})}
            of_kind = output.select_indices([*range(number, _ROWS, kinds)])
            found = self._compared(of_kind, when=f"in a row with `sampling` {options}", **own)
        return found

    @promise("Rows with different seeds are different samples.", after=_FORM)
    def test_seeds_change_the_sample(self) -> None:
        rows = self._rows()
        other: BatchedDataDict[Any] = BatchedDataDict({**rows, "sample_seeds": rows["sample_seeds"] + 1000})
        if _completions(self._generate(rows)) == _completions(self._generate(other)):
            raise Found("all rows have the same tokens with other seeds.")

    @promise("`generate` does not change the rows that it is passed.", after=_FORM)
    def test_its_arguments_are_unchanged(self) -> None:
        check_unchanged("generate", self._engine.generate, self._rows())

    @promise("A prompt that is empty or has a token outside of the vocabulary is a `DataError`.")
    def test_impossible_prompts_are_refused(self) -> None:
        for what, tokens, length in (
            ("an empty prompt", [2], 0),
            ("a token outside of the vocabulary", [reference.VOCABULARY], 1),
        ):
            rows: BatchedDataDict[Any] = BatchedDataDict(input_ids=torch.tensor([tokens]), input_lengths=torch.tensor([length]))
            with must_raise(DataError, otherwise=f"{what} is accepted."):
                self._engine.generate(rows)

    @promise("`prepare_for_generation` and `finish_generation` may be called twice, and sampling continues.", after=_AGREES)
    def test_it_may_be_prepared_and_finished_twice(self) -> str:
        for call in (self._engine.finish_generation, self._engine.prepare_for_generation):
            call()
            call()
        return self._compared(self._generate(self._rows()))

    @promise(
        "`generate_async` yields each row once, equal to that of `generate`, also a greedy one that joins others in progress.",
        applies=declares("async_rows"),
        after=_SEEDS,
    )
    def test_generate_async_equals_generate(self) -> None:
        rows, half = self._rows(), _ROWS // 2
        parts = (rows.slice(0, half), False), (rows.slice(half, _ROWS), True)
        whole = [tokens for part, greedy in parts for tokens in _completions(self._generate(part, greedy=greedy))]
        streamed: dict[int, list[int]] = {}

        async def collect(first: int) -> None:
            part, greedy = parts[first > 0]
            joining: list[asyncio.Task[None]] = []
            async for number, output in self._engine.generate_async(part, greedy=greedy):
                if not first and not joining:
                    joining.append(asyncio.ensure_future(collect(half)))
                if (row := first + number) in streamed:
                    raise Found(f"row {row} was yielded twice.")
                [streamed[row]] = _completions(output)
            await asyncio.gather(*joining)

        asyncio.run(collect(0))
        for row, tokens in enumerate(whole):
            if (found := streamed.get(row)) != tokens:
                kind = "greedy row, which joined later," if row >= half else "row"
                raise Found(f"{kind} {row} has the tokens {tokens} in `generate` and {found} in `generate_async`.")

    @promise(
        "After a refit the engine samples with the trained weights, under their version.", applies=_REFITTED, after=_AGREES
    )
    def test_a_refit_brings_the_trained_weights(self) -> str:
        subject = self._refitted(seed=1)
        found, sent = subject.engine.weight_version, subject.sender.get_weight_version()
        if found != sent:
            raise Found(f"the engine has weight version {found} after a refit with version {sent}.")
        output = self._generate(self._rows(seed=9))
        check_version(subject.engine, output)
        return self._compared(output)

    @promise("After a refit the engine's fingerprint is that of the weights that were sent.", applies=_REFITTED, after=_REFIT)
    def test_the_fingerprint_is_that_of_the_sent_weights(self) -> None:
        subject = self._refitted(seed=2)
        expected, found = subject.sender.fingerprint(subject.engine), subject.engine.weight_fingerprint()
        if found != expected:
            raise Found(f"the fingerprint is {found}, and that of the sent weights {expected}.")

    @promise(
        "After a refit and `invalidate_kv_cache`, no keys and values of earlier weights are used.",
        applies=_REFITTED,
        after=_REFIT,
    )
    def test_prefixes_are_dropped_after_a_refit(self) -> str:
        rows = self._rows(seed=13, shortest=40)
        self._generate(rows)
        self._refitted(seed=3)
        return self._compared(self._generate(rows))

    @promise(
        "A refit in which tensors are missing leaves an engine that refuses to be verified.", applies=_REFITTED, after=_REFIT
    )
    def test_an_incomplete_refit_is_noticed(self) -> None:
        sender, engine = self.subject().sender, self._engine
        sender.train(seed=4)
        try:
            with must_raise(RLCoreError, otherwise="3 tensors did not arrive, and the engine has a version and a fingerprint."):
                sender.refit(engine, self.capabilities(), leave_out=3)
                _ = engine.weight_version, engine.weight_fingerprint()
        finally:
            self._refitted(seed=5)

    @promise("A manifest with a wrong shape is refused before anything is loaded.", applies=_REFITTED, after=_REFIT)
    def test_a_wrong_manifest_is_refused(self) -> None:
        manifest = self.subject().sender.weight_manifest()
        name, (shape, dtype) = next(iter(manifest.items()))
        wrong = (shape[0] + 1, *shape[1:])
        try:
            with (
                must_raise(WeightSyncError, otherwise=f"{name} is accepted with the shape {[*wrong]} instead of {[*shape]}."),
                errors_of_workers(),
            ):
                self._engine.prepare_refit_info({**manifest, name: (wrong, dtype)})
        finally:
            self._refitted(seed=6)

    @promise(
        "Rows in progress at a refit continue: they keep their tokens, and further ones are drawn with the new weights, under "
        "their version.",
        applies=declares("refit_in_flight"),
        after=("test_generate_async_equals_generate", _REFIT),
    )
    def test_rows_in_progress_continue_after_a_refit(self) -> str:
        rows, before = self._rows(seed=24, shortest=20), self.subject().sender.received
        rows["max_new_tokens"] = torch.where(torch.arange(_ROWS) < 2, 3, LIMIT)
        whole, version = _completions(self._generate(rows)), self._engine.weight_version
        outputs: dict[int, BatchedDataDict[Any]] = {}

        async def collect() -> None:
            async for row, output in self._engine.generate_async(rows):
                if not outputs:  # the first rows have ended, and others have as many tokens
                    self._refitted(seed=7)
                outputs[row] = output

        asyncio.run(collect())
        if lost := sorted({*range(_ROWS)} - outputs.keys()):
            raise Found(f"the rows {lost} were in progress at a refit and were not returned.")
        output: BatchedDataDict[Any] = BatchedDataDict.from_batches([outputs[row] for row in range(_ROWS)])
        versions = output.get("token_versions", output["weight_version"][:, None].expand_as(output["output_ids"]))
        continued = 0
        for row, (start, end, tokens) in enumerate(_spans(output)):
            own, kept = versions[row, start:end].tolist(), tokens[start:end][versions[row, start:end] == version].tolist()
            number = len(kept)
            if own != [version] * number + [version + 1] * (end - start - number):
                raise Found(f"row {row} has the token versions {own} after a refit from version {version} to {version + 1}.")
            if kept != whole[row][:number]:
                raise Found(f"row {row} has the tokens {kept} of version {version}, and {whole[row]} if there is no refit.")
            continued += 0 < number < end - start
        self._compared(output, when="with a refit while rows were in progress", earlier=(versions == version, before))
        if not continued and not self.uses_ray:
            raise Found("no row has tokens of both versions, although rows were in progress at the refit.")
        return f"{continued} of {_ROWS} rows have tokens of both versions"

    @promise("A row ends with the first of `stop_token_ids`, and is not `truncated`.", after=_TRUNCATED)
    def test_stop_token_ids_end_rows(self) -> str:
        with self.created_with(stop_token_ids=_STOP_TOKENS):
            output = self._generate(self._rows(seed=25))
        ended = 0
        for row, tokens in enumerate(_completions(output)):
            has_ended = tokens[-1] in _STOP_TOKENS
            if {*tokens[:-1]} & {*_STOP_TOKENS} or (has_ended and bool(output["truncated"][row])):
                cut, ids = bool(output["truncated"][row]), f"{_STOP_TOKENS[0]} to {_STOP_TOKENS[-1]}"
                raise Found(f"row {row} must end with its first token from {ids}. It is {tokens}, and `truncated` is {cut}.")
            ended += has_ended
        return f"{ended} of {_ROWS} rows"

    @promise("With `top_k` and `top_p`, tokens are drawn and scored among the kept.", applies=_FILTERED, after=_AGREES)
    def test_top_k_and_top_p_limit_the_tokens(self) -> str:
        settings: dict[str, Any] = {name: _FILTERS[name] for name in _FILTERS.keys() & self.capabilities()}
        requested = {"sampling": [{"sampled_sets": True}] * _ROWS} if "sampled_sets" in self.capabilities() else {}
        with self.created_with(**settings):
            output = self._generate(BatchedDataDict({**self._rows(seed=23), **requested}))
            check_sets(output, self.model, self.subject().sender.received, temperature=TEMPERATURE, **settings)
            return self._compared(output, when=f"with {settings}", **settings)

    @property
    def _engine(self) -> GenerationInterface:
        return self.subject().engine

    @property
    def _facts(self) -> Mapping[str, Any]:
        return getattr(self._engine, "facts", {})

    def _generate(self, rows: BatchedDataDict[Any], *, greedy: bool = False) -> BatchedDataDict[Any]:
        """The output for copies of the rows, checked as in a run."""
        return generated(self._engine, BatchedDataDict(copy.deepcopy(dict(rows))), greedy=greedy)

    def _greedy(self) -> list[tuple[list[int], list[int]]]:
        """The greedy tokens of each row, and the expected ones."""
        rows = self._rows()
        prompts = [ids[:length] for ids, length in zip(rows["input_ids"], rows["input_lengths"].tolist(), strict=True)]
        expected = [
            self.model.greedy_completion(self.subject().sender.received, prompt, limit=LIMIT).tolist() for prompt in prompts
        ]
        return list(zip(_completions(self._generate(rows, greedy=True)), expected, strict=True))

    test_adapters_are_added_to_their_layers = adapters.test_adapters_are_added_to_their_layers
    test_a_later_refit_brings_adapters_alone = adapters.test_a_later_refit_brings_adapters_alone
    test_adapters_outlast_a_pause = adapters.test_adapters_outlast_a_pause
    test_adapters_that_fit_no_layer_are_refused = adapters.test_adapters_that_fit_no_layer_are_refused
    test_rows_are_sampled_with_their_images = images.test_rows_are_sampled_with_their_images

    def _refitted(self, *, seed: int) -> _Subject:
        """Train the sender's weights and send them."""
        subject = self.subject()
        subject.sender.train(seed=seed)
        subject.sender.refit(subject.engine, self.capabilities())
        if not subject.engine.invalidate_kv_cache():
            raise Found("invalidate_kv_cache returned False after a refit, although no row is in progress.")
        return subject

    def _rows(self, *, seed: int = 0, shortest: int = 1) -> BatchedDataDict[Any]:
        """Prompts of unequal lengths, with different seeds."""
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(shortest, shortest + 12, (_ROWS,), generator=generator)
        width = int(lengths.max())
        ids = torch.randint(reference.FIRST_BYTE, reference.VOCABULARY - 2, (_ROWS, width), generator=generator)
        return BatchedDataDict(
            input_ids=torch.where(torch.arange(width) < lengths.unsqueeze(1), ids, 0),
            input_lengths=lengths,
            sample_seeds=torch.arange(_ROWS) * 7 + 1000 * seed,
        )

    def _compared(
        self,
        output: BatchedDataDict[Any],
        *,
        temperature: float = TEMPERATURE,
        when: str = f"at temperature {TEMPERATURE}",
        earlier: tuple[torch.Tensor, reference.Weights] | None = None,
        **limits: Any,
    ) -> str:
        """The largest difference of log-probabilities from the reference, with the `limits` of `reference.limited`.

        `earlier` are a mask [B, T] of tokens and the weights that drew them.
        """
        ids, ends = output["output_ids"], output["unpadded_sequence_lengths"]
        expected = self.model.logprobs(self.subject().sender.received, ids, ends, temperature=temperature, **limits)
        if earlier is not None:
            expected = self.model.logprobs(earlier[1], ids, ends, temperature=temperature).where(earlier[0], expected)
        starts, position = ends - output["generation_lengths"], torch.arange(ids.shape[1])
        expected = torch.where(position >= starts.unsqueeze(1), expected, 0.0)
        expected = expected.where(~expected.isnan(), output["logprobs"])
        return check_logprobs(output["logprobs"], expected, tolerance=self.tolerance, when=when)


def _spans(output: BatchedDataDict[Any]) -> list[tuple[int, int, torch.Tensor]]:
    """First and last position of each completion, and the tokens of the row."""
    ends, sampled = output["unpadded_sequence_lengths"].tolist(), output["generation_lengths"].tolist()
    return [(end - count, end, tokens) for end, count, tokens in zip(ends, sampled, output["output_ids"], strict=True)]


def _completions(output: BatchedDataDict[Any]) -> list[list[int]]:
    return [tokens[start:end].tolist() for start, end, tokens in _spans(output)]


def _stop_strings(number: int, prompt: list[int], tokens: list[int], tokenizer: Any) -> list[str] | None:
    """Strings of a row of one of three kinds: two tokens of its completion, tokens that are not all of its completion, none."""
    if number % 3 == 2:
        return None
    around = [*prompt[-2:], *(tokens[:1] if _are_visible(tokens[:1]) else [])]
    pairs = [pair for pair in itertools.pairwise(tokens) if _are_visible(pair)]
    if number % 3 or not pairs:
        return [decode(tokenizer, around[:2]), decode(tokenizer, around[-2:])]
    return ["in no row", decode(tokenizer, pairs[len(pairs) // 2])]


def _are_visible(tokens: Sequence[int]) -> bool:
    return all(reference.FIRST_BYTE <= token < reference.FIRST_BYTE + _VISIBLE for token in tokens)


def _until(tokens: list[int], strings: Sequence[str] | None, tokenizer: Any) -> tuple[list[int], bool]:
    """The tokens up to the one that completes a string, and whether there is one."""
    for end in range(1, len(tokens) + 1):
        if any(string in decode(tokenizer, tokens[:end]) for string in strings or ()):
            return tokens[:end], True
    return tokens, False
