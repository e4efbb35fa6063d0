#!/usr/bin/env bash
# bitsandbytes 0.50.2: an 8-bit linear layer with frozen weights rounds its inputs to 8 bits on a CPU in evaluation mode, and does not
# in training mode, where it multiplies by the dequantized weight. So a model scores its own training data with other log-probabilities, although it
# has no dropout and its weights are the same bytes. A good guess would be that the two modes differ in nothing but dropout.
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
from bitsandbytes.nn import Int8Params, Linear8bitLt

torch.manual_seed(0)
layer = Linear8bitLt(128, 256, bias=False, has_fp16_weights=False)
layer.weight = Int8Params(0.05 * torch.randn(256, 128), requires_grad=False, has_fp16_weights=False)
layer = layer.to("cpu")
inputs = torch.randn(8, 128)
with torch.no_grad():
    layer(inputs)  # moves the scales of the rows into the layer's state
    stored = layer.weight.clone()
    weight = layer.weight.float() * layer.state.SCB[:, None] / 127
    exact = inputs @ weight.T
    error = {mode: float((layer.train(mode == "training")(inputs) - exact).abs().max()) for mode in ("training", "evaluation")}
print("bitsandbytes", version("bitsandbytes"), "largest output", f"{exact.abs().max():.3g}")
for mode, value in error.items():
    print(f"{mode}: outputs differ from those of the dequantized weight by up to {value:.2g}")
assert torch.equal(stored, layer.weight)
assert error["training"] < 1e-5 and error["evaluation"] > 1e-3
PY
