"""A character tokenizer, a scripted engine and two small environments: these tests are about their callers."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn, GenerationInterface

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 |:\n<>?!"
CHAT = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture
def tokenizer():
    vocabulary = {"[PAD]": 0, "[EOS]": 1, **{c: i + 2 for i, c in enumerate(CHARACTERS)}}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", eos_token="[EOS]", chat_template=CHAT, clean_up_tokenization_spaces=False
    )


class ScriptedEngine(GenerationInterface):
    """Answers a prompt's text by script, with the log-probability -(position of the token)."""

    def __init__(self, tokenizer, script, version=3):
        self.tokenizer, self.script, self.version = tokenizer, script, version
        self.asked = []

    def generate(self, data, greedy=False):
        lengths = data["input_lengths"].tolist()
        texts = [self.tokenizer.decode(row[:n]) for row, n in zip(data["input_ids"], lengths, strict=True)]
        self.asked.append({"texts": texts, "seeds": data["sample_seeds"].tolist(), "stop_strings": data["stop_strings"]})
        answers = [self.script(text) for text in texts]
        said = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in answers]
        rows = [torch.tensor([*ids[:n].tolist(), *new]) for ids, n, new in zip(data["input_ids"], lengths, said, strict=True)]
        logprobs = [
            torch.tensor([0.0] * n + [-float(n + i) for i in range(len(new))]) for n, new in zip(lengths, said, strict=True)
        ]
        pad = torch.nn.utils.rnn.pad_sequence
        return BatchedDataDict(
            {
                "output_ids": pad(rows, batch_first=True),
                "logprobs": pad(logprobs, batch_first=True),
                "generation_lengths": torch.tensor([len(new) for new in said]),
                "unpadded_sequence_lengths": torch.tensor([len(row) for row in rows]),
                "truncated": torch.tensor([cut for _, cut in answers]),
                "weight_version": torch.full((len(rows),), self.version),
            }
        )

    def prepare_for_generation(self, *args, **kwargs):
        return True

    def finish_generation(self, *args, **kwargs):
        return True

    def shutdown(self):
        return True


class Judge(EnvironmentInterface):
    """One turn; named rewards."""

    def step(self, message_log_batch, metadata):
        right = [float(log[-1]["content"] == m["expected"]) for log, m in zip(message_log_batch, metadata, strict=True)]
        n = len(right)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * n,
            metadata=metadata,
            next_stop_strings=[None] * n,
            rewards={"right": torch.tensor(right), "bonus": torch.full((n,), 0.25)},
            terminateds=torch.ones(n),
            answers=[log[-1]["content"] for log in message_log_batch],
        )

    def global_post_process_and_metrics(self, batch):
        return batch, {"accuracy": float((batch["rewards"] > 1).float().mean())}


class Counter(EnvironmentInterface):
    """Ends after metadata["turns"] turns with reward 1 each; requests a stop string from the second turn on."""

    def step(self, message_log_batch, metadata):
        left = [m["turns"] - 1 for m in metadata]
        n = len(left)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"go {x}"} for x in left],
            metadata=[{"turns": x} for x in left],
            next_stop_strings=[["!"]] * n,
            rewards=torch.ones(n),
            terminateds=torch.tensor([float(x == 0) for x in left]),
        )


@pytest.fixture
def engine_for(tokenizer):
    return lambda script, **options: ScriptedEngine(tokenizer, script, **options)


@pytest.fixture
def environments():
    return {"judge": Judge(), "count": Counter()}
