"""Losses and advantages compared with TRL's trainers on the same weights, tokens and masks: values and gradients.

Real trainers of TRL, around a random Llama, are given a batch that is made by hand. Ours gets log-probabilities from the same
model by a log-softmax that neither side wrote. Where TRL has the same formula under another normalisation or setting, the test
says which. What TRL has no counterpart of, or only a part:

- conservative DPO: its `sigmoid` smooths no labels (`robust` is another formula). Its `aot` over a single pair, where sorting
  does nothing, is conservative DPO; that is compared.
- SimPO and ORPO are in `trl.experimental` alone, and the likelihood of ORPO covers the prompt there.
- RLOO: TRL clips one ratio of a sequence's summed log-probabilities. Where the policy is the one that sampled, that has the
  gradient of advantage times summed log-probability, whose value is another; gradients are compared.
- Not there at all: CISPO's lower bound, REINFORCE++, DPPO, Clip-Cov, KL-Cov, k1 and k2, clamps of the KL. Its KL weighed by
  the ratio (`use_bias_correction_kl`) is not here.

What docs/migrate.md says to set for a `loss_type` or a mode of the correction for vLLM is read from the page.

Tolerance: the model is float64, but its normalisation layers compute in float32, so two forward passes over other shapes (TRL
asks for the logits of the answers alone) differ by 1e-7, and so do losses and gradients: 1e-6 of the value, and of the norm of
the gradient.
"""

import importlib
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms.estimators import make_estimator
from rl_train.algorithms.kto import mismatched_rows
from rl_train.algorithms.losses import config as pg
from rl_train.algorithms.losses import preference_configs as pairs
from rl_train.algorithms.losses.config import GMPOLossConfig, SAPOLossConfig, VESPOLossConfig
from rl_train.algorithms.losses.kl import sampling_weights
from rl_train.algorithms.losses.policy_gradient import ClippedPGLossFn
from rl_train.algorithms.losses.supervised import DPOLossFn, HingeLossFn, IPOLossFn, KTOLossFn, ORPOLossFn, SimPOLossFn
from rl_train.algorithms.losses.trust_regions import GMPOLossFn, SAPOLossFn, VESPOLossFn
from rl_train.algorithms.policy_configs import AdvantageConfig

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "examples" / "addition" / "model"
PROMPT = 4
LENGTHS = torch.tensor([6, 2, 4, 1, 5, 3, 6, 2])
NEW = int(LENGTHS.max())
LONGEST = 8
WITHIN = 1e-6


def migrated(heading, value):
    """The keys of `loss_fn` that docs/migrate.md gives for a value of a setting of TRL."""
    section = (ROOT / "docs" / "migrate.md").read_text().partition(f"### {heading}\n")[2].partition("\n#")[0]
    [cell] = re.findall(rf"^\| `{value}`[^|]* \| (.+) \|$", section, flags=re.MULTILINE)
    return {key: yaml.safe_load(text) for key, text in re.findall(r"`loss_fn\.([a-z_]+): ([^`]+)`", cell.partition(";")[0])}


def test_the_page_gives_no_setting_to_loss_types_without_an_equivalent():
    assert migrated("Values of `loss_type`", "bnpo") == migrated("Correction for the sampler", "sequence_mask") == {}


@pytest.fixture(scope="module")
def trl():
    """TRL with vLLM support disabled, to avoid a needless import."""
    probe = importlib.import_module("trl.import_utils")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(probe, "is_vllm_available", lambda *args, **kwargs: False)
        importlib.import_module("datasets").disable_progress_bars()
        found = importlib.import_module("trl")
        for name in ("GRPOTrainer", "RLOOTrainer", "DPOTrainer", "KTOTrainer"):
            getattr(found, name)
        yield found


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TOKENIZER)


@pytest.fixture(scope="module")
def models(tokenizer):
    """A policy and a reference policy with other weights."""

    def make(seed):
        torch.manual_seed(seed)
        ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        # Weights so large that log-probabilities differ by nats, as those of a trained model do.
        config = LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.4, **sizes, **ends)
        return LlamaForCausalLM(config).double()

    return make(0), make(1)


