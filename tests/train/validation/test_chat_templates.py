"""Each diagnosis of a chat template, on a correct template and on one with exactly that error."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from rl_train.diagnostics.chat_template import check_chat_template
from rl_train.diagnostics.diagnosis import DiagnosisStatus

QUESTION = [{"role": "user", "content": "12+34="}]
RIGHT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHARACTERS = ["<pad>", "<eos>", "<unk>", *"0123456789+-*= \n<>abcdefghijklmnopqrstuvwxyz"]


def tokenizer_with(template, *, merges=()):
    """One token per character, and one for each of `merges`."""
    vocabulary = {token: number for number, token in enumerate([*CHARACTERS, *("".join(merge) for merge in merges)])}
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE(vocab=vocabulary, merges=list(merges), unk_token="<unk>")),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    made.chat_template = template
    return made


def diagnoses_of(template, *, question=QUESTION, stop_ids=(1,), merges=(), stop_strings=()):
    found = check_chat_template(
        tokenizer_with(template, merges=merges), question, stop_ids=set(stop_ids), stop_strings=stop_strings
    )
    for diagnosis in found:
        assert bool(diagnosis.why and diagnosis.remedy) == (diagnosis.status is not DiagnosisStatus.OK), diagnosis
    return {diagnosis.name: diagnosis for diagnosis in found}


def only_problem(found):
    [problem] = [diagnosis for diagnosis in found.values() if diagnosis.status is not DiagnosisStatus.OK]
    return problem


def test_a_right_template_passes_all_four():
    found = diagnoses_of(RIGHT)
    assert list(found) == ["chat_template_renders", "generation_prompt_is_prefix", "turns_join", "end_of_turn_stops"]
    assert {diagnosis.status for diagnosis in found.values()} == {DiagnosisStatus.OK}


def test_the_template_of_the_quickstart_passes(tokenizer):
    found = check_chat_template(tokenizer, QUESTION, stop_ids={1})
    assert [diagnosis.status for diagnosis in found] == [DiagnosisStatus.OK] * 4


def test_a_missing_chat_template_is_ok():
    [diagnosis] = diagnoses_of(None).values()
    assert diagnosis.status is DiagnosisStatus.OK
    assert "has no chat template" in diagnosis.found


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no users here') }}", "no users here"),
        ("{% for m in messages %}{{ m.content }}", "Unexpected end of template"),
        ("{% for m in messages %}{{ m.content + 1 }}{% endfor %}", "can only concatenate str"),
        ("{{ messages[0].content.missing.deeper }}", "missing"),
    ],
)
def test_a_template_that_raises_is_the_only_finding(template, said):
    [diagnosis] = diagnoses_of(template).values()
    assert (diagnosis.name, diagnosis.status) == ("chat_template_renders", DiagnosisStatus.FAILED)
    assert said in diagnosis.found
    assert "['user']" in diagnosis.found


def test_a_template_that_drops_the_system_message():
    question = [{"role": "system", "content": "be brief"}, *QUESTION]
    [diagnosis] = diagnoses_of(RIGHT.replace("messages %}", "messages if m.role != 'system' %}"), question=question).values()
    assert diagnosis.status is DiagnosisStatus.FAILED
    assert "lacks the content of: ['system']" in diagnosis.found


def test_a_generation_prompt_that_differs_from_the_start_of_an_answer():
    found = diagnoses_of(RIGHT.replace("%}<assistant>{%", "%}<assistant>\n{%"))
    assert found["generation_prompt_is_prefix"].status is DiagnosisStatus.FAILED
    assert "does not begin with the prompt: from character" in found["generation_prompt_is_prefix"].found


def test_a_header_that_opens_the_reasoning_is_a_warning():
    problem = only_problem(diagnoses_of(RIGHT.replace("%}<assistant>{%", "%}<assistant><think>{%")))
    assert (problem.name, problem.status) == ("generation_prompt_is_prefix", DiagnosisStatus.WARNING)
    assert "the header ends with '<think>'" in problem.found


def test_empty_reasoning_only_before_the_last_answer_is_a_warning_about_multi_turn_training():
    last = "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}"
    problem = only_problem(diagnoses_of(RIGHT.replace("{{ m.content }}", last)))
    assert (problem.name, problem.status) == ("turns_join", DiagnosisStatus.WARNING)
    assert "one turn agree, but a second turn changes the first answer" in problem.found


def test_a_header_that_changes_the_prompt():
    template = "{% if add_generation_prompt %}>{% endif %}" + RIGHT
    found = diagnoses_of(template)
    assert found["generation_prompt_is_prefix"].status is DiagnosisStatus.FAILED
    assert "changes the text before the header: from character 0," in found["generation_prompt_is_prefix"].found


def test_an_answer_that_is_merged_with_what_comes_before_it():
    # Without anything between question and answer, "=" and "4" become one token.
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    assert {diagnosis.status for diagnosis in diagnoses_of(template).values()} == {DiagnosisStatus.OK}
    found = diagnoses_of(template, merges=[("=", "4")])
    assert found["turns_join"].status is DiagnosisStatus.FAILED
    assert "'='" in found["turns_join"].found
    assert "'=4'" in found["turns_join"].found
    assert found["generation_prompt_is_prefix"].status is DiagnosisStatus.FAILED


def test_a_second_turn_that_rewrites_the_first_is_a_warning():
    template = RIGHT.replace("{{ m.content }}", "{{ m.content }}{% if m.role == 'assistant' and loop.last %} {% endif %}")
    problem = only_problem(diagnoses_of(template))
    assert (problem.name, problem.status) == ("turns_join", DiagnosisStatus.WARNING)
    assert "a second turn changes the first answer" in problem.found


def test_a_turn_that_ends_with_a_token_at_which_the_engine_does_not_stop():
    template = RIGHT.replace("<eos>{% endfor", "\n{% endfor").replace("{{ m.content }}\n", "{{ m.content }}<end>\n")
    problem = only_problem(diagnoses_of(template))
    assert (problem.name, problem.status) == ("end_of_turn_stops", DiagnosisStatus.FAILED)
    first = CHARACTERS.index("<")
    assert problem.remedy.startswith(f"Set policy.generation.stop_token_ids: [{first}]")
    assert diagnoses_of(template, stop_ids=(1, first))["end_of_turn_stops"].status is DiagnosisStatus.OK
    assert diagnoses_of(template, stop_strings=("<end>",))["end_of_turn_stops"].status is DiagnosisStatus.OK


def test_a_turn_without_an_end_is_a_warning():
    problem = only_problem(diagnoses_of(RIGHT.replace("<eos>{% endfor", "{% endfor")))
    assert (problem.name, problem.status) == ("end_of_turn_stops", DiagnosisStatus.WARNING)
