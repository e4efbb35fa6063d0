#!/usr/bin/env bash
# torch 2.13 on x86: a linear layer that oneDNN computes on packed weights keeps about 0.3 to 0.6 MB for each number of rows that it has ever
# had, up to 1,024 of them. oneDNN's documented limit, ONEDNN_PRIMITIVE_CACHE_CAPACITY, frees only a part: the layer between torch and oneDNN
# has a cache of its own, of the same size, that is limited by LRU_CACHE_CAPACITY. Only both together bound the memory. A good guess would be that
# oneDNN's own setting bounds what oneDNN keeps.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/grow.py" <<'PY'
import ctypes
import sys

import torch

trim = ctypes.CDLL("libc.so.6").malloc_trim
torch.set_num_threads(1)


def resident_mb():
    trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6


weight, rows = torch.randn(192, 64), torch.randn(1300, 64)


def multiply(count):
    return torch.ops.mkldnn._linear_pointwise(rows[:count], weight, None, "none", [], "")


multiply(100)
before = resident_mb()
for count in range(200, 1200):
    multiply(count)
print(resident_mb() - before)
PY
grown() { env "$@" "$folder/venv/bin/python" "$folder/grow.py"; }
default=$(grown A=1)
one=$(grown ONEDNN_PRIMITIVE_CACHE_CAPACITY=64)
both=$(grown ONEDNN_PRIMITIVE_CACHE_CAPACITY=64 LRU_CACHE_CAPACITY=64)
"$folder/venv/bin/python" - "$default" "$one" "$both" <<'PY'
import sys

import torch

default, one, both = map(float, sys.argv[1:])
print(f"torch {torch.__version__}, 1,000 numbers of rows: {default:.0f} MB; with oneDNN's limit {one:.0f} MB; with both {both:.0f} MB")
assert default > 200, "memory does not grow with the number of shapes"
assert one > 0.4 * default, "oneDNN's own limit bounds the memory"
assert both < 0.25 * default, "a third cache keeps programs"
PY
