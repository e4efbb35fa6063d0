"""KTO with real policies: a step equals one that is computed from the weights with Transformers, however its rows are split."""

import json
import random
from collections import Counter
from hashlib import blake2b

import numpy as np
import pytest
import torch
from e2e_runs import MODEL, PLANS_OF_PAIRS, ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_backends_hf import HuggingFacePolicy
from rl_core.errors import ConfigError, DataError
from rl_train.algorithms import KTOTrainer
from rl_train.launch.train import train

EXAMPLE = ROOT / "examples" / "kto_addition.yaml"
BETA, WEIGHTS = 0.3, {True: 1.2, False: 0.8}
LOSS = {"reference_policy_kl_penalty": BETA, "desirable_weight": WEIGHTS[True], "undesirable_weight": WEIGHTS[False]}
SUMS = [(a, b) for a in (15, 27, 38, 46) for b in (16, 29, 57)]
ROWS = [
    {"prompt": f"{a}+{b}=", "completion": str(a + b - (0 if good else 10)), "label": good}
    for number, (a, b) in enumerate([*SUMS, SUMS[0], SUMS[0]])
    for good in [number % 3 != 0]
]
"""One prompt occurs three times, with answers of both labels."""


def made(**fields):
    limits = {"max_total_sequence_length": 16, "train_micro_batch_size": 16, "logprob_batch_size": 16}
    return HuggingFacePolicy(str(MODEL), optimizer={"kwargs": {"lr": 2.0e-4}}, **{**limits, **fields})


def trained(policy, rows=ROWS, cluster=None, **config):
    section = {"max_num_steps": 2, "global_batch_size": len(rows), **config}
    return KTOTrainer(policy, cluster, config=section, loss_fn=LOSS).train(rows, validation=rows)


class Recomputed:
    """A step from two folders of weights, in float64 and row by row, without any code of the trainer."""

    def __init__(self, policy, reference, rows):
        self.tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
        self.policy, self.reference = (AutoModelForCausalLM.from_pretrained(str(path)).double() for path in (policy, reference))
        self.rows = [
            (self.ids(row["prompt"]), [*self.ids(row["completion"]), self.tokenizer.eos_token_id], row) for row in rows
        ]

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def log_ratio(self, prompt, answer):
        def of(model):
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            return torch.log_softmax(logits, -1).gather(1, torch.tensor(answer)[:, None]).sum()

        with torch.no_grad():
            frozen = of(self.reference)
        return of(self.policy) - frozen

    def kl(self):
        """The rule of docs/algorithms/kto.md."""

        def digest(tokens):
            return blake2b(np.array(tokens, dtype=np.int64).tobytes(), digest_size=16).digest()

        ordered = sorted(self.rows, key=lambda row: (digest(row[0]), digest(row[1])))
        shift = max(Counter(tuple(prompt) for prompt, *_ in ordered).values())
        with torch.no_grad():
            ratios = [
                float(self.log_ratio(prompt, ordered[(number + shift) % len(ordered)][1]))
                for number, (prompt, *_) in enumerate(ordered)
                if prompt != ordered[(number + shift) % len(ordered)][0]
            ]
        return max(0.0, sum(ratios) / len(ratios))

    def step(self):
        """KL, loss, norm of the gradient, and the mean reward of desirable answers."""
        kl, losses, rewards = self.kl(), [], []
        for prompt, answer, row in self.rows:
            ratio = self.log_ratio(prompt, answer)
            sign = 1 if row["label"] else -1
            losses.append(WEIGHTS[row["label"]] * (1 - torch.sigmoid(sign * BETA * (ratio - kl))))
            rewards += [BETA * float(ratio.detach())] if row["label"] else []
        loss = sum(losses) / len(losses)
        loss.backward()
        norm = torch.stack([each.grad.norm() for each in self.policy.parameters() if each.grad is not None]).norm()
        return {
            "kto/kl": kl,
            "loss": float(loss.detach()),
            "grad_norm": float(norm),
            "kto/reward_desirable": sum(rewards) / len(rewards),
        }


