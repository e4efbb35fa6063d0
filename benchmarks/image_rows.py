"""Time and memory of reading rows with JPEG pictures, against what the model's own processor needs for the same pictures.

    python benchmarks/image_rows.py --rows 10000
    python benchmarks/image_rows.py --rows 2000 --size 1280 960

Each row has another picture. Three ways alternate, in parts of 500 rows: Pillow decodes the file to RGB; the
processor of Transformers decodes and prepares it; a dataset of rlcore makes the whole row (tokens, positions and tensors).
Memory is the process's resident memory after each part, with 64 MiB for pictures that are kept (`data.images.cache_mib`).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from PIL import Image

from rl_core.data.tokenizer import load_tokenizer
from rl_train.config.data_sections import ImagesConfig
from rl_train.data.dataset_config import JsonlDatasetConfig
from rl_train.data.datasets import RecordDataset
from rl_train.data.images import ImageReader, load_processor
from rl_train.data.processors import prompt_datum

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "pictures" / "model"
PART, KEPT_MIB = 500, 64


def write_rows(folder: Path, count: int, size: tuple[int, int]) -> Path:
    """Smooth random pictures as JPEG files, and a JSON Lines file with a row for each."""
    (folder / "pictures").mkdir()
    rows = []
    for number in range(count):
        values = torch.randint(0, 256, (15, 20, 3), generator=torch.Generator().manual_seed(number), dtype=torch.uint8)
        name = f"pictures/{number}.jpg"
        Image.fromarray(values.numpy()).resize(size, Image.Resampling.BICUBIC).save(folder / name, quality=90)
        rows.append({"question": "Which color?", "expected_answer": "red", "images": [name]})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--size", type=int, nargs=2, default=(320, 240), help="width and height of the pictures in pixels")
    given = parser.parse_args()
    count = given.rows
    with tempfile.TemporaryDirectory() as folder:
        path = write_rows(Path(folder), count, tuple(given.size))
        tokenizer = load_tokenizer(MODEL)
        processor = load_processor(str(MODEL), tokenizer)
        tokenizer.image_reader = ImageReader(str(MODEL), ImagesConfig(cache_mib=KEPT_MIB))
        rows = RecordDataset(JsonlDatasetConfig(path=str(path)))

        def decoded(row: int) -> Image.Image:
            with Image.open(Path(folder) / "pictures" / f"{row}.jpg") as picture:
                return picture.convert("RGB")

        def processed(row: int) -> None:
            processor(text=[processor.image_token], images=[[decoded(row)]], return_tensors="pt")

        def made(row: int) -> None:
            prompt_datum(rows[row], idx=row, tokenizer=tokenizer)

        ways: dict[str, Callable[[int], object]] = {"decode": decoded, "processor": processed, "row of rlcore": made}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        memory = []
        for way in ways.values():
            way(0)
        for first in range(0, count, PART):
            part = range(first, min(first + PART, count))
            for name, way in ways.items():
                started = time.perf_counter()
                for row in part:
                    way(row)
                seconds[name].append((time.perf_counter() - started) / len(part))
            gc.collect()
            memory.append(psutil.Process().memory_info().rss / 2**20)
    print("| way | ms per row, median of parts (lowest to highest) |\n|---|---|")
    for name, each in seconds.items():
        low, middle, high = (1e3 * value for value in (min(each), statistics.median(each), max(each)))
        print(f"| {name} | {middle:.2f} ({low:.2f} to {high:.2f}) |")
    ratios = [own / other for own, other in zip(seconds["row of rlcore"], seconds["processor"], strict=True)]
    print(f"\nrow / processor, median of parts: {statistics.median(ratios):.2f}")
    print(f"memory after the parts, in MiB: {', '.join(f'{value:.0f}' for value in memory)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
