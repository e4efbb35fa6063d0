#!/usr/bin/env bash
# torch 2.13: `get_optimizer_state_dict` (torch.distributed.checkpoint.state_dict), with which checkpoints are written, changes training if it is called
# before the first step. An optimizer without state gets one by a step with a learning rate and gradients of 0, which leaves the weights alone and counts:
# Adam's bias correction is then one step ahead of its moments. Its first update is 0.74 of the learning rate instead of 1, and later ones are
# smaller than without the call as well. A good guess would be that reading a state changes nothing, and that a checkpoint of step 0 continues as a new run.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

LR = 1e-3


def updates(use, steps=4):
    """Mean sizes of the first updates, in units of the learning rate, with a constant gradient, for which Adam's are 1."""
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    use(model, optimizer)
    sizes = []
    for _ in range(steps):
        before = model.weight.detach().clone()
        model.weight.grad = torch.ones_like(before)
        optimizer.step()
        sizes.append(round((before - model.weight.detach()).mean().item() / LR, 3))
    return sizes


def read(model, optimizer):
    before = model.weight.detach().clone()
    get_optimizer_state_dict(model, optimizer)
    assert torch.equal(before, model.weight)


def resumed(model, optimizer):
    other = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, other))


print("torch", torch.__version__)
plain, after_read, after_resume = updates(lambda *_: None), updates(read), updates(resumed)
print("updates of a new optimizer:", plain)
print("after get_optimizer_state_dict:", after_read)
print("resumed from a checkpoint of step 0:", after_resume)
# After n steps with a gradient of 1, moments are 1 - 0.9^n and 1 - 0.999^n, and their corrections those of n + 1.
expected = [round((1 - 0.9**n) / (1 - 0.9 ** (n + 1)) / ((1 - 0.999**n) / (1 - 0.999 ** (n + 1))) ** 0.5, 3) for n in range(1, 5)]
assert all(abs(size - 1) < 2e-3 for size in plain)
assert all(abs(size - other) < 2e-3 for size, other in zip(after_read, expected)), expected
assert after_resume == after_read and after_read[0] < 0.75
PY
