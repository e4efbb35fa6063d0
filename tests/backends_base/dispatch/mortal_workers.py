"""Generation workers that kill themselves with SIGKILL when a file requests it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from tiny_refit_workers import TinyEngine, TinyPolicy

from rl_core.data.batched_data_dict import BatchedDataDict

FOLDER = "RLCORE_TEST_DEATHS"
END = 3
"""The token after which a row ends."""


def condemn(folder: Path, verb: str, rank: int, times: int = 1) -> None:
    """Make the rank die in its next call of this method, and its successors too, `times` times in total."""
    (folder / f"{verb}-{rank}").write_text(str(times))


def die_if_condemned(verb: str, rank: int) -> None:
    path = Path(os.environ[FOLDER]) / f"{verb}-{rank}"
    if path.exists():
        left = int(path.read_text()) - 1
        if left:
            path.write_text(str(left))
        else:
            path.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def next_token_logprobs(model, ids):
    """The log-distribution over the token that follows each token, which depends on that token alone, [..., V]."""
    return torch.log_softmax(model.head(torch.tanh(model.q(model.embed(ids))) + model.norm), dim=-1)


class ScoringPolicy(TinyPolicy):
    """Scores tokens with the model that the workers sample from."""

    def get_logprobs(self, data, **_):
        ids, lengths = data["input_ids"], data["input_lengths"]
        scored = next_token_logprobs(self.model, ids[:, :-1]).gather(2, ids[:, 1:, None])[..., 0]
        inside = torch.arange(1, ids.shape[1]) < lengths.unsqueeze(1)
        return BatchedDataDict(logprobs=torch.nn.functional.pad(scored * inside, (1, 0)).detach())


class MortalWorker(TinyEngine):
    """Samples rows one after the other, each from its own seed; dies after the first row of a call."""

    def __init__(self, context, config):
        super().__init__(context)
        self.max_new_tokens = config.max_new_tokens

    def generate(self, data, *, greedy=False):
        rows = []
        columns = (data["input_ids"], data["input_lengths"].tolist(), data["sample_seeds"])
        limits = data["max_new_tokens"].tolist() if "max_new_tokens" in data else [self.max_new_tokens] * data.size
        for ids, length, seed, limit in zip(*columns, limits, strict=True):
            rows.append(self.row(ids[:length], torch.Generator().manual_seed(int(seed)), greedy, limit))
            die_if_condemned("generate", self.context.rank)
        return BatchedDataDict.from_batches(rows)

    def row(self, ids, generator, greedy, limit):
        prompt, logprobs = len(ids), [0.0] * len(ids)
        while len(ids) < prompt + min(limit, self.max_new_tokens) and (len(ids) == prompt or ids[-1] != END):
            scores = next_token_logprobs(self.model, ids[-1]).detach()
            token = scores.argmax() if greedy else torch.multinomial(scores.exp(), 1, generator=generator)[0]
            ids, logprobs = torch.cat([ids, token[None]]), [*logprobs, float(scores[token])]
        return BatchedDataDict(
            output_ids=ids[None],
            logprobs=torch.tensor([logprobs]),
            generation_lengths=torch.tensor([len(ids) - prompt]),
            unpadded_sequence_lengths=torch.tensor([len(ids)]),
            truncated=ids[-1:] != END,
            weight_version=torch.tensor([self.get_weight_version()]),
        )

    def setup(self):
        die_if_condemned("setup", self.context.rank)
        other = Path(os.environ[FOLDER]) / "other-model"
        return {**super().setup(), "vocab_size": 7 if other.exists() else 32}

    def prepare_for_generation(self):
        return True

    def process(self):
        return os.getpid()


class StreamingMortalWorker(MortalWorker):
    """The same, row by row."""

    def poll(self, arrivals, *, cancelled=(), wait_s=0.1):
        die_if_condemned("poll", self.context.rank)
        return {arrival.name: self.generate(arrival.row, greedy=arrival.greedy) for arrival in arrivals}


class NeverBuiltWorker(MortalWorker):
    """Its constructor does not return."""

    def __init__(self, context, config):
        time.sleep(3600)