@pytest.fixture
def trainer(trl, models, tokenizer, tmp_path):
    """Creates a TRL trainer for the policy; `settings` are those of the trainer."""
    policy, reference = models
    dataset = importlib.import_module("datasets").Dataset

    def make(name, *, rewards=None, **settings):
        home = (
            trl if hasattr(trl, name) else importlib.import_module(f"trl.experimental.{name.removesuffix('Trainer').lower()}")
        )
        common = {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True}
        sampled = name in ("GRPOTrainer", "GMPOTrainer", "RLOOTrainer")
        if sampled:
            # beta is set afterwards: at 0 no reference model is looked for on a hub.
            common |= {"num_generations": 4, "max_completion_length": LONGEST, "beta": 0.0, "gradient_accumulation_steps": 1}
            common |= {"per_device_train_batch_size": 8}
            rows = [{"prompt": "1+1="}] * 4
            more = {"reward_funcs": rewards or (lambda completions, **rest: [0.0] * len(completions))}
        else:
            common |= {"per_device_train_batch_size": 4, "remove_unused_columns": False}
            rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "34"}] * 4
            more = {"ref_model": reference} if name in ("DPOTrainer", "KTOTrainer") else {}
            if name == "KTOTrainer":
                rows = [{"prompt": "1+1=", "completion": "2", "label": label} for label in (True, False)] * 2
        args = getattr(home, name.replace("Trainer", "Config"))(**common, **settings)
        made = getattr(home, name)(
            model=policy, args=args, train_dataset=dataset.from_list(rows), processing_class=tokenizer, **more
        )
        made.current_gradient_accumulation_steps = 1
        made.model.train()
        return made

    return make


def logprobs_of(model, input_ids):
    """[B, T]: position t scores token t; 0.0 at position 0."""
    logits = model(input_ids=input_ids).logits[:, :-1]
    chosen = torch.log_softmax(logits, dim=-1).gather(-1, input_ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(chosen, (1, 0))


def loss_and_gradient(model, loss):
    """The loss value, and the gradient of all weights as one vector."""
    model.zero_grad()
    loss.backward()
    gradient = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]).clone()
    model.zero_grad()
    return float(loss), gradient


def assert_same(ours, theirs, *, values=True):
    (our_loss, our_gradient), (their_loss, their_gradient) = ours, theirs
    assert float(their_gradient.norm()) > 1e-4, "a gradient of nothing compares nothing"
    if values:
        assert our_loss == pytest.approx(their_loss, rel=WITHIN, abs=WITHIN)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=0.0, atol=WITHIN * float(their_gradient.norm()))


class Rows:
    """Eight sampled answers, right-padded, with log-probabilities before the update and of a reference policy."""

    def __init__(self, models, tokenizer, *, spread):
        policy, reference = models
        generator = torch.Generator().manual_seed(8)
        self.input_ids = torch.randint(3, len(tokenizer), (8, PROMPT + NEW), generator=generator)
        self.mask = torch.zeros(8, PROMPT + NEW, dtype=torch.float64)
        for row, length in enumerate(LENGTHS.tolist()):
            self.mask[row, PROMPT : PROMPT + length] = 1.0
        self.input_ids[:, PROMPT:][self.mask[:, PROMPT:] == 0] = tokenizer.pad_token_id
        with torch.no_grad():
            now = logprobs_of(policy, self.input_ids)
            self.reference = logprobs_of(reference, self.input_ids) * 0.1 + now * 0.9
        self.before = now + spread * torch.randn(now.shape, generator=generator, dtype=torch.float64)
        self.advantages = torch.randn(8, generator=generator, dtype=torch.float64)
        self.sampled = self.before

    def theirs(self, **more):
        ids, mask = self.input_ids, self.mask
        return {
            "prompt_ids": ids[:, :PROMPT],
            "prompt_mask": torch.ones(8, PROMPT, dtype=torch.long),
            "completion_ids": ids[:, PROMPT:],
            "completion_mask": mask[:, PROMPT:].long(),
            "advantages": self.advantages,
            "old_per_token_logps": self.before[:, PROMPT:],
            "ref_per_token_logps": self.reference[:, PROMPT:],
            "num_items_in_batch": mask.sum(),
            **more,
        }

    def ours(self, policy, config, kind=ClippedPGLossFn):
        loss_fn = kind(config)
        batch = BatchedDataDict(
            {
                "token_mask": self.mask,
                "sample_mask": torch.ones(8, dtype=torch.float64),
                "advantages": self.advantages[:, None] * self.mask,
                "prev_logprobs": self.before * self.mask,
                "generation_logprobs": self.sampled * self.mask,
                "reference_policy_logprobs": self.reference * self.mask,
            }
        )
        logprobs = logprobs_of(policy, self.input_ids) * self.mask
        return loss_fn(logprobs, batch, torch.tensor(8.0, dtype=torch.float64), self.mask.sum())


