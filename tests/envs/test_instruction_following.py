"""Every constraint accepts answers that follow it and rejects answers that nearly do."""

import json

import pytest
from environment_steps import step_checked

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError
from rl_envs.instruction_following import (
    CONSTRAINTS,
    InstructionFollowingEnvironment,
    bullets,
    capital_words,
    follows,
    highlights,
    parameters_of,
    sentences,
    words_of,
)

CASES = {
    # identifier: (parameters, answers that follow it, answers that do not)
    "keywords:existence": (
        {"keywords": ["sea", "blue whale"]},
        ["The Sea has a blue\nwhale.", "blue whale; SEA", "the _sea_ and a **blue whale**", "se\u200ba, blue whale"],
        ["The seal is a blue whale.", "sea and blue whales", ""],
    ),
    "keywords:frequency": (
        {"keyword": "sea", "frequency": 2, "relation": "at least"},
        ["sea Sea", "The sea, the sea-side.", "_sea_ sea"],
        ["sea seaside", "overseas sea"],
    ),
    "keywords:forbidden_words": (
        {"forbidden_words": ["can", "new york"]},
        ["The canary sings.", "York is new."],
        ["I CAN.", "In New  York.", "I _can_.", "I c\u200ban.", "```\n```", "***", "\u200b"],
    ),
    "keywords:letter_frequency": (
        {"letter": "Q", "let_frequency": 2, "let_relation": "less than"},
        ["one q", "none"],
        ["Qq"],
    ),
    "length_constraints:number_words": (
        {"num_words": 3, "relation": "at most"},
        ["don't stop well-known", "It costs 3.50"],
        ["one two three four"],
    ),
    "length_constraints:number_sentences": (
        {"num_sentences": 2, "relation": "at least"},
        ["One. Two!", "Is it?! Yes", "Title\nText."],
        ["Dr. Smith paid e.g. 3.5 dollars.", "J. R. Smith, Inc. of York", "1. First item.", "A line that\nwraps here."],
    ),
    "length_constraints:number_paragraphs": (
        {"num_paragraphs": 2},
        ["one\n***\ntwo", "one\n\n***\n\ntwo\n***\n"],
        ["one\n\ntwo", "one ****** two", "***\none", "one***two", "a ***bold*** word"],
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        ["One.\n\nthen, two.", 'One.\n \n"Then" two'],
        ["Then.\n\nTwo.", "One.\n\nThenceforth.", "One.\n\nThen\n\nthree", "One.\nThen two"],
    ),
    "detectable_content:number_placeholders": (
        {"num_placeholders": 2},
        ["[name] of [the street]", "[a][b]"],
        ["[name]", "[] [ ]", "[link](http://x) [name]", "[1] [2]", "a[i] b[j]", "- [x] one\n- [x] two"],
    ),
    "detectable_content:postscript": (
        {"postscript_marker": "P.P.S"},
        ["Bye.\nP.P.S. More", "Bye.\n\n**PPS:** more", "Bye.\nP. P. S more"],
        ["Bye. P.S. More", "Bye P.P.S", "Bye.\nppstuff", "P.P.S. More", "Bye.\nP.P.S.", "Bye.\nP.P.S. ..."],
    ),
    "detectable_format:number_bullet_lists": (
        {"num_bullets": 2},
        ["* one\n* two", "text\n- one\n  - two\n"],
        ["* one", "***\n* one", "*one*\n*two*", "1. one\n2. two", "- one\n- two\n- three"],
    ),
    "detectable_format:constrained_response": (
        {},
        ["My answer is no.", "Well: My answer is maybe."],
        ["no", "My answer is yes. My answer is no.", "My answer is not clear."],
    ),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 2},
        ["*one* and **two**", "*a b*, *c*"],
        ["*one*", "2 * 3 * 4 * 5", "**", "* item\n* item", "* *"],
    ),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSECTION 2\nb", "## Section I: a\n**Section II**\nb"],
        [
            "Section 1\na",
            "see Section 1 and Section 2",
            "Sections 1\nSections 2",
            "Section 1\nSection 2",
            "Section 1\na\nSection 1\nb",
        ],
    ),
    "detectable_format:json_format": (
        {},
        ['{"a": [1, null]}', '```json\n{"a": 1}\n```', " [1] "],
        ["{'a': 1}", '{"a": 1,}', 'Here: {"a": 1}', '"text"', "{}", "[]", "NaN", '{"a": NaN}', "[" * 100000],
    ),
    "detectable_format:title": ({}, ["<<joy>>\nText", "a <<b c>>"], ["<joy>", "<< >>", "<<a\nb>>"]),
    "combination:two_responses": (
        {},
        ["one ****** two", "one\n******\ntwo"],
        [
            "one *** two",
            "same****** same",
            "same ****** Same!",
            "one ****** ...",
            "one ******",
            "a ****** b ****** c",
            "a ******* b",
        ],
    ),
    "combination:repeat_prompt": (
        {"prompt_to_repeat": "Write a poem."},
        ["Write a poem.\nRoses", " write a poem. Roses"],
        ["Write a poem.", "Write a poem. ...", "Sure! Write a poem. Roses", "Write a poem; Roses"],
    ),
    "startend:end_checker": (
        {"end_phrase": "The end."},
        ["So. The end.", 'So. the end."\n'],
        ["So. The end", "The end. Bye", "Loathe end."],
    ),
    "startend:start_checker": (
        {"start_phrase": "Once upon"},
        ["once upon a time", '"Once upon"'],
        ["It was once upon", "Once, upon", "Once uponly"],
    ),
    "startend:quotation": ({}, ['"All of it."', "“so”\n"], ['"a" and b', '""', '"']),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["NASA and ESA", "I AM"],
        ["Nasa ESA", "123 456"],
    ),
    "change_case:english_capital": ({}, ["ALL 1 OF IT!"], ["All", "123", "你好"]),
    "change_case:english_lowercase": ({}, ["all 1 of it!"], ["aLl", "!", "你好"]),
    "punctuation:no_comma": ({}, ["a; b"], ["a, b", "a，b", "a، b", "!", "\u200b"]),
}


