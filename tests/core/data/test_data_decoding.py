"""The text of sampled tokens: which special tokens rewards see, and that text is not cleaned up."""

import shutil

import pytest
import torch
from huggingface_hub import constants
from model_folders import BOS, END, UNK, byte_level, edit_json, unigram, write_tokenizer
from template_styles import CHATML, Style, tokenizer_of

from rl_core.config.policy_sections import PolicyConfig
from rl_core.data.tokenizer import decode, load_tokenizer
from rl_train.data.processors import load_policy_tokenizer
from rl_train.data.special_tokens import control_tokens, decode_answers

WITH_THINKING = CHATML.replace(
    "{{ message['content'] }}", "{% if message.role == 'assistant' %}<think></think>{% endif %}{{ message.content }}"
)
TEMPLATES = {
    "roles as text": (CHATML, "<|im_start|> <|im_end|>", "<answer> <tool_call>"),
    "thinking that the template opens": (WITH_THINKING, "<|im_start|> <|im_end|>", "<think> </think>"),
    "a token for each role": (
        "<s>{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}{% elif m.role == 'system' %}{{ m.content }}"
        "{% else %}<A>{{ m.content }}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}<A><think>\n{% endif %}",
        "<s> <U> <A> </s>",
        "<think> </think>",
    ),
    "tokens of answers inside those of turns": (
        "<s>{% for m in messages %}<T>{% if m.role == 'assistant' %}<BOT><R>{{ m.content }}</R>{% else %}<{{ m.role }}>"
        "{{ m.content }}{% endif %}<E>{% endfor %}",
        "<s> <T> <BOT> <user> <system> <E>",
        "<R> </R> <THINK>",
    ),
    "roles that the template builds": (
        "[g]{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}<think></think>\n{% endif %}{{ m.content }}"
        "{% endfor %}",
        "[g] <|system|> <|user|> <|assistant|>",
        "<think> </think> <|observation|>",
    ),
    "no system message": (
        "<s>{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% elif m.role == 'user' %}"
        "[INST] {{ m.content }}[/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
        "<s> [INST] [/INST] </s>",
        "[TOOL_CALLS] [TOOL_RESULTS]",
    ),
    "closing tokens for each role": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}",
        "<user> </user> <system> </system> <assistant> </assistant>",
        "<think> </think>",
    ),
    "text between role and channel": (
        "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
        "{{ m.content }}<|end|>{% endfor %}",
        "<|start|> <|message|> <|end|>",
        "<|channel|> <|call|>",
    ),
}


@pytest.fixture
def with_answer_tokens(tmp_path):
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<answer>", "</answer>"])
    write_tokenizer(tmp_path, tokenizer, chat_template=CHATML)
    return tmp_path


@pytest.mark.parametrize("name", TEMPLATES)
def test_special_tokens_of_turns_are_hidden_and_those_of_answers_visible(name):
    template, turns, content = TEMPLATES[name]
    special = [*dict.fromkeys([*content.split(), *turns.split(), "<|eos|>"])]
    tokenizer = tokenizer_of(Style(template, tuple(special), None))
    assert set(control_tokens(tokenizer)) == {*turns.split(), "<|eos|>", "<|pad|>"}
    row = tokenizer("".join([*special, "five"]), add_special_tokens=False)["input_ids"]
    assert decode_answers(tokenizer, [row]) == ["".join([*content.split(), "five"])]


def test_rewards_see_the_special_tokens_of_answers_unless_the_config_hides_them(with_answer_tokens):
    text = "<answer>5</answer>"
    shown = {"content": text, "all": f"{text}<|im_end|>", "none": "5"}
    for visible, expected in shown.items():
        tokenizer = load_tokenizer(with_answer_tokens)
        tokenizer.visible_special_tokens = visible
        row = tokenizer(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"]
        assert decode_answers(tokenizer, [torch.tensor(row), row, [END], []]) == [
            expected,
            expected,
            "<|im_end|>" if visible == "all" else "",
            "",
        ]
        assert decode(tokenizer, row) == f"{text}<|im_end|>"


def test_end_tokens_of_the_generation_config_are_hidden(with_answer_tokens):
    edit_json(with_answer_tokens / "generation_config.json", eos_token_id=[END, 321])
    tokenizer = load_tokenizer(with_answer_tokens)
    assert decode_answers(tokenizer, [[320, 321, UNK, BOS]]) == ["<answer>"]


def test_end_tokens_are_those_of_the_revision_of_the_model(with_answer_tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    edit_json(with_answer_tokens / "config.json", model_type="llama")
    for revision, end in {"main": 320, "v1": 321}.items():
        edit_json(with_answer_tokens / "generation_config.json", eos_token_id=end)
        folder = tmp_path / "hub" / "models--acme--tiny"
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / revision).write_text(f"commit of {revision}")
        shutil.copytree(with_answer_tokens, folder / "snapshots" / f"commit of {revision}", ignore=lambda *_: ["hub"])
    tokenizer = load_policy_tokenizer(PolicyConfig(backend="hf", model_name="acme/tiny@v1"))
    assert decode_answers(tokenizer, [[320, 321]]) == ["<answer>"]


def test_decoded_text_is_not_cleaned_up(tmp_path):
    write_tokenizer(tmp_path, unigram(), clean_up_tokenization_spaces=True)
    tokenizer = load_tokenizer(tmp_path)
    text = "( ' a ' ) if x != 3 , y"
    row = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(row) != text
    assert decode(tokenizer, row) == text
    assert decode_answers(tokenizer, [row]) == [text]
