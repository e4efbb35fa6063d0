"""Engines that break a promise of engines; most are the Transformers engine with another worker."""

import copy
import math
import time
from dataclasses import replace

import torch

from rl_backends_base.distributed_generation import DistributedGeneration
from rl_backends_hf.config import HFGenerationConfig
from rl_backends_hf.generation import HFGenerationWorker
from rl_backends_hf.sampling.sampler import Sampler
from rl_core.backend import weights_of
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces import GenerationInterface


class EngineOf(DistributedGeneration):
    """An engine of `Worker`, which a subclass replaces; its section is that of the backend `hf`."""

    Worker = HFGenerationWorker
    capabilities = ("in_process", "async_rows", "refit_in_flight", "shared_memory", "held_weight_digests")

    def __init__(self, *, config, **kwargs):
        super().__init__(worker_class=self.Worker, config=HFGenerationConfig(**{**dict(config), "backend": "hf"}), **kwargs)

    @property
    def tokenizer_section(self):
        return self.config.tokenizer


class Right(EngineOf):
    """The right control: the Transformers engine as it is."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            return super().generate(data, greedy=greedy)


class CountsLengthsWithoutThePrompt(EngineOf):
    """Reports the length of the completion as that of the row."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            output["unpadded_sequence_lengths"] = output["generation_lengths"].clone()
            return output


class DecodesGreedily(EngineOf):
    """Takes the most likely token where it should sample, with the right log-probabilities."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            return super().generate(data, greedy=True)


class DropsARow(EngineOf):
    """Returns one row less than it was given."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            return output.slice(0, output.size - 1)


class FromScratchWithoutARefit(GenerationInterface):
    """Written from scratch, without the methods that a refit calls."""

    capabilities = ("in_process",)

    def __init__(self, *, config, cluster=None, deadlines=None):
        self.config = config

    def generate(self, data, greedy=False):
        raise AssertionError("a run without weights must not sample")

    def prepare_for_generation(self, *args, **kwargs):
        return True

    def finish_generation(self, *args, **kwargs):
        return True


class IgnoresSeeds(EngineOf):
    """Draws other tokens for the same seeds."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            data["sample_seeds"] = torch.randint(2**62, (data.size,))
            return super().generate(data, greedy=greedy)


class IgnoresStopTokenIds(EngineOf):
    """Continues rows after a token of `stop_token_ids`."""

    class Worker(HFGenerationWorker):
        def __init__(self, context, config):
            super().__init__(context, config.model_copy(update={"stop_token_ids": None}))


class IgnoresTopK(EngineOf):
    """Declares `top_k`, and draws from all tokens."""

    capabilities = (*EngineOf.capabilities, "top_k")

    class Worker(HFGenerationWorker):
        def __init__(self, context, config):
            super().__init__(context, config.model_copy(update={"top_k": None}))


class KeepsItsFirstWeights(EngineOf):
    """Samples from a copy of its first weights, but receives, digests and reports those of the policy."""

    class Worker(HFGenerationWorker):
        def setup(self):
            facts = super().setup()
            self._received = self.model
            self.attach(copy.deepcopy(self.model), self.config)
            return facts

        def replaceable_weights(self):
            return weights_of(self._received)


class KeepsKeysAndValues(EngineOf):
    """Continues rows in progress at a refit with the keys and values of the old weights."""

    class Worker(HFGenerationWorker):
        def setup(self):
            facts = super().setup()
            loop = self._sampler._loop
            step, loop.recompute = loop.step, lambda: None

            def slow_step(weight_version):
                time.sleep(0.005)  # so that rows are in progress at every refit
                return step(weight_version)

            loop.step = slow_step
            return facts

        def generate(self, data, *, greedy=False):
            other = Sampler(self.model, self.config, tokenizer=self._sampler.tokenizer)  # does not affect the rows in progress
            return other.generate(data, greedy, weight_version=self.get_weight_version())


class LeavesOutTheEndToken(EngineOf):
    """Returns rows that have ended without their end-of-sequence token."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            has_end = ~output["truncated"] & (output["generation_lengths"] > 1)
            ends = output["unpadded_sequence_lengths"] - 1
            at_end = torch.arange(output["output_ids"].shape[1]) == ends.unsqueeze(1)
            output["logprobs"] = output["logprobs"].masked_fill(at_end & has_end.unsqueeze(1), 0.0)
            for key in ("generation_lengths", "unpadded_sequence_lengths"):
                output[key] = output[key] - has_end.long()
            return output


