"""Generation workers that finish each row when a file allows it."""

from __future__ import annotations

import time
from pathlib import Path

from rl_core.data.generation_io import LengthLimits, PromptReader, SampledRow, to_output
from rl_core.interfaces.worker import GenerationWorker

LIMITS = LengthLimits(vocab_size=100, max_model_len=64, max_new_tokens=8)
TOKENS = 3
"""Number of tokens of each row."""


class SilentWorker(GenerationWorker):
    """Waits for the file `<first token of the prompt>` in a folder, then ends the row; does not report its progress."""

    def __init__(self, context, config):
        self.folder = Path(config.model_name)
        self.batch = ()

    def setup(self):
        return {"device": "cpu", "vocab_size": LIMITS.vocab_size, "max_model_len": LIMITS.max_model_len}

    def generate(self, data, *, greedy=False):
        self.batch = [SampledRow(prompt=prompt) for prompt in PromptReader(LIMITS).read(data)]
        for row in self.batch:
            while not (self.folder / str(row.prompt.tokens[0])).exists():
                time.sleep(0.01)
            row.tokens, row.logprobs, row.stopped = [1] * TOKENS, [0.0] * TOKENS, True
        return to_output([row.completion(weight_version=-1) for row in self.batch])

    def get_weight_version(self):
        return -1

    def invalidate_kv_cache(self):
        return True


class ReportingWorker(SilentWorker):
    """Reports its progress."""

    def batch_progress(self):
        return sum(row.stopped for row in self.batch), sum(len(row.tokens) for row in self.batch)