POLICY_GRADIENTS = {
    # By default TRL weighs the KL by the ratio, which the paper does not.
    "GRPO, with the paper's KL": (
        {"loss_type": "grpo", "use_bias_correction_kl": False},
        0.04,
        pg.GRPOLossConfig(reference_policy_kl_penalty=0.04),
    ),
    "Dr. GRPO": ({"loss_type": "dr_grpo"}, 0.0, pg.DrGRPOLossConfig(constant_length_normalizer=LONGEST)),
    "DAPO's clip-higher and mean over tokens": ({"loss_type": "dapo", "epsilon_high": 0.28}, 0.0, pg.DAPOLossConfig()),
    "GSPO": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 1e-2, "epsilon_high": 2e-2},
        0.0,
        pg.GSPOLossConfig(ratio_clip_min=1e-2, ratio_clip_max=2e-2),
    ),
    # TRL's bound is on the ratio itself, rlcore's is relative to 1.
    "CISPO": ({"loss_type": "cispo", "epsilon_high": 1.5}, 0.0, pg.CISPOLossConfig(ratio_clip_max=0.5)),
    # Similarly, TRL's delta bounds the ratio, rlcore's bounds the loss.
    "dual clip": ({"loss_type": "dapo", "delta": 1.4}, 0.0, pg.ClippedPGLossConfig(ratio_clip_c=1.4)),
}


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
def test_a_policy_gradient_loss_is_that_of_trl(trainer, models, tokenizer, name):
    settings, kl, config = POLICY_GRADIENTS[name]
    peer = trainer("GRPOTrainer", **settings)
    peer.beta = kl
    rows = Rows(models, tokenizer, spread=0.4)
    theirs = loss_and_gradient(models[0], peer.compute_loss(peer.model, rows.theirs()))
    loss, metrics = rows.ours(models[0], config)
    assert 0.05 < float(metrics["ratio/clipped_frac"]) < 0.95, "some are clipped and some are not"
    assert_same(loss_and_gradient(models[0], loss), theirs)


def test_the_reinforce_gradient_equals_rloo_in_trl_on_policy(trainer, models, tokenizer):
    peer = trainer("RLOOTrainer")
    rows = Rows(models, tokenizer, spread=0.0)
    summed = (rows.before * rows.mask).sum(-1)
    theirs = loss_and_gradient(models[0], peer.compute_loss(peer.model, rows.theirs(old_logps=summed)))
    # TRL's unit is the sum of a sequence; ours is that with a constant of 1 to divide sums by.
    config = pg.ClippedPGLossConfig(disable_ppo_ratio=True, token_level_loss=False, constant_length_normalizer=1)
    loss, _ = rows.ours(models[0], config)
    assert_same(loss_and_gradient(models[0], loss), theirs, values=False)


def test_the_geometric_mean_loss_is_that_of_trl(trainer, models, tokenizer):
    # The mean over sequences of this trainer is a mean over those of the batch, all of which are trained here.
    peer = trainer("GMPOTrainer", epsilon=0.2, epsilon_high=0.3)
    rows = Rows(models, tokenizer, spread=0.4)
    theirs = loss_and_gradient(models[0], peer.compute_loss(peer.model, rows.theirs()))
    loss, metrics = rows.ours(models[0], GMPOLossConfig(log_ratio_clip_min=0.2, log_ratio_clip_max=0.3), GMPOLossFn)
    assert 0.05 < float(metrics["ratio/clipped_frac"]) < 0.95
    assert_same(loss_and_gradient(models[0], loss), theirs)