class LeavesOutTheLogProbabilityOfTheEnd(EngineOf):
    """Returns 0.0 for the end-of-sequence token."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            ends = output["unpadded_sequence_lengths"] - 1
            output["logprobs"][torch.arange(output.size), ends] = 0.0
            return output


class LooksForStopStringsInSingleTokens(EngineOf):
    """Looks for stop strings in the text of each token, so one that spans tokens ends no row."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            stops = data.pop("stop_strings", None) or [None] * data.size
            output, tokenizer = super().generate(data, greedy=greedy), self._sampler.tokenizer
            for row, (strings, end) in enumerate(zip(stops, output["unpadded_sequence_lengths"].tolist(), strict=True)):
                start = end - int(output["generation_lengths"][row])
                texts = [tokenizer.decode([token]) for token in output["output_ids"][row, start:end].tolist()]
                if found := [at for at, text in enumerate(texts, 1) if any(string in text for string in strings or ())]:
                    for key in ("output_ids", "logprobs"):
                        output[key][row, start + found[0] :] = 0
                    output["generation_lengths"][row] = found[0]
                    output["unpadded_sequence_lengths"][row] = start + found[0]
                    output["truncated"][row] = False
            return output


class OverstatesProbabilities(EngineOf):
    """Returns log-probabilities that are five percent too high."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            output["logprobs"] = output["logprobs"] * 0.95
            return output


class PadsOnTheLeft(EngineOf):
    """Pads its rows on the left."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            width = output["output_ids"].shape[1]
            for row, length in enumerate(output["unpadded_sequence_lengths"].tolist()):
                for key in ("output_ids", "logprobs"):
                    output[key][row] = output[key][row].roll(width - length)
            return output


class ReportsEndedRowsAsTruncated(EngineOf):
    """Reports every row as cut off at a limit, also those that ended by themselves."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            output["truncated"] = torch.ones_like(output["truncated"])
            return output


class ReportsItsVocabularyAsAFraction(EngineOf):
    """Reports the size of its vocabulary as a float."""

    class Worker(HFGenerationWorker):
        def setup(self):
            facts = super().setup()
            return {**facts, "vocab_size": float(facts["vocab_size"])}


class ReportsOldVersions(EngineOf):
    """Reports that older weights sampled its rows."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            output["weight_version"] = output["weight_version"] - 1
            versions = output["token_versions"]
            output["token_versions"] = versions.where(versions < 0, versions - 1)
            return output


class RestartsRowsAfterARefit(EngineOf):
    """Samples rows that are in progress at a refit again from their prompt."""

    class Worker(HFGenerationWorker):
        _requests, _was_refitted = {}, False

        def refit_begins(self):
            super().refit_begins()
            self._was_refitted = True

        def poll(self, arrivals, *, cancelled=(), wait_s=0.1):
            arrivals, cancelled = list(arrivals), list(cancelled)
            if self._was_refitted:
                arrivals += self._requests.values()
                super().poll([], cancelled=list(self._requests), wait_s=0.0)
            self._was_refitted = False
            self._requests = {**self._requests, **{request.name: request for request in arrivals}}
            results = super().poll(arrivals, cancelled=cancelled, wait_s=wait_s)
            for name in (*results, *cancelled):
                self._requests.pop(name, None)
            return results


class ReusesTheStateOfAFinishedRow(EngineOf):
    """Computes a row that joins after another has ended with the first token of that row."""

    class Worker(HFGenerationWorker):
        _first_of_ended, _own = None, {}

        def poll(self, arrivals, *, cancelled=(), wait_s=0.1):
            joined = []
            for request in arrivals:
                row, first = type(request.row)(request.row), self._first_of_ended
                self._own = {**self._own, request.name: int(row["input_ids"][0, 0])}
                if first is not None and len(self._own) > len(arrivals):  # others are in progress
                    row["input_ids"] = torch.cat([torch.tensor([[first]]), row["input_ids"][:, 1:]], dim=1)
                joined.append(replace(request, row=row))
            results = super().poll(joined, cancelled=cancelled, wait_s=wait_s)
            for name in (*results, *cancelled):
                first = self._own.pop(name, None)
                if name in results and isinstance(results[name], BatchedDataDict):
                    self._first_of_ended = results[name]["output_ids"][0, 0].item()
                    results[name]["output_ids"] = results[name]["output_ids"].clone().index_fill_(1, torch.tensor([0]), first)
            return results


class ReturnsALogProbabilityPerRow(EngineOf):
    """Returns the sum of the log-probabilities of each row."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            output["logprobs"] = output["logprobs"].sum(dim=1)
            return output


class ReturnsBits(EngineOf):
    """Returns logarithms to the base of 2."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            output["logprobs"] = output["logprobs"] / math.log(2)
            return output


class ReturnsCompletionsOnly(EngineOf):
    """Returns the sampled tokens without the prompt."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            width = int(data["input_lengths"].max())
            output["output_ids"], output["logprobs"] = output["output_ids"][:, width:], output["logprobs"][:, width:]
            output["unpadded_sequence_lengths"] = output["generation_lengths"].clone()
            return output


class ReturnsFloat64(EngineOf):
    """Returns log-probabilities in double precision."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            output["logprobs"] = output["logprobs"].double()
            return output


class ReturnsInt32Tokens(EngineOf):
    """Returns tokens as int32."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            output["output_ids"] = output["output_ids"].int()
            return output


class ReturnsLists(EngineOf):
    """Returns lists instead of tensors."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            return BatchedDataDict({key: column.tolist() for key, column in output.items()})


