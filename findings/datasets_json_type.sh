#!/usr/bin/env bash
# datasets 5.2: a column of JSON files with values of several types gets the type Json, which is there to keep them. It keeps 5 and "x", but a text
# that is itself valid JSON becomes that value: "7" is read as 7, "1.50" as 1.5, "true" as True and "null" as None. And if one column has
# this type, numbers of all columns are rounded to 10 decimal places, because all rows are written again as JSON by pandas' encoder. There is
# no message. A good guess would be that a type for JSON tells "7" from 7, and that a column does not depend on its neighbours.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 pyarrow==25.0.0 pandas==2.3.3
cd "$folder"
HF_HOME="$folder/cache" HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2>"$folder/messages" <<'PY'
import json
from importlib.metadata import version
from pathlib import Path

import datasets

datasets.disable_progress_bars()
EXACT = 0.12345678901234


def read(name, rows):
    """The rows of a JSON Lines file, as the library reads them."""
    Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = datasets.load_dataset("json", data_files=f"{name}.jsonl", split="train")
    print(f"{name}: {table.features}")
    for row, found in zip(rows, table, strict=True):
        print(f"    {row} is read as {found}")
    return table[:]


print(*(f"{name} {version(name)}" for name in ("datasets", "pyarrow", "pandas")))
texts = read("texts", [{"answer": text, "score": EXACT} for text in ("x", "7", "1.50", "true", "null")])
assert texts == {"answer": ["x", "7", "1.50", "true", "null"], "score": [EXACT] * 5}
mixed = read("mixed", [{"answer": answer, "score": EXACT} for answer in (5, "x", "7", "1.50", "true", "null")])
assert mixed["answer"] == [5, "x", 7, 1.5, True, None]
assert mixed["score"] == [0.123456789] * 6
PY
if grep -qi "round\|precision\|mixed" "$folder/messages"; then echo "there is a message now"; exit 1; fi
echo "no message"
