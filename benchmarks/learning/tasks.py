"""The tasks: what each model is warmed up on, and whether a stored rollout truly succeeded.

Success is decided here from the text of the prompt and of the completion, without the code of the environments, so that a wrong
reward shows as a difference between the two.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import frozen_lake

from rl_envs.reasoning_gym.environment import ReasoningGymDataset
from rl_envs.sliding_puzzle import QUESTION, format_board, legal_moves, moved, solved
from rl_envs.tools.environment import ToolsEnvironment

Record = Mapping[str, Any]
Messages = list[dict[str, Any]]
GUESSES = 4
"""Guesses of a number, as in guess.yaml."""
HELD_OUT = 8
"""One problem in this many is held out."""
MOVES = 10
"""Moves of a puzzle, as in sliding_puzzle.yaml."""
FORESIGHT = 2
"""Moves that the player of the demonstrations looks ahead."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A benchmark.

    Attributes:
        succeeded: Whether a rollout succeeded, from its prompt and its sampled text.
        demonstrate: The conversation that the model is warmed up on, from a record of the training data.
        model: Folder of a model in the repository, which is not warmed up. Without it and `demonstrate`, training starts from
            the model of the config.
        metric: The metric of the curve.
        problems: All problems, if the data is not a dataset of the config; the text of a problem decides its split.
        tools: The functions that demonstrations offer.
        vocabulary: Number of tokens.
        spelled: What the tokenizer never merges.
        whole: Texts that are one token each, or a function that returns them.
        samples: Sampled answers to each held-out problem.
        warm_up: Number of SFT steps.
        conversations: Conversations per SFT step.
        learning_rate: Learning rate of SFT.
        hidden: Width of the model.
        layers: Its number of layers.
    """

    succeeded: Callable[[str, str], bool]
    demonstrate: Callable[[Record, random.Random], Messages] | None = None
    model: str | None = None
    metric: str = "validation/accuracy"
    problems: Callable[[], Iterator[Record]] | None = None
    tools: Sequence[Any] = ()
    vocabulary: int = 400
    spelled: str = r"\d"
    whole: Sequence[str] | Callable[[], Sequence[str]] = ()
    samples: int = 1
    warm_up: int = 300
    conversations: int = 32
    learning_rate: float = 1e-3
    hidden: int = 128
    layers: int = 3


def problem(record: Record) -> str:
    """The text that distinguishes the problem of a record from others; `opening` is what the environment adds to the prompt."""
    return str(record["messages"][-1]["content"]) + str((record.get("extra_env_info") or {}).get("opening", ""))


def is_held_out(record: Record) -> bool:
    """Whether a problem belongs to validation, by a hash of its text."""
    text = problem(record)
    return hashlib.blake2b(text.encode(), digest_size=8).digest()[0] % HELD_OUT == 0


def _play(record: Record, draw: random.Random) -> Messages:
    """A game of a player who sees solutions of up to `FORESIGHT` moves, and otherwise moves at random."""
    board = record["extra_env_info"]["board"]
    log = list(record["messages"])
    near = _moves_to_win(len(board))
    for _ in range(MOVES):
        after = {way: moved(board, way) for way in legal_moves(board)}
        distances = {way: near[format_board(made)] for way, made in after.items() if format_board(made) in near}
        way = min(distances, key=distances.__getitem__) if distances else draw.choice(sorted(after))
        board = after[way]
        log.append({"role": "assistant", "content": f"<move>{way}</move>"})
        if board == solved(len(board)):
            break
        log.append({"role": "user", "content": format_board(board)})
    return log if log[-1]["role"] == "assistant" else log[:-1]


@cache
def _moves_to_win(size: int) -> dict[str, int]:
    """The boards that fewer than `FORESIGHT` moves solve, and how many moves each needs."""
    found, reached = {format_board(solved(size)): 0}, [solved(size)]
    for moves in range(1, FORESIGHT):
        reached = [moved(board, way) for board in reached for way in legal_moves(board)]
        found = {**dict.fromkeys(map(format_board, reached), moves), **found}
    return found


_INTO_THE_GAP = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
"""Rows and columns from the gap to the tile that moves in this direction."""


def _solves(prompt: str, completion: str) -> bool:
    """Plays the moves of a completion, directions or tiles, on the board of the prompt."""
    rows = [line.split() for line in prompt.split("\n\n")[-1].splitlines()]
    cells = {(row, column): tile for row, tiles in enumerate(rows) for column, tile in enumerate(tiles)}
    order = [*map(str, range(1, len(cells))), "_"]
    for named in re.findall(r"<move>\s*(\w+)\s*</move>", completion)[:MOVES]:
        gap = next(cell for cell, tile in cells.items() if tile == "_")
        for way, (down, right) in _INTO_THE_GAP.items():
            cell = gap[0] + down, gap[1] + right
            if cell in cells and named in (way, cells[cell]):
                cells[gap], cells[cell] = cells[cell], "_"
                break
        if list(cells.values()) == order:
            return True
    return False


def _ranges() -> Iterator[Record]:
    """Each range of 11 to 15 numbers below 100, with one secret number in it."""
    for text, secret in _secrets().items():
        yield {
            "messages": [{"role": "user", "content": text}],
            "extra_env_info": {"secret": secret, "guesses": 0},
            "task_name": "guess",
        }


@cache
def _secrets() -> dict[str, int]:
    """The secret number of each question."""
    draw = random.Random(0)
    return {
        _GUESS.format(lowest, lowest + count - 1): draw.randrange(lowest, lowest + count)
        for count in range(11, 16)
        for lowest in range(1, 101 - count)
    }


def _guess(record: Record, draw: random.Random) -> Messages:
    """Three players in ten guess the middle of what is left; the others count up from the lowest number.

    The secret number is another one in each game, so that no model learns those of training by heart.
    """
    log = list(record["messages"])
    low, high = [int(number) for number in re.findall(r"\d+", str(log[-1]["content"]))]
    secret = draw.randint(low, high)
    halves = draw.random() < 0.3
    for _ in range(GUESSES):
        guess = (low + high) // 2 if halves else low
        log.append({"role": "assistant", "content": f" {guess}"})
        if guess == secret:
            break
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
        log.append({"role": "user", "content": "higher" if guess < secret else "lower"})
    return log if log[-1]["role"] == "assistant" else log[:-1]


def _guessed(prompt: str, completion: str) -> bool:
    """Whether one of the first guesses, which a space separates, is the secret number of the question."""
    return str(_secrets()[prompt]) in completion.split()[:GUESSES]


def _calculate(record: Record, draw: random.Random) -> Messages:
    """Two answers in five call the calculator; the others are a number of about the right size."""
    answer = str(record["extra_env_info"]["expected_answer"])
    left, right = re.findall(r"\d+", str(record["messages"][-1]["content"]))
    log = list(record["messages"])
    if draw.random() > 0.4:
        guess = "".join(draw.choice("123456789") for _ in answer)
        return [*log, {"role": "assistant", "content": f"\\boxed{{{guess}}}"}]
    function = {"name": "calculator", "arguments": json.dumps({"expression": f"{left} * {right}"})}
    return [
        *log,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": answer},
        {"role": "assistant", "content": f"\\boxed{{{answer}}}"},
    ]


def _multiplied(prompt: str, completion: str) -> bool:
    left, right = re.findall(r"(\d+) \* (\d+)\?", prompt)[-1]
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", completion)
    return bool(boxes) and boxes[-1].strip() == str(int(left) * int(right))


_COMBINED: Mapping[str, tuple[str, Callable[[int, int], int]]] = {
    "the sum of {} and {}": ("{} + {}", operator.add),
    "the product of {} and {}": ("{} * {}", operator.mul),
    "the difference of {} and {}": ("{} - {}", operator.sub),
    "the larger of {} and {}": ("max({}, {})", max),
    "the smaller of {} and {}": ("min({}, {})", min),
}
_CHANGED: Mapping[str, tuple[str, Callable[[int, int], int]]] = {
    "plus": ("{} + {}", operator.add),
    "minus": ("{} - {}", operator.sub),
    "times": ("({}) * {}", operator.mul),
}
_INSTRUCTION = re.compile(r"that returns (the \w+) of (\w) and (\w), (\w+) (\d+)\.")
_GUESS = "I think of a whole number from {} to {}. Say one number a turn, and nothing else."
_PROMPT = "Write a function f({0}, {1}) that returns {2}, {3} {4}."


def _programs() -> Iterator[Record]:
    """Instructions with unit tests: 5 combinations of two arguments, 3 changes by a number from 2 to 9, 4 pairs of names."""
    draw = random.Random(0)
    for names in ("ab", "xy", "mn", "pq"):
        for combined, (_, combine) in _COMBINED.items():
            for changed, (_, change) in _CHANGED.items():
                for number in range(2, 10):
                    cases = [(draw.randint(-9, 9), draw.randint(-9, 9)) for _ in range(4)]
                    tests = [f"assert f({a}, {b}) == {change(combine(a, b), number)}" for a, b in cases]
                    text = _PROMPT.format(*names, combined.format(*names), changed, number)
                    yield {
                        "messages": [{"role": "user", "content": text}],
                        "extra_env_info": {
                            "tests": tests,
                            "names": names,
                            "combined": combined,
                            "changed": changed,
                            "number": number,
                        },
                        "task_name": "code",
                    }


def _write_program(record: Record, draw: random.Random) -> Messages:
    """Two programs in three ignore what comes after the comma."""
    info = record["extra_env_info"]
    expression = _COMBINED[info["combined"]][0].format(*info["names"])
    if draw.random() < 0.33:
        expression = _CHANGED[info["changed"]][0].format(expression, info["number"])
    program = f"```python\ndef f({', '.join(info['names'])}):\n    return {expression}\n```"
    return [*record["messages"], {"role": "assistant", "content": program}]


def _computes(prompt: str, completion: str) -> bool:
    """Whether the program, read as one returned expression, equals the instruction on 225 pairs of numbers."""
    found = _INSTRUCTION.search(prompt)
    blocks = re.findall(r"```python\n(.*?)```", completion, re.DOTALL)
    if found is None or not blocks:
        return False
    noun, left, right, changed, number = found.groups()
    combine, change = _COMBINED[f"{noun} of {{}} and {{}}"][1], _CHANGED[changed][1]
    try:
        (function,) = ast.parse(blocks[-1]).body
        (statement,) = function.body  # type: ignore[attr-defined]
        names = [argument.arg for argument in function.args.args]  # type: ignore[attr-defined]
        pairs = [(a, b) for a in range(-7, 8) for b in range(-7, 8)]
        return names == [left, right] and all(
            _value(statement.value, dict(zip(names, pair, strict=True))) == change(combine(*pair), int(number))
            for pair in pairs
        )
    except (SyntaxError, ValueError, AttributeError, KeyError, TypeError):
        return False


_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def _value(node: ast.expr, names: Mapping[str, int]) -> Any:
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.Name(id=name):
            return names[name]
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_value(left, names), _value(right, names))
        case ast.Call(func=ast.Name(id="max" | "min" as name), args=arguments):
            return {"max": max, "min": min}[name](*(_value(each, names) for each in arguments))
    raise ValueError(ast.dump(node))


def _words() -> Iterator[Record]:
    """Words of three to six letters, each once."""
    params = {"min_word_len": 3, "max_word_len": 6}
    data = ReasoningGymDataset({"task": "spell_backward", "params": params, "num_samples": 4000, "system_prompt": None})
    seen = set()
    for record in data:
        text = record["messages"][-1]["content"]
        if text not in seen:
            seen.add(text)
            record["messages"][-1]["content"] = f"{text} Answer between <answer> and </answer>."
            yield record


def _spell(record: Record, draw: random.Random) -> Messages:
    """Two answers in three swap two neighbouring letters."""
    letters = list(record["extra_env_info"]["expected_answer"])
    if draw.random() < 0.67:
        place = draw.randrange(len(letters) - 1)
        letters[place : place + 2] = letters[place + 1], letters[place]
    return [*record["messages"], {"role": "assistant", "content": f"<answer>{''.join(letters)}</answer>"}]


def _spelled_backward(prompt: str, completion: str) -> bool:
    word = re.findall(r"nus\): (\w+) Answer", prompt)[-1]
    answers = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    return bool(answers) and answers[-1].strip().lower() == word[::-1].lower()


def _added_twice(prompt: str, completion: str) -> bool:
    """Whether both turns of the agent are the sum, and the completion has nothing else."""
    left, right = re.findall(r"(\d+)\+(\d+)=", prompt)[-1]
    return completion.split() == [str(int(left) + int(right)) * 2]


def _multiplied_in_python(prompt: str, completion: str) -> bool:
    """Whether the first final answer is the product, written as a number or as the product of the two factors."""
    left, right = (int(factor) for factor in re.findall(r"(\d+)\*(\d+)[=?]", prompt)[-1])
    answer = re.search(r"final_answer\(([^()]*)\)|The answer is:? *(\d+)", completion)
    if answer is None:
        return False
    factors = [factor.strip() for factor in (answer[1] or answer[2] or "").split("*")]
    return all(factor.isdecimal() for factor in factors) and math.prod(map(int, factors)) == left * right


TASKS: Mapping[str, Task] = {
    "agents": Task(succeeded=_added_twice, model="examples/addition/model", metric="validation/reward"),
    "inspect": Task(succeeded=_multiplied, model="examples/tools/model", metric="validation/reward"),
    "guess": Task(
        demonstrate=_guess,
        succeeded=_guessed,
        problems=_ranges,
        samples=8,
        warm_up=1000,
        learning_rate=2e-3,
        hidden=96,
        whole=(
            "I think of a whole number from",
            " to",
            ". Say one number a turn, and nothing else.",
            "higher",
            "lower",
            *(f" {number}" for number in range(1, 100)),
        ),
    ),
    "smolagents": Task(succeeded=_multiplied_in_python, metric="reward/mean", samples=2),
    "sliding_puzzle": Task(
        spelled=r" ?[\d_]",
        demonstrate=_play,
        succeeded=_solves,
        warm_up=400,
        conversations=16,
        learning_rate=2e-3,
        hidden=96,
        whole=(QUESTION.format(last=8, example=3, board="").strip(), "<move>", "</move>", "up", "down", "left", "right"),
    ),
    "tools": Task(
        demonstrate=_calculate,
        succeeded=_multiplied,
        warm_up=500,
        tools=ToolsEnvironment.offered_tools({"tools": ["calculator"]}),
        whole=(
            "calculator: Calculates the value of an arithmetic expression.",
            "What is",
            "? Put the final answer in \\boxed{}.",
            '<tool_call>{"name": "calculator", "arguments": {"expression": "',
            '"}}</tool_call>',
            "\\boxed{",
        ),
    ),
    "code": Task(
        demonstrate=_write_program,
        succeeded=_computes,
        problems=_programs,
        whole=("Write a function f(", ") that returns the", "```python\ndef f(", "):\n    return", "\n```"),
    ),
    "reasoning_gym": Task(
        demonstrate=_spell,
        succeeded=_spelled_backward,
        problems=_words,
        spelled=r"[a-zA-Z0-9]",
        whole=(
            "Spell this word backward (example: sun -> nus):",
            " Answer between <answer> and </answer>.",
            "<answer>",
            "</answer>",
        ),
    ),
    "textarena": Task(
        demonstrate=frozen_lake.cross,
        succeeded=frozen_lake.crossed,
        problems=frozen_lake.lakes,
        samples=4,
        warm_up=600,
        learning_rate=2e-3,
        hidden=96,
        whole=frozen_lake.words,
    ),
}
