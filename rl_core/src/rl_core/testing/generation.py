"""Conformance of generation backends: what they sample is compared with a reference model of the kit."""

from __future__ import annotations

import asyncio
import copy
from typing import Any, ClassVar, NamedTuple

import torch

from rl_core.config.schema import DeadlineConfig, GenerationConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError, RLCoreError, WeightSyncError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.plugins.component import Kind
from rl_core.testing import reference
from rl_core.testing.comparisons import check_logprobs, check_unchanged, section_of
from rl_core.testing.outputs.models import check_version, generated
from rl_core.testing.promises import Condition, Conformance, Found, creation, declares, errors_of_workers, must_raise, promise
from rl_core.testing.reference import ReferenceSender

TEMPERATURE, LIMIT = 0.7, 12
_ROWS = 24
_DEVIATIONS = 6.0
"""Standard deviations of a sum of log-probabilities; a right engine exceeds it in one of 10^9 calls."""
_FORM, _SEEDS, _AGREES, _REFIT = (
    "test_outputs_have_the_documented_form",
    "test_seeds_are_independent_of_other_rows",
    "test_log_probabilities_equal_the_reference",
    "test_a_refit_brings_the_trained_weights",
)


class _Subject(NamedTuple):
    """An engine, and what sends its weights."""

    engine: GenerationInterface
    sender: ReferenceSender


_REFITTED = Condition(text="the engine has its own weights", holds=lambda tests: not tests.section().has_own_weights)


class GenerationConformance(Conformance[_Subject]):
    """Promises of generation backends.

    Attributes:
        tolerance: largest difference of a log-probability from the reference, in nats; for float32.
    """

    kind = Kind.GENERATION
    minimum = 12
    tolerance: ClassVar[float] = 1e-3

    @classmethod
    def section(cls) -> GenerationConfig:
        """The engine's section: the model of the kit, with a temperature other than 1."""
        values = {"model_name": str(cls._folder / "model"), "temperature": TEMPERATURE, "max_new_tokens": LIMIT}
        values |= {"backend": cls.component, **cls.config}
        return section_of(cls.registered(), GenerationConfig, values)

    @classmethod
    def create(cls) -> _Subject:
        weights = reference.make_weights()
        reference.save_model(cls._folder / "model", weights)
        sender = ReferenceSender(weights, cls._folder)
        cls._exits.callback(sender.leave_refit)
        section = cls.section()
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
            distributions = reference.log_distributions(
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
        "`generate_async` yields each row once, equal to that of `generate`.", applies=declares("async_rows"), after=_SEEDS
    )
    def test_generate_async_equals_generate(self) -> None:
        rows = self._rows()
        whole = _completions(self._generate(rows))
        streamed: dict[int, list[int]] = {}

        async def collect() -> None:
            async for row, output in self._engine.generate_async(rows):
                if row in streamed:
                    raise Found(f"row {row} was yielded twice.")
                [streamed[row]] = _completions(output)

        asyncio.run(collect())
        for row, tokens in enumerate(whole):
            if streamed.get(row) != tokens:
                raise Found(f"row {row} has the tokens {tokens} in `generate` and {streamed.get(row)} in `generate_async`.")

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

    @property
    def _engine(self) -> GenerationInterface:
        return self.subject().engine

    def _generate(self, rows: BatchedDataDict[Any], *, greedy: bool = False) -> BatchedDataDict[Any]:
        """The output for copies of the rows, checked as in a run."""
        return generated(self._engine, BatchedDataDict(copy.deepcopy(dict(rows))), greedy=greedy)

    def _greedy(self) -> list[tuple[list[int], list[int]]]:
        """The greedy tokens of each row, and the expected ones."""
        rows = self._rows()
        prompts = [ids[:length] for ids, length in zip(rows["input_ids"], rows["input_lengths"].tolist(), strict=True)]
        expected = [
            reference.greedy_completion(self.subject().sender.received, prompt, limit=LIMIT).tolist() for prompt in prompts
        ]
        return list(zip(_completions(self._generate(rows, greedy=True)), expected, strict=True))

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

    def _compared(self, output: BatchedDataDict[Any]) -> str:
        """The largest difference of log-probabilities from the reference."""
        ids, ends = output["output_ids"], output["unpadded_sequence_lengths"]
        expected = reference.logprobs(self.subject().sender.received, ids, ends, temperature=TEMPERATURE)
        starts, position = ends - output["generation_lengths"], torch.arange(ids.shape[1])
        expected = torch.where(position >= starts.unsqueeze(1), expected, 0.0)
        return check_logprobs(output["logprobs"], expected, tolerance=self.tolerance, when=f"at temperature {TEMPERATURE}")


def _spans(output: BatchedDataDict[Any]) -> list[tuple[int, int, torch.Tensor]]:
    """First and last position of each completion, and the tokens of the row."""
    ends, sampled = output["unpadded_sequence_lengths"].tolist(), output["generation_lengths"].tolist()
    return [(end - count, end, tokens) for end, count, tokens in zip(ends, sampled, output["output_ids"], strict=True)]


def _completions(output: BatchedDataDict[Any]) -> list[list[int]]:
    return [tokens[start:end].tolist() for start, end, tokens in _spans(output)]