LOSS_TYPES = {
    "dapo": {},
    "grpo": {},
    "dr_grpo": {"constant_length_normalizer": LONGEST},
    # TRL's bound is on the ratio itself, rlcore's is relative to 1.
    "cispo": {"ratio_clip_max": 0.5},
    "sapo": {},
    "vespo": {},
    "luspo": {"ratio_clip_min": 0.2, "ratio_clip_max": 0.2},
}
"""What the page says in words, as values here."""
PEER_SETTINGS = {"cispo": {"epsilon_high": 1.5}, "luspo": {"importance_sampling_level": "sequence"}}
KINDS = {
    None: (pg.ClippedPGLossConfig, ClippedPGLossFn),
    "dr_grpo": (pg.DrGRPOLossConfig, ClippedPGLossFn),
    "cispo": (pg.CISPOLossConfig, ClippedPGLossFn),
    "gspo": (pg.GSPOLossConfig, ClippedPGLossFn),
    "sapo": (SAPOLossConfig, SAPOLossFn),
    "vespo": (VESPOLossConfig, VESPOLossFn),
}


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_page_of_migration_gives_the_loss_of_each_loss_type(trainer, models, tokenizer, loss_type):
    keys = migrated("Values of `loss_type`", loss_type)
    config, kind = KINDS[keys.pop("name", None)]
    peer = trainer("GRPOTrainer", loss_type=loss_type, **PEER_SETTINGS.get(loss_type, {}))
    rows = Rows(models, tokenizer, spread=0.4)
    theirs = loss_and_gradient(models[0], peer.compute_loss(peer.model, rows.theirs()))
    ours = rows.ours(models[0], config(**keys, **LOSS_TYPES[loss_type]), kind)[0]
    assert_same(loss_and_gradient(models[0], ours), theirs)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_the_page_of_migration_gives_the_correction_for_vllm_of_each_mode_by_token(trainer, models, tokenizer, mode):
    keys = migrated("Correction for the sampler", mode)
    highest = 1.5
    peer = trainer("GRPOTrainer")
    peer.use_vllm = peer.vllm_importance_sampling_correction = True
    rows = Rows(models, tokenizer, spread=0.4)
    sampled = rows.before + 0.5 * torch.randn(
        rows.before.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    ratio = ((rows.before - sampled) * rows.mask).exp()
    kept = ratio.clamp(max=highest) if mode == "token_truncate" else ratio.masked_fill(ratio > highest, 0.0)
    inputs = rows.theirs(importance_sampling_ratio=kept[:, PROMPT:])
    theirs = loss_and_gradient(models[0], peer.compute_loss(peer.model, inputs))
    config = pg.ClippedPGLossConfig(
        use_importance_sampling_correction=True, truncated_importance_sampling_ratio=highest, **keys
    )
    rows.sampled = sampled
    loss, metrics = rows.ours(models[0], config)
    assert 0.05 < float(metrics.get("mismatch/truncated_frac", metrics.get("mismatch/masked_frac"))) < 0.95
    assert_same(loss_and_gradient(models[0], loss), theirs)


def test_an_answer_that_trl_drops_by_its_product_is_kept_by_the_geometric_mean():
    config = pg.ClippedPGLossConfig(
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="seq-mask-tis",
        truncated_importance_sampling_ratio=3.0,
        truncated_importance_sampling_ratio_min=0.0,
    )
    previous = torch.full((1, 200), -1.0)
    weights, _ = sampling_weights(previous, previous - 0.01, torch.ones(1, 200), config, torch.tensor(200.0))
    assert math.exp(200 * 0.01) == pytest.approx(7.39, abs=0.01)
    torch.testing.assert_close(weights, torch.full((1, 200), math.exp(0.01)))


REWARDS = [0.0, 1.0, 0.5, 2.0, 1.0, 1.0, 0.0, 0.25]


@pytest.mark.parametrize(
    ("peer", "settings", "estimator", "within"),
    [
        ("RLOOTrainer", {}, {"name": "rloo"}, 1e-6),
        ("GRPOTrainer", {"scale_rewards": "none"}, {"name": "grpo", "normalize_rewards": False}, 1e-6),
        # TRL adds 1e-4 to the standard deviation of a group, rlcore does not: 1e-4 / std, and the smallest std here is 0.47.
        ("GRPOTrainer", {"scale_rewards": "group"}, {"name": "grpo"}, 3e-4),
    ],
)
def test_advantages_within_a_group_are_those_of_trl(trainer, peer, settings, estimator, within):
    made = trainer(peer, rewards=lambda completions, **rest: REWARDS, **settings)
    theirs = made._generate_and_score_completions([{"prompt": "1+1="}] * 8)["advantages"]
    batch = BatchedDataDict(
        {
            "rewards": torch.tensor(REWARDS),
            "group_ids": torch.tensor([0] * 4 + [1] * 4),
            "token_mask": torch.ones(8, 1),
            "sample_mask": torch.ones(8),
            "reward_parts": [{} for _ in REWARDS],
        }
    )
    ours = make_estimator(AdvantageConfig(**estimator))(batch).values[:, 0]
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=within, atol=within)


