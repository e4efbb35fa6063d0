"""A tokenizer of bytes whose chat template writes tool calls in a given form."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

IM = "{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson + '\n' }}{% endfor %}{% for m in messages %}"
    + IM
    + "%CALLS%{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
CALLS = {
    "hermes": "{{ '<tool_call>\n' + {'name': f.name, 'arguments': f.arguments} | tojson + '\n</tool_call>' }}",
    "llama3": "{{ '{\"name\": \"' + f.name + '\", \"parameters\": ' + f.arguments | tojson + '}' }}",
    "mistral": "{{ '[TOOL_CALLS] [' + {'name': f.name, 'arguments': f.arguments} | tojson + ']' }}",
    "own": "{{ '(' + f.name + '!' + f.arguments | tojson + ')' }}",
}


def make_tokenizer(form):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "[TOOL_CALLS]", "<|python_tag|>"]})
    loop = "{% for c in m['tool_calls'] or [] %}{% set f = c['function'] %}" + CALLS[form] + "{% endfor %}"
    tokenizer.chat_template = TEMPLATE.replace("%CALLS%", loop).replace("{{ '<|im_start|>assistant\n' }}", "")
    tokenizer.chat_template += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer_with():
    return make_tokenizer