class ReturnsNan(EngineOf):
    """Returns NaN for the last token of a row."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            output["logprobs"][0, int(output["unpadded_sequence_lengths"][0]) - 1] = float("nan")
            return output


class ReturnsNoTruncated(EngineOf):
    """Leaves a column out."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            del output["truncated"]
            return output


class ReturnsProbabilities(EngineOf):
    """Returns probabilities instead of their logarithms."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            output["logprobs"] = output["logprobs"].exp() * (output["logprobs"] != 0)
            return output


class RoundsLogProbabilities(EngineOf):
    """Returns log-probabilities with one decimal."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            output["logprobs"] = output["logprobs"].round(decimals=1)
            return output


class SamplesAtTemperatureOne(EngineOf):
    """Ignores the configured temperature."""

    class Worker(HFGenerationWorker):
        def __init__(self, context, config):
            super().__init__(context, config.model_copy(update={"temperature": 1.0}))


class SetsOf(EngineOf):
    """Returns other sets of kept tokens than it samples from."""

    capabilities = (*EngineOf.capabilities, "top_p", "top_k", "sampled_sets")

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            sets = output.get("sampled_sets", [None])
            if all(row is not None for row in sets):
                output["sampled_sets"] = self.changed(sets, output["output_ids"])
            return output


class LeavesSampledTokensOutOfSets(SetsOf):
    """Returns sets without the sampled token."""

    class Worker(SetsOf.Worker):
        def changed(self, sets, tokens):
            def without(row, own):
                is_own = row["words"] == own[: len(row["counts"])].repeat_interleave(row["counts"])
                return {**row, "words": torch.where(is_own, (row["words"] + 1) % 13, row["words"])}

            return [without(*each) for each in zip(sets, tokens, strict=True)]


class ReturnsSetsOfTheNextRow(SetsOf):
    """Returns the sets of another row."""

    class Worker(SetsOf.Worker):
        def changed(self, sets, tokens):
            return [*sets[1:], sets[0]]


class ReturnsTooWideSets(SetsOf):
    """Returns sets of ten tokens, and the right log-probabilities among fewer."""

    class Worker(SetsOf.Worker):
        def changed(self, sets, tokens):
            def wide(row):
                counts = torch.where(row["counts"] > 0, 13, 0).to(torch.int32)
                return {"counts": counts, "words": torch.arange(13, dtype=torch.int32).repeat(int((counts > 0).sum()))}

            return [wide(row) for row in sets]


class SamplesTooManyTokens(EngineOf):
    """Samples one token more than it may, by repeating the last one."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            ends = output["unpadded_sequence_lengths"]
            for key in ("output_ids", "logprobs"):
                column = torch.nn.functional.pad(output[key], (0, 1))
                column[torch.arange(output.size), ends] = column[torch.arange(output.size), ends - 1]
                output[key] = column
            output["generation_lengths"], output["unpadded_sequence_lengths"] = output["generation_lengths"] + 1, ends + 1
            return output


class ShiftsLogProbabilities(EngineOf):
    """Returns each log-probability one position too early: that of a token stands at the token before it."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            output["logprobs"] = output["logprobs"].roll(-1, dims=1)
            return output


class SamplesGreedyRows(EngineOf):
    """Samples greedy rows that are streamed."""

    class Worker(HFGenerationWorker):
        def poll(self, arrivals, *, cancelled=(), wait_s=0.1):
            return super().poll([replace(each, greedy=False) for each in arrivals], cancelled=cancelled, wait_s=wait_s)


class StreamsFromItsFirstWeights(EngineOf):
    """Samples complete batches with the policy's weights, but single rows from a copy of its first weights."""

    class Worker(HFGenerationWorker):
        def setup(self):
            facts = super().setup()
            self._sampler = Sampler(copy.deepcopy(self.model), self.config, tokenizer=self._sampler.tokenizer).rows
            return facts

        def generate(self, data, *, greedy=False):
            whole = Sampler(self.model, self.config, tokenizer=self._sampler.tokenizer)
            return whole.generate(data, greedy, weight_version=self.get_weight_version())


class SwapsLogProbabilitiesOfTwoRows(EngineOf):
    """Returns the right tokens with the log-probabilities of the next row."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            inside = output["logprobs"] != 0
            output["logprobs"] = torch.where(inside, output["logprobs"].roll(1, dims=0), 0.0)
            return output


class SwapsTwoRows(EngineOf):
    """Returns the last two rows in each other's place."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            output = super().generate(data, greedy=greedy)
            order = [*range(output.size - 2), output.size - 1, output.size - 2]
            return output.select_indices(order)


class TakesAModel(EngineOf):
    """Its constructor takes other arguments than a run passes."""

    def __init__(self, config, model):
        self.model = model
        super().__init__(config=config)


class UsesTheOptionsOfTheFirstRow(EngineOf):
    """Samples all rows of a call with the options of the first one."""

    class Worker(HFGenerationWorker):
        def generate(self, data, *, greedy=False):
            if "sampling" in data:
                data["sampling"] = [data["sampling"][0]] * data.size
            return super().generate(data, greedy=greedy)
