"""How the cost of a GRPO step grows with tokens, rows and parameters, here and in TRL's GRPOTrainer.

    python benchmarks/cost_growth.py --model path/to/model --axis tokens --values 64 128 256 512
    python benchmarks/cost_growth.py --model path/to/model --axis rows --values 4 16 64
    python benchmarks/cost_growth.py --model path/to/model --axis parameters --values 135 360
    python benchmarks/cost_growth.py --model path/to/model --axis tokens --values 512 1024 --rows 4

The step is that of `grpo_vs_trl.py --full-length`: 2 prompts x 8 samples of 64 tokens, float32, of which one number changes
(with `--rows`, 2 prompts x half as many samples).
One step is measured after a warm-up step; the two sides alternate. An exponent e between two values says that the cost grew by
the ratio of the values to the power of e: 1 is linear. Models of other sizes have the shape of SmolLM2 with that many million
parameters, random weights, and the tokenizer of `--model`.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from generation_vs_transformers import SMOLLM2_135M
from grpo_vs_trl import measure, without_end_tokens

SHAPES = {
    135: {},
    360: {
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
    },
    1700: {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
}
"""What differs from SmolLM2-135M, by million parameters (config.json of HuggingFaceTB/SmolLM2-360M and -1.7B)."""
SIDES = ("trl", "ours")


def of_size(model: str, millions: int, folder: Path) -> str:
    """A folder with random weights of that size, and the tokenizer of `model`."""
    import transformers

    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = transformers.LlamaConfig(**{**SMOLLM2_135M, **SHAPES[millions]}, eos_token_id=2, pad_token_id=0, bos_token_id=1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def settings(axis: str, value: int, rows: int, model: str, folder: Path) -> Namespace:
    """The arguments of `grpo_vs_trl.py` in which one number differs."""
    chosen = {"completion_tokens": 64, "group": rows // 2}
    if axis == "tokens":
        chosen["completion_tokens"] = value
    elif axis == "rows":
        chosen["group"] = value // 2
    else:
        model = of_size(model, value, folder / f"of-{value}")
    endless = without_end_tokens(model, folder / f"endless-{axis}-{value}")
    return Namespace(model=endless, dtype="float32", threads=2, steps=1, prompt_tokens=0, pictures=0, **chosen)


def table(axis: str, values: Sequence[int], found: Sequence[dict[str, dict[str, float]]]) -> str:
    """A row for each value, with the exponent since the value before."""
    lines = [
        f"| {axis} | TRL: s per step | exponent | GiB | ours: s per step | exponent | GiB | times TRL | us per trained token |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for place, (value, sides) in enumerate(zip(values, found, strict=True)):

        def grown(key: Callable[[dict[str, float]], float], side: str, place: int = place) -> str:
            if place == 0:
                return "-"
            ratio = key(found[place][side]) / key(found[place - 1][side])
            return f"{math.log(ratio) / math.log(values[place] / values[place - 1]):.2f}"

        cells = [str(value)]
        for side in SIDES:
            if side not in sides:
                cells += ["-"] * 3
                continue
            seconds = sides[side]["seconds_per_step"]
            cells += [f"{seconds:.2f}", grown(lambda each: each["seconds_per_step"], side), f"{sides[side]['peak_gib']:.2f}"]
        cells.append(f"{sides['ours']['tokens_per_s'] / sides['trl']['tokens_per_s']:.2f}" if "trl" in sides else "-")
        cells.append(f"{1e6 / sides['ours']['tokens_per_s']:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder that Transformers loads")
    parser.add_argument("--axis", choices=("tokens", "rows", "parameters"), required=True)
    parser.add_argument("--values", type=int, nargs="+", required=True, help="tokens, rows, or million parameters")
    parser.add_argument("--rows", type=int, default=16, help="rows of a step, on the other axes")
    parser.add_argument(
        "--without-trl", action="store_true", help="for steps that need more memory than the machine has with TRL"
    )
    chosen = parser.parse_args()
    sides = SIDES[1:] if chosen.without_trl else SIDES
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        for number, value in enumerate(chosen.values):
            arguments = settings(chosen.axis, value, chosen.rows, chosen.model, Path(temporary))
            order = sides if number % 2 == 0 else sides[::-1]
            found.append({side: measure(side, arguments) for side in order})
            print(table(chosen.axis, chosen.values[: number + 1], found), flush=True)


if __name__ == "__main__":
    main()
