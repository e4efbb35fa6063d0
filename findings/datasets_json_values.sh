#!/usr/bin/env bash
# datasets 5.2: `load_dataset("json")` keeps 5 and "x" of one column as they are in the file (the type Json), but one integer of more
# than 64 bits turns every integer of its column into a float, so that other rows lose digits too, and a column of texts such as
# "2024-01-02" becomes timestamps. There is no message. A good guess would be that values of JSON are those of the file, as with the
# mixed column, or that there is an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 pyarrow==25.0.0 pandas==2.3.3
cd "$folder"
HF_HOME="$folder/cache" HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PY'
import datetime
import json
from importlib.metadata import version
from pathlib import Path

import datasets

datasets.disable_progress_bars()


def column(name, values):
    Path(f"{name}.jsonl").write_text("".join(json.dumps({"value": value}) + "\n" for value in values))
    table = datasets.load_dataset("json", data_files=f"{name}.jsonl", split="train")
    print(f"{name}: {values} are read as {table['value'][:]} ({table.features['value']})")
    return table["value"][:]


print("datasets", version("datasets"), "pyarrow", version("pyarrow"))
exact = 2**53 + 1
assert column("mixed", [5, "x"]) == [5, "x"]
assert column("integers", [exact, 1]) == [exact, 1]
read = column("one_large", [exact, 2**64 + 1])
assert [type(value) for value in read] == [float, float] and read[0] == exact - 1, "the values are those of the file"
assert column("dates", ["2024-01-02"]) == [datetime.datetime(2024, 1, 2)], "the text is that of the file"
PY
