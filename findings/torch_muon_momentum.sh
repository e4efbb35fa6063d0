#!/usr/bin/env bash
# torch 2.13: `torch.optim.Muon` with `nesterov=False` overwrites the momentum of bfloat16 parameters: the buffer is converted with `.bfloat16()`,
# which copies nothing if it is bfloat16 already, and then divided by its norm in place. So after each step its norm is 1, whatever the
# gradients were, and a gradient of norm 0.1 adds less to it than one rounding. Float32 parameters, and `nesterov=True`, have the running mean that the
# documentation writes. There is no message. A good guess would be that the data type of the parameters changes rounding only.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import torch


def momentum(dtype, nesterov):
    """Norm of the momentum after each of four steps, and of the running mean of the gradients."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(64, 64, dtype=dtype))
    optimizer = torch.optim.Muon([weight], lr=1e-3, weight_decay=0.0, momentum=0.95, nesterov=nesterov)
    norms, means, mean = [], [], torch.zeros(64, 64)
    for _ in range(4):
        weight.grad = (1e-3 * torch.randn(64, 64, generator=draw)).to(dtype)
        mean = 0.95 * mean + 0.05 * weight.grad.float()
        optimizer.step()
        norms.append(round(optimizer.state[weight]["momentum_buffer"].float().norm().item(), 5))
        means.append(round(mean.norm().item(), 5))
    return norms, means


print("torch", torch.__version__)
for dtype in (torch.float32, torch.bfloat16):
    for nesterov in (True, False):
        norms, means = momentum(dtype, nesterov)
        print(f"{dtype}, nesterov={nesterov}: norm of the momentum {norms}, of the running mean {means}")
        if dtype == torch.bfloat16 and not nesterov:
            assert all(0.98 < norm < 1.02 for norm in norms)
        else:
            assert all(abs(norm / mean - 1) < 0.01 for norm, mean in zip(norms, means))
PY
