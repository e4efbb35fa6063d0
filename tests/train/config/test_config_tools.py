"""`env.<task>.tool_parser`: a parser that does not exist is refused at its key, without importing it."""

import pytest


@pytest.mark.parametrize(
    ("parser", "says"),
    [
        (
            "herms",
            "unknown parser 'herms'. Did you mean 'hermes'? Use response_template, hermes, mistral, llama3, or the dotted",
        ),
        ("rl_core.errors.NoParser", "rl_core.errors.NoParser cannot be imported: rl_core.errors has no 'NoParser'"),
    ],
)
def test_an_unknown_parser_of_tool_calls_is_refused(files, good, parser, says):
    [error] = files.errors(good.replace("arithmetic: {}", f"arithmetic: {{tool_parser: {parser}}}"))
    assert "env.arithmetic.tool_parser" in error
    assert says in error


@pytest.mark.parametrize("parser", ["hermes", "response_template", "rl_train.tools.parsers.MistralParser", "null"])
def test_known_parsers_are_accepted(files, good, parser):
    run = files.load(good.replace("arithmetic: {}", f"arithmetic: {{tool_parser: {parser}}}")).run
    assert run.env["arithmetic"].tool_parser == (None if parser == "null" else parser)