class Pairs:
    """Four pairs: rlcore has the two answers of a pair next to each other, TRL has all chosen answers first."""

    def __init__(self, tokenizer, *, prompt=PROMPT, chosen=(3, 5, 2, 6), rejected=(4, 1, 6, 2)):
        generator = torch.Generator().manual_seed(11)
        width = prompt + max(*chosen, *rejected)
        lengths = [*chosen, *rejected]
        self.input_ids = torch.randint(3, len(tokenizer), (8, width), generator=generator)
        self.attention = torch.zeros(8, width, dtype=torch.long)
        self.mask = torch.zeros(8, width, dtype=torch.float64)
        for row, length in enumerate(lengths):
            self.attention[row, : prompt + length] = 1
            self.mask[row, prompt : prompt + length] = 1.0
        self.input_ids[4:, :prompt] = self.input_ids[:4, :prompt]
        self.input_ids[self.attention == 0] = tokenizer.pad_token_id
        self.side_by_side = torch.arange(8).view(2, 4).T.flatten()

    def concatenated(self, picked=slice(None)):
        rows = torch.arange(8).view(2, 4)[:, picked].flatten()
        return {
            "input_ids": self.input_ids[rows],
            "attention_mask": self.attention[rows],
            "completion_mask": self.mask[rows].long(),
        }

    def apart(self):
        labels = torch.where(self.mask > 0, self.input_ids, -100)
        parts = {"input_ids": self.input_ids, "attention_mask": self.attention, "labels": labels}
        return {
            f"{which}_{key}": value[4 * half : 4 * half + 4]
            for half, which in enumerate(("chosen", "rejected"))
            for key, value in parts.items()
        }

    def ours(self, models, loss_fn):
        ids, mask = self.input_ids[self.side_by_side], self.mask[self.side_by_side]
        with torch.no_grad():
            reference = logprobs_of(models[1], ids) * mask
        batch = BatchedDataDict(
            {"token_mask": mask, "sample_mask": torch.ones(8, dtype=torch.float64), "reference_policy_logprobs": reference}
        )
        return loss_fn(logprobs_of(models[0], ids) * mask, batch, torch.tensor(8.0, dtype=torch.float64), mask.sum())[0]


BETA = {"reference_policy_kl_penalty": 0.3}
OF_PAIRS = {
    "dpo": (DPOLossFn, pairs.DPOLossConfig),
    "dpo_hinge": (HingeLossFn, pairs.HingeLossConfig),
    "ipo": (IPOLossFn, pairs.IPOLossConfig),
}


@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm", "hinge", "ipo"])
def test_the_page_of_migration_gives_the_loss_over_pairs_of_each_loss_type(trainer, models, tokenizer, loss_type):
    keys = migrated("Values of `loss_type` of DPO", loss_type)
    loss_class, config = OF_PAIRS[keys.pop("name")]
    loss_fn = loss_class(config(**BETA, **keys))
    peer = trainer("DPOTrainer", beta=BETA["reference_policy_kl_penalty"], loss_type=[loss_type])
    rows = Pairs(tokenizer)
    theirs = loss_and_gradient(models[0], peer.compute_loss(peer.model, rows.concatenated()))
    assert_same(loss_and_gradient(models[0], rows.ours(models, loss_fn)), theirs)


