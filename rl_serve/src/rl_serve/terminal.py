"""`rlcore chat`: a conversation with a model or a run in the terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from rl_core.errors import UserError
from rl_train.run_folders.run_names import completed_runs, text_of_run

if TYPE_CHECKING:
    from rl_serve.conversation import Conversation, PromptFiller
    from rl_serve.served_model import ServedModel

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_HELP = (
    "/exit ends the conversation, /reset begins a new one, /image PATH shows a picture with the next message, /help shows this "
    "line. Ctrl-C stops an answer."
)


def chat(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_RUN",
            help="Model name or folder; run folder, or its name in runs; or step folder.",
            show_default=False,
            autocompletion=completed_runs,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Overrides of the run's config; for a model, keys of policy.generation and policy.tokenizer.",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Generation plugin for a model; required if several are installed.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Use the best checkpoint of a run folder, not the newest.")] = False,
    system: Annotated[str | None, typer.Option(help="System message.", show_default="that of the run's training data")] = None,
    as_is: Annotated[
        bool, typer.Option("--as-is", help="Without the system message and the prompt config of the run's training data.")
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, max=100.0, help="Sampling temperature.", show_default="the engine's"),
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Decode greedily, as --temperature 0.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of tokens of an answer.", show_default="the engine's")
    ] = None,
) -> None:
    """Chat with a model or a run in the terminal.

    Each line is a message; /exit or the end of the input ends the conversation, /reset begins a new one, and /image PATH shows
    a picture with the next message. Answers are printed as they are sampled, if the engine streams tokens. A run has the system
    message and the prompt config of its training data; --system replaces the first, and --as-is turns off both. With redirected
    input, only the answers are printed on standard output, and a message that cannot be answered ends the command with exit
    code 2.

    Example:
        rlcore chat runs/config
        rlcore chat path/to/model --backend hf --greedy
        echo "12+34=" | rlcore chat examples/addition/model --backend hf
    """
    from rl_serve.conversation import Conversation, PromptFiller
    from rl_serve.engine import EngineThread
    from rl_serve.served_model import started_model

    if greedy and temperature:
        raise UserError(f"--greedy is --temperature 0, but --temperature is {temperature:g}. Remove one of them.")
    temperature = 0.0 if greedy else temperature
    with started_model(text_of_run(target), backend=backend, overrides=overrides or [], best=best) as model:
        own_system, filler = (None, PromptFiller(None)) if as_is else _prompt_of(model)
        engine = EngineThread(model.generation)
        try:
            conversation = Conversation(
                model,
                engine,
                system=own_system if system is None else system,
                temperature=temperature,
                max_tokens=max_tokens,
                filler=filler,
            )
            _talk(conversation, model.name)
        finally:
            engine.close()


def _prompt_of(model: ServedModel) -> tuple[str | None, PromptFiller]:
    """System message and prompt config of the run's training data, which are printed; neither if it has several."""
    from rl_serve.conversation import PromptFiller

    if len(model.prompts) != 1:
        if model.prompts:
            _note(f"messages are sent as they are, because the run has several prompts: {model.described_prompts}")
        return None, PromptFiller(None)
    prompt = model.prompts[0]
    filler = PromptFiller.load(prompt.prompt_config, prompt.examples_type)
    if len(filler.needs) > 1:
        _note(f"messages are not filled into the prompt config of the run, which has several fields: {', '.join(filler.needs)}")
        return prompt.system_prompt, PromptFiller(None)
    _note(f"as in training: {model.described_prompts} (without: --as-is)")
    return prompt.system_prompt, filler


def _note(text: str) -> None:
    """Print a line apart from the answers."""
    print(text, file=sys.stderr, flush=True)


def _talk(conversation: Conversation, name: str) -> None:
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        print(f"{name}: {_HELP}")
    for line in _lines(is_interactive):
        text = line.strip()
        if text == "/exit":
            return
        if text == "/reset":
            conversation.reset()
        elif text == "/help":
            print(_HELP)
        elif text.startswith("/image "):
            _attach(conversation, text.removeprefix("/image ").strip(), is_interactive)
        elif text.startswith("/"):
            _report(f"There is no command {text.split()[0]}: {_HELP}", is_interactive)
        elif text:
            _answer(conversation, text, is_interactive)


def _attach(conversation: Conversation, path: str, is_interactive: bool) -> None:
    from rl_serve.errors import ApiError

    try:
        conversation.attach(path)
    except ApiError as error:
        _report(error.message, is_interactive)


def _answer(conversation: Conversation, text: str, is_interactive: bool) -> None:
    from rl_serve.errors import ApiError

    try:
        conversation.answer(text, on_text=lambda new: print(visible(new) if is_interactive else new, end="", flush=True))
        print(flush=True)
        if conversation.cut_at is not None:
            _note(f"(cut; number of tokens: {conversation.cut_at}. --max-tokens N allows more, up to the model's context)")
    except ApiError as error:
        is_long = error.code == "context_length_exceeded"
        hint = " Shorten the message, or begin a new conversation (/reset)." if is_long else ""
        _report(f"{error.message}{hint}", is_interactive)
    except KeyboardInterrupt:
        if not is_interactive:
            raise
        print("\n(stopped)")


def visible(text: str) -> str:
    """A text for a terminal: control characters, with which a model could change the terminal, are replaced."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _report(message: str, is_interactive: bool) -> None:
    """Print an error and continue; with redirected input, end with exit code 2."""
    from rl_core.errors import ConfigError

    if not is_interactive:
        raise ConfigError(message)
    _note(f"error: {message}")


def _lines(is_interactive: bool) -> Iterator[str]:
    if not is_interactive:
        yield from sys.stdin
        return
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (editing and history of `input`)
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
