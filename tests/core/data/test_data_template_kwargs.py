"""Variables of chat templates apply wherever the template is used, and each has an effect."""

import pytest
from pydantic import ValidationError
from template_styles import CHATML, Style, tokenizer_of, trained_text

from rl_core.config.policy_sections import TokenizerConfig
from rl_core.data.tokenizer import load_tokenizer, with_template_kwargs
from rl_core.errors import DataError
from rl_train.checkpoints.inputs import ComparedConfig
from rl_train.data.processors import conversation_datum, prompt_datum
from rl_train.rollouts.drivers import TurnFormatter

IM = ("<|im_start|>", "<think>", "</think>", "<|im_end|>")
# Thinks unless thinking is disabled; then prompts have empty reasoning. A text with braces and quotes tests the literals.
THINKS = (
    "\n"
    + CHATML.replace("assistant\n{%", "assistant\n{% if not (thinks | default(true)) %}<think></think>{% endif %}{%")
    + "{% if sign %}{{ sign }}{% endif %}"
)
LOG = [{"role": "user", "content": "six"}, {"role": "assistant", "content": "<think></think>seven"}]


@pytest.fixture
def folder(tmp_path):
    tokenizer_of(Style(THINKS, IM, None)).save_pretrained(tmp_path)
    return tmp_path


def test_without_variables_a_template_is_unchanged(folder):
    assert load_tokenizer(folder).chat_template == THINKS


@pytest.mark.parametrize("sign", ['it\'s "{{ x }}" {% endif %} \\n é 😀\n', 1, 2.5, ["a", None, True], {"b": False}])
def test_values_are_passed_to_the_template_unchanged(folder, sign):
    by_text = load_tokenizer(folder, chat_template_kwargs={"sign": sign})
    plain = load_tokenizer(folder)
    assert by_text.apply_chat_template(LOG, tokenize=False) == plain.apply_chat_template(LOG, tokenize=False, sign=sign)
    assert by_text.apply_chat_template(LOG, tokenize=False, sign="") == plain.apply_chat_template(LOG, tokenize=False)


def test_prompts_training_data_and_later_turns_are_rendered_with_the_same_variables(folder):
    tokenizer = load_tokenizer(folder, chat_template_kwargs={"thinks": False})
    prompt = prompt_datum({"messages": LOG[:1]}, idx=0, tokenizer=tokenizer)["message_log"][0]["token_ids"]
    assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n<think></think>")
    assert trained_text(conversation_datum({"messages": LOG}, idx=0, tokenizer=tokenizer), tokenizer) == ["seven<|im_end|>"]
    next_turn = TurnFormatter(tokenizer).observation_ids({"role": "user", "content": "two"}, prompt[:1])
    assert tokenizer.decode(next_turn).endswith("<|im_start|>assistant\n<think></think>")


def test_a_saved_tokenizer_keeps_the_variables_and_may_be_given_them_again(folder, tmp_path):
    saved = tmp_path / "saved"
    load_tokenizer(folder, chat_template_kwargs={"thinks": False}).save_pretrained(saved)
    for tokenizer in (load_tokenizer(saved), load_tokenizer(saved, chat_template_kwargs={"thinks": False})):
        assert "<think>" in tokenizer.apply_chat_template(LOG[:1], tokenize=False, add_generation_prompt=True)
    other = load_tokenizer(saved, chat_template_kwargs={"thinks": True})
    assert "<think>" not in other.apply_chat_template(LOG[:1], tokenize=False, add_generation_prompt=True)


def test_a_variable_that_the_template_does_not_read_is_refused_with_a_suggestion(folder):
    with pytest.raises(DataError, match=r"does not use 'thinkss'.*did you mean 'thinks'"):
        load_tokenizer(folder, chat_template_kwargs={"thinkss": False})
    with pytest.raises(DataError, match="has no chat template"):
        with_template_kwargs(None, {"thinks": False})
    several = with_template_kwargs({"default": CHATML, "tool_use": THINKS}, {"thinks": False})
    assert all("set thinks" in text for text in several.values())


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"messages": []}, "'messages' is set by rlcore for every conversation"),
        ({"a b": 1}, "cannot be a template variable"),
        ({"thinks": float("inf")}, "expected text, a number"),
        ({"thinks": {1: 2}}, "has the key 1"),
    ],
)
def test_names_and_values_that_no_template_can_have_are_refused(kwargs, says):
    with pytest.raises(ValidationError, match=says):
        TokenizerConfig(chat_template_kwargs=kwargs)


def test_other_variables_are_another_config_for_a_resume():
    old, new = ({"policy": {"tokenizer": {"chat_template_kwargs": {"thinks": thinks}}}} for thinks in (True, False))
    changes = ComparedConfig(values=new, algorithm="sft").changes({"config": old})
    assert list(changes) == ["policy.tokenizer.chat_template_kwargs.thinks"]