def test_a_step_equals_one_that_transformers_computes_in_float64(tmp_path):
    policy = made()
    trained(policy, max_num_steps=1)
    policy.save_checkpoint(weights_path=tmp_path / "after_one_step")
    [second] = trained(policy, max_num_steps=1)
    policy.shutdown()
    expected = Recomputed(tmp_path / "after_one_step", MODEL, ROWS).step()
    assert expected["kto/kl"] > 0.01, "the clamp at 0 does not hide a difference"
    # The policy computes in float32: sums over a few tokens agree to 1e-5, and the gradient as a whole.
    assert {name: second[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)


PLANS = {**PLANS_OF_PAIRS, "rows in another order": {}}


@pytest.fixture(scope="module")
def expected():
    policy = made()
    yield trained(policy, val_at_start=True, val_at_end=True)
    policy.shutdown()


def assert_same(found, expected):
    assert [sorted(step) for step in found] == [sorted(step) for step in expected]
    for step, other in zip(found, expected, strict=True):
        for name in [name for name in step if name.startswith(("kto/", "validation/", "loss", "grad_norm"))]:
            assert step[name] == pytest.approx(other[name], rel=1e-3, abs=2e-5), name


@pytest.mark.parametrize("plan", PLANS)
def test_neither_microbatches_nor_packing_nor_the_order_of_rows_change_a_step(plan, expected):
    policy = made(**PLANS[plan])
    rows = random.Random(3).sample(ROWS, len(ROWS)) if plan == "rows in another order" else ROWS
    assert_same(trained(policy, rows, val_at_start=True, val_at_end=True), expected)
    policy.shutdown()


def test_validation_ranks_answers_by_reward_and_a_policy_without_training_has_ties(expected):
    start, *_, end = [step for step in expected if "validation/accuracy" in step]
    assert (start["validation/accuracy"], start["validation/kl"], start["validation/margin"]) == (0.5, 0.0, 0.0)
    assert end["validation/accuracy"] > 0.6
    assert end["validation/margin"] == pytest.approx(end["validation/reward_desirable"] - end["validation/reward_undesirable"])
    assert end["validation/desirable_frac"] == pytest.approx(sum(row["label"] for row in ROWS) / len(ROWS))


def test_the_accuracy_is_the_fraction_of_pairs_with_different_labels_that_are_in_order(tmp_path):
    policy = made()
    trained(policy, max_num_steps=1)
    policy.save_checkpoint(weights_path=tmp_path / "weights")
    found = trained(policy, max_num_steps=1, val_at_start=True)[0]["validation/accuracy"]
    policy.shutdown()
    recomputed = Recomputed(tmp_path / "weights", MODEL, ROWS)
    with torch.no_grad():
        rewards = [(float(recomputed.log_ratio(prompt, answer)), row["label"]) for prompt, answer, row in recomputed.rows]
    pairs = [(good, bad) for good, label in rewards if label for bad, other in rewards if not other]
    assert found == pytest.approx(sum((good > bad) + 0.5 * (good == bad) for good, bad in pairs) / len(pairs), abs=1e-6)


def test_the_estimate_is_not_negative_when_all_answers_become_less_likely():
    policy = made()
    after = trained(policy, [{**row, "label": False} for row in ROWS])[1]
    policy.shutdown()
    assert after["kto/reward_undesirable"] < 0
    assert after["kto/kl"] == 0.0


def test_a_batch_with_one_prompt_has_no_estimate_and_says_so(own_messages):
    policy = made()
    [step] = trained(policy, [{"prompt": "1+1=", "completion": "2", "label": True}] * 2, max_num_steps=1)
    policy.shutdown()
    assert step["kto/kl"] == 0.0
    assert any("a batch of 2 rows has fewer than two prompts, so no KL is estimated from it" in text for text in own_messages())


def test_other_data_and_other_losses_are_refused():
    policy = made()
    with pytest.raises(ConfigError, match=r"kto\.global_batch_size: .*found 1"):
        KTOTrainer(policy, config={"global_batch_size": 1})
    with pytest.raises(ConfigError, match="dpo does not use the labels of answers"):
        KTOTrainer(policy, loss_fn={"name": "dpo"})
    pairs = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}]
    with pytest.raises(DataError, match=r"so it is a pair of answers. Remove `label_key`, and set `split_pairs"):
        KTOTrainer(policy).train(pairs)
    policy.shutdown()


@pytest.mark.slow
def test_ranks_do_not_change_a_step(expected, local_ray):
    from rl_core.cluster import RayVirtualCluster

    policy = made()
    with RayVirtualCluster([2]) as cluster:
        # 14 rows, and as many mismatched ones, on two ranks; the validation has an odd number.
        assert_same(trained(policy, cluster=cluster, val_at_start=True, val_at_end=True), expected)
        policy.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora",
    [
        pytest.param(False, id="all weights"),
        pytest.param(True, id="adapters", marks=pytest.mark.full("adapters learn by DPO in CI, against the same reference")),
    ],
)
def test_the_example_learns_and_a_resumed_run_is_the_same(lora, tmp_path):
    adapters = ["++policy.hf_cfg.lora={rank: 8}", "policy.optimizer.kwargs.lr=1e-3"] if lora else []
    common = [*adapters, "cluster.backend=in_process", "kto.val_period=3", "checkpointing.save_period=3"]

    def run(name, steps, resume):
        changes = [*common, f"kto.max_num_steps={steps}", f"logger.log_dir={tmp_path / name}"]
        return train(EXAMPLE, changes, resume=resume, console=False)

    run("straight", 6, "never")
    run("stopped", 3, "never")
    assert run("stopped", 6, "auto").resumed_from == 3
    straight, stopped = (
        {step["step"]: step for step in map(json.loads, (tmp_path / name / "kto_addition" / "metrics.jsonl").open())}
        for name in ("straight", "stopped")
    )
    assert straight[0]["validation/accuracy"] == 0.5
    assert straight[6]["validation/accuracy"] > 0.9
    assert straight[6]["validation/reward_desirable"] > 0 > straight[6]["validation/reward_undesirable"]
    assert stopped[6]["loss"] == pytest.approx(straight[6]["loss"], rel=1e-5)