@pytest.mark.parametrize("is_clamped", [False, True], ids=["estimate", "clamped estimate"])
def test_kto_with_the_same_mismatched_rows_is_that_of_trl(trainer, models, tokenizer, is_clamped):
    rows, labels = Pairs(tokenizer), torch.tensor([True, False, True, True, False, False, True, False])
    columns = {"input_ids": rows.input_ids, "token_mask": rows.mask, "input_lengths": rows.attention.sum(-1)}
    sample_mask = torch.ones(8, dtype=torch.float64)
    other = mismatched_rows(BatchedDataDict({**columns, "sample_mask": sample_mask}), max_length=99)
    with torch.no_grad():
        policy, frozen = (logprobs_of(model, other["input_ids"]) for model in models)
        ratios = ((policy - frozen) * other["token_mask"]).sum(-1)
        if is_clamped:
            other, ratios = other.select_indices((ratios < 0).nonzero().flatten().tolist()), ratios[ratios < 0]
        kl = ratios.mean().clamp(min=0)
        reference = logprobs_of(models[1], rows.input_ids) * rows.mask
    assert (float(kl) == 0.0) == is_clamped
    settings = {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.7}
    peer = trainer("KTOTrainer", **settings)
    attended = torch.arange(other["input_ids"].shape[1]) < other["input_lengths"][:, None]
    theirs = {
        "input_ids": rows.input_ids,
        "attention_mask": rows.attention,
        "completion_mask": rows.mask.long(),
        "KL_input_ids": other["input_ids"],
        "KL_attention_mask": attended.long(),
        "KL_completion_mask": other["token_mask"].long(),
        "label": labels,
    }
    found = loss_and_gradient(models[0], peer.compute_loss(peer.model, theirs))
    settings["reference_policy_kl_penalty"] = settings.pop("beta")
    batch = {
        "token_mask": rows.mask,
        "sample_mask": sample_mask,
        "reference_policy_logprobs": reference,
        "desirable": labels.double(),
        "kl_estimates": kl.expand(8),
    }
    loss_fn, logprobs = KTOLossFn(pairs.KTOLossConfig(**settings)), logprobs_of(models[0], rows.input_ids) * rows.mask
    loss, _ = loss_fn(logprobs, BatchedDataDict(batch), torch.tensor(8.0, dtype=torch.float64), rows.mask.sum())
    assert_same(loss_and_gradient(models[0], loss), found)


def test_the_sft_term_of_dpo_equals_that_of_trl_for_chosen_answers_of_equal_length(trainer, models, tokenizer):
    # TRL's is a mean over all chosen tokens, ours a mean over answers: the same for answers of one length.
    peer = trainer("DPOTrainer", beta=0.3, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5])
    rows = Pairs(tokenizer, chosen=(4, 4, 4, 4))
    theirs = loss_and_gradient(models[0], peer.compute_loss(peer.model, rows.concatenated()))
    loss = rows.ours(models, DPOLossFn(pairs.DPOLossConfig(**BETA, sft_loss_weight=0.5)))
    assert_same(loss_and_gradient(models[0], loss), theirs)


def test_conservative_dpo_is_trls_aot_over_single_pairs(trainer, models, tokenizer):
    peer = trainer("DPOTrainer", beta=0.3, loss_type=["aot"], label_smoothing=0.2)
    rows = Pairs(tokenizer)
    alone = [peer.compute_loss(peer.model, rows.concatenated(slice(pair, pair + 1))) for pair in range(4)]
    theirs = loss_and_gradient(models[0], sum(alone) / 4)
    loss = rows.ours(models, DPOLossFn(pairs.DPOLossConfig(**BETA, label_smoothing=0.2)))
    assert_same(loss_and_gradient(models[0], loss), theirs)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_simpo_is_that_of_trl(trainer, models, tokenizer, smoothing):
    peer = trainer("CPOTrainer", loss_type="simpo", cpo_alpha=0.0, beta=2.0, simpo_gamma=0.6, label_smoothing=smoothing)
    rows = Pairs(tokenizer)
    theirs = loss_and_gradient(models[0], peer.get_batch_loss_metrics(peer.model, rows.apart())[0])
    loss = rows.ours(models, SimPOLossFn(pairs.SimPOLossConfig(beta=2.0, gamma=0.6, label_smoothing=smoothing)))
    assert_same(loss_and_gradient(models[0], loss), theirs)


def test_orpo_is_that_of_trl_where_prompts_have_one_token_and_chosen_answers_one_length(trainer, models, tokenizer):
    # TRL's likelihood is a mean over all tokens of prompt and chosen answer, except the first token, which is not predicted.
    peer = trainer("ORPOTrainer", beta=0.25)
    rows = Pairs(tokenizer, prompt=1, chosen=(4, 4, 4, 4))
    theirs = loss_and_gradient(models[0], peer.get_batch_loss_metrics(peer.model, rows.apart())[0])
    loss = rows.ours(models, ORPOLossFn(pairs.ORPOLossConfig(preference_loss_weight=0.25)))
    assert_same(loss_and_gradient(models[0], loss), theirs)
