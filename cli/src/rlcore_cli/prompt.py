"""`rlcore prompt`: lists the packaged prompt configs, and shows the messages of a filled one."""

from __future__ import annotations

from typing import Annotated

import typer

from rlcore_cli.arguments import Tokenizer
from rlcore_cli.lazy import lazy_app

ACTIONS = {
    "list": ("rlcore_cli.prompt:list_prompts", "List the packaged prompt configs and lists of few-shot examples."),
    "show": ("rlcore_cli.prompt:show", "Print the messages of a prompt config, filled with the fields of a row."),
}
"""Action name: import path of its function, and its line in `rlcore prompt --help`."""


app = lazy_app(ACTIONS)


@app.callback()
def prompt() -> None:
    """List and show prompt configs (`data.prompt.prompt_config`).

    Example:
        rlcore prompt list
        rlcore prompt show generic/math --input '{"problem": "2+2"}'
    """


def list_prompts() -> None:
    """List the packaged prompt configs with their fields, and the packaged lists of few-shot examples.

    Example:
        rlcore prompt list
    """
    from rl_train.prompts.prompt_files import (
        find_examples,
        needed_fields,
        packaged_examples,
        packaged_prompts,
        read_examples,
        read_prompt,
    )
    from rl_train.prompts.templates import load_prompt

    print("prompt configs (data.prompt.prompt_config):")
    for name in packaged_prompts():
        few_shot = read_prompt(name).few_shot_examples
        examples = "" if few_shot is None else f"; examples: {', '.join(needed_fields(few_shot))}"
        print(f"  {name:<20} fields: {', '.join(sorted(load_prompt(name).names))}{examples}")
    print("few-shot examples (data.prompt.examples_type):")
    for name in packaged_examples():
        examples_of = read_examples(find_examples(name))
        print(f"  {name:<20} {len(examples_of)} examples; fields: {', '.join(examples_of[0])}")


def show(
    name: Annotated[str, typer.Argument(metavar="PROMPT", help="A packaged prompt config, or a path.", show_default=False)],
    fields: Annotated[
        str | None, typer.Option("--input", metavar="JSON", help="Fields of a row. Without it, the placeholders are kept.")
    ] = None,
    examples_type: Annotated[
        str | None,
        typer.Option("--examples-type", metavar="NAME", help="Few-shot examples: a packaged list, or a path."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="Also print the prompt as the chat template renders it, and its tokens."),
    ] = None,
    tokenizer: Tokenizer = None,
) -> None:
    """Print the messages of a prompt config, filled with the fields of a row.

    Example:
        rlcore prompt show generic/math --input '{"problem": "2+2"}'
        rlcore prompt show generic/math --input '{"problem": "2+2"}' --examples-type math_worked
        rlcore prompt show generic/math --input '{"problem": "2+2"}' --model HuggingFaceTB/SmolLM2-135M-Instruct
    """
    from rl_core.errors import ConfigError
    from rl_train.prompts.templates import load_prompt

    template = load_prompt(name, examples_type)
    row = {field: f"{{{field}}}" for field in sorted(template.needs)} if fields is None else _fields(fields)
    messages = template.fill(row, input_key=next(iter(row)) if len(row) == 1 else None)
    for message in messages:
        print(f"[{message['role']}]\n{message['content']}\n")
    if model is not None:
        _print_tokens(messages, model, tokenizer)
    elif tokenizer is not None:
        raise ConfigError("--tokenizer replaces the tokenizer of --model, which is not given. Add --model.")


def _fields(text: str) -> dict[str, object]:
    import json

    from rl_core.errors import ConfigError

    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f'--input is invalid JSON: {error}. Write an object such as \'{{"problem": "2+2"}}\'.') from error
    if not isinstance(fields, dict):
        raise ConfigError(f"--input must be a JSON object with the fields of a row, not {text}.")
    return fields


def _print_tokens(messages: list[dict[str, str]], model: str, tokenizer_name: str | None) -> None:
    from rl_core.data.tokenizer import decode, load_tokenizer
    from rl_train.data.messages import get_formatted_message_log

    tokenizer = load_tokenizer(tokenizer_name or model, model_name=model)
    log = get_formatted_message_log(messages, tokenizer, add_generation_prompt=True, trained=())
    ids = [int(token) for message in log for token in message["token_ids"]]
    print(f"[rendered by the chat template of {model}]\n{decode(tokenizer, ids)}\n")
    print(f"[{len(ids)} tokens]")
    print(" ".join(f"{token}:{decode(tokenizer, [token])!r}" for token in ids))
