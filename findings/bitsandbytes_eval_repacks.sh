#!/usr/bin/env bash
# bitsandbytes 0.50.2 on a CPU with AVX512-BF16: the first forward pass of a 4-bit linear layer in evaluation mode replaces the stored weight
# by another layout, of other bytes and another shape, and `train()` does not restore it. So the same layer in training mode gives other outputs
# before and after a scoring pass. `state_dict()` restores the bytes, in the layer itself, but with `compress_statistics=False` (the usual setting of
# Transformers) not the order of the scales: from then on the layer computes with the scales of other blocks, which are also those that are saved. There is
# no message. The other layout is not used on other CPUs (the script expects that there; it was run with AVX512-BF16 only). A good guess would be
# that scoring and saving do not change a frozen layer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/pip" install --quiet bitsandbytes==0.50.2
cd "$folder"
"$folder/venv/bin/python" - 2>"$folder/messages" <<'PY'
from importlib.metadata import version

import torch
from bitsandbytes.nn import Linear4bit, Params4bit

repacks = " avx512_bf16" in open("/proc/cpuinfo").read()
torch.manual_seed(0)
layer = Linear4bit(128, 256, bias=False, compute_dtype=torch.bfloat16, compress_statistics=False, quant_type="nf4")
weight = 0.05 * torch.randn(256, 128)
layer.weight = Params4bit(weight, requires_grad=False, compress_statistics=False, quant_type="nf4")
layer = layer.to("cpu")
inputs = torch.randn(8, 128, dtype=torch.bfloat16)


def stored():
    return tuple(layer.weight.shape), layer.weight.detach().flatten().clone()


def outputs():
    return layer.train()(inputs)


def differ(first, second):
    return first[0] != second[0] or not torch.equal(first[1], second[1])


print("bitsandbytes", version("bitsandbytes"), "on a CPU", "with" if repacks else "without", "AVX512-BF16")
weight, before = stored(), outputs()
assert not differ(weight, stored())
layer.eval()(inputs)
scored, after = stored(), outputs()
print(f"weight {weight[0]}; after one pass in evaluation mode {scored[0]}, bytes {'differ' if differ(weight, scored) else 'are equal'}")
print(f"outputs in training mode before and after it differ by up to {(before - after).abs().max():.2g}")
scales = layer.state_dict()["weight.absmax"]
saved = outputs()
error = (before - saved).abs().max()
print(f"after state_dict(), the bytes {'differ from' if differ(weight, stored()) else 'equal'} the first")
print(f"its scales have the shape {tuple(scales.shape)}; outputs differ from the first by up to {error:.2g} of {before.abs().max():.2g}")
assert differ(weight, scored) == repacks and torch.equal(before, after) != repacks
assert not differ(weight, stored()) and (error > 0.1 * before.abs().max()) == repacks
PY