def test_there_are_cases_for_every_constraint():
    assert set(CASES) == set(CONSTRAINTS)


@pytest.mark.parametrize("name", CASES)
def test_answers_that_follow_a_constraint_pass_and_others_fail(name):
    given, good, bad = CASES[name]
    parameters = parameters_of(name, {**given, "not_of_this_one": None})
    assert [answer for answer in good if not follows(answer, name, parameters)] == []
    assert [answer for answer in (*bad, "", " \n") if follows(answer, name, parameters)] == []


@pytest.mark.parametrize("name", CASES)
def test_every_constraint_is_described_with_its_parameters(name):
    given = CASES[name][0]
    text = CONSTRAINTS[name].describe(**given)
    assert text[0].isupper()
    numbers = [value for value in given.values() if isinstance(value, int)]
    assert all(str(number) in text for number in numbers)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("The answer is no. So it is.", 2),
        ("We met at 5 p.m. sharp.", 1),
        ("Eggs, milk, etc. are here. Bread is not.", 2),
        ("He left Acme Inc. Then he wrote.", 2),
        ('"Stop!" he said. "Why?"', 3),
        ("Wait... what?", 2),
        ("", 0),
        ("...", 0),
    ],
)
def test_sentences_are_counted_as_a_reader_would(text, count):
    # A quoted exclamation before "he said" counts as a sentence: deciding that takes more than punctuation.
    assert len(sentences(text)) == count


def test_words_bullets_highlights_and_capital_words():
    assert words_of("It's 1,000.5 well-known—facts…") == ["It's", "1,000.5", "well-known", "facts"]
    assert bullets("* a\n  * b\n+ c\n• d\n*not*\n---\n- ") == 4
    assert highlights("*a* **b** *c d* * e * x*y*z **") == 3
    assert capital_words("A NASA-ESA plan, B2 and 42") == ["A", "NASA-ESA", "B2"]


def play(answers, rows, **config):
    environment = InstructionFollowingEnvironment(config)
    logs = [[{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}] for answer in answers]
    return environment, step_checked(environment, "instruction_following", logs, rows)


def test_rows_of_ifeval_are_scored_and_both_accuracies_reported():
    unused = {"num_words": None, "keywords": None, "relation": None}
    row = {
        "key": 1000,
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [unused, {**unused, "num_words": 2.0, "relation": "at least"}],
    }
    environment, made = play(["one two", "one, two", "one"], [row, row, {**row, "kwargs": json.dumps(row["kwargs"])}])
    assert made.rewards.tolist() == [1.0, 0.0, 0.0]
    batch = BatchedDataDict({"rewards": made.rewards, "extra_env_info": made.metadata})
    assert environment.global_post_process_and_metrics(batch)[1] == {
        "accuracy": pytest.approx(1 / 3),
        "instruction_accuracy": pytest.approx(4 / 6),
    }
    assert play(["one, two"], [row], reward="fraction")[1].rewards.tolist() == [0.5]
    assert row["kwargs"][1]["num_words"] == 2.0  # rows are not changed


def test_a_row_with_an_instruction_that_cannot_be_checked_is_not_scored():
    row = {"instruction_id_list": ["language:response_language", "punctuation:no_comma"], "kwargs": [{"language": "fr"}, {}]}
    _, made = play(["oui"], [row])
    assert made.scored.tolist() == [False]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (None, "needs `instruction_id_list`"),
        ({"instruction_id_list": []}, "needs `instruction_id_list`"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]}, "needs one entry for each"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": "[{]"}, "Row 0: .*invalid JSON"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": ["{"]}, "Row 0: .*invalid JSON"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [[1]]}, "Row 0: .*expected an object"),
        ({"instruction_id_list": [["punctuation:no_comma"]]}, "Row 0: .*needs `instruction_id_list`"),
        ({"instruction_id_list": ["punctuation:commas"]}, "There is no constraint 'punctuation:commas'"),
        ({"instruction_id_list": ["startend:quotation"], "kwargs": [{"x": 1}]}, r"the row has \['x'\]"),
        ({"instruction_id_list": ["startend:end_checker"], "kwargs": [{"end_phrase": 3}]}, "is 3, not a text"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": []}]}, "not a list of texts"),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 3, "relation": "around"}],
            },
            "is 'around', not one of at least",
        ),
    ],
)
def test_wrong_rows_are_errors_that_say_what_is_missing(row, says):
    with pytest.raises(DataError, match=says):
        play(["x"], [row])
