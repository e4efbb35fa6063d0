"""Trainers created from Python reject the same settings as a config file, before starting anything."""

import inspect
import shutil
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_core.errors import ConfigError, DataError
from rl_core.interfaces.policy import LossFunction
from rl_envs import ArithmeticEnvironment
from rl_train.algorithms import DPOTrainer, GRPOTrainer, PPOTrainer, SFTTrainer
from rl_train.trainers.trainers import DistillationTrainer

MODEL = str(Path(__file__).parents[3] / "examples" / "addition" / "model")


def policy(**fields):
    return HuggingFacePolicy(MODEL, max_total_sequence_length=16, **fields)


def grpo(model=None, **sampling):
    generation = HuggingFaceGeneration(MODEL, **{"max_new_tokens": 5, **sampling})
    return GRPOTrainer(model or policy(), generation=generation, environments=ArithmeticEnvironment())


@pytest.mark.parametrize(
    ("sampling", "key"),
    [
        (
            {"repetition_penalty": 1.3},
            r"policy\.generation\.hf_cfg\.repetition_penalty: grpo cannot train on samples from changed logits",
        ),
        ({"max_new_tokens": 16}, r"policy\.generation\.max_new_tokens: 16 leaves no tokens for a prompt"),
    ],
)
def test_grpo_trainer_refuses_sampling_settings_that_a_config_is_refused_for(sampling, key):
    with pytest.raises(ConfigError, match=key):
        grpo(**sampling)


def test_grpo_trainer_refuses_a_policy_that_scores_at_another_temperature_than_the_engine_samples_at():
    with pytest.raises(
        ConfigError, match=r"samples at temperature 0\.7, but the policy scores tokens at 1: .*'temperature': 0\.7"
    ):
        grpo(policy(precision="bfloat16"), precision="bfloat16", temperature=0.7)
    with pytest.raises(ConfigError, match=r"samples at temperature 1, but the policy scores tokens at 0\.7"):
        grpo(policy(generation={"temperature": 0.7}))
    grpo(policy(generation={"temperature": 0.7}), temperature=0.7)


@pytest.mark.parametrize("trainer", [SFTTrainer, DPOTrainer])
def test_trainers_that_do_not_sample_refuse_a_policy_that_scores_at_a_sampling_temperature(trainer):
    with pytest.raises(
        ConfigError, match=r"does not sample, so it trains at temperature 1, but the policy scores tokens at 0\.7"
    ):
        trainer(policy(generation={"temperature": 0.7}))
    trainer(policy(generation={"temperature": 1.0}))


def test_a_teacher_must_be_made_with_the_engines_temperature():
    def distillation(temperature):
        sampling = {"backend": "hf", "max_new_tokens": 5}
        return DistillationTrainer(
            policy(generation={**sampling, "temperature": 0.5}),
            generation=HuggingFaceGeneration(MODEL, temperature=0.5, max_new_tokens=5),
            teacher=policy(generation={**sampling, "temperature": temperature}, frozen=True),
        )

    assert distillation(0.5).config.policy.generation.temperature == 0.5
    with pytest.raises(ConfigError, match=r"samples at temperature 0\.5, but the teacher scores tokens at 0\.7"):
        distillation(0.7)


class TwoTurns(ArithmeticEnvironment):
    min_turns = 2


def test_a_trainer_refuses_fewer_turns_than_its_environment_needs():
    generation = HuggingFaceGeneration(MODEL, max_new_tokens=5)
    with pytest.raises(ConfigError, match=r"at most 1 turn\(s\), but TwoTurns needs 2 .* Set `max_rollout_turns`"):
        GRPOTrainer(policy(), generation=generation, environments=TwoTurns(), config={"max_rollout_turns": 1})
    GRPOTrainer(policy(), generation=generation, environments=TwoTurns(), config={"max_rollout_turns": 2})


def test_a_trainer_refuses_batches_that_cannot_hold_one_row():
    packing = {"enabled": True, "train_mb_tokens": 8, "logprob_mb_tokens": 8}
    with pytest.raises(ConfigError, match=r"policy\.sequence_packing\.train_mb_tokens: 8 tokens are too few for one row"):
        SFTTrainer(policy(sequence_packing=packing))


def test_a_trainer_refuses_epochs_that_end_while_only_the_critic_is_trained():
    trainer = PPOTrainer(
        policy(),
        value=policy(head="scalar"),
        generation=HuggingFaceGeneration(MODEL, max_new_tokens=5),
        environments=ArithmeticEnvironment(),
        config={"num_prompts_per_step": 2, "critic_warmup_steps": 2, "max_num_epochs": 1},
    )
    rows = [{"question": f"{n}+1=", "expected_answer": str(n + 1)} for n in range(4)]
    with pytest.raises(ConfigError, match="the first 2 steps train only the critic and the run has 2"):
        trainer.train(rows)


def test_a_trainer_warns_of_more_tokens_than_the_model_has_rotary_positions_for(caplog):
    SFTTrainer(HuggingFacePolicy(MODEL, max_total_sequence_length=129))
    assert "policy.max_total_sequence_length: 129 tokens" in caplog.text


def test_a_trainer_refuses_more_tokens_than_the_model_has_learned_positions_for(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = GPT2Config(vocab_size=18, n_positions=128, n_embd=8, n_layer=1, n_head=1)
    GPT2LMHeadModel(config).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"policy\.max_total_sequence_length: 129 tokens"):
        SFTTrainer(HuggingFacePolicy(str(folder), max_total_sequence_length=129))


def test_a_trainer_refuses_an_end_of_sequence_token_that_the_model_does_not_have():
    engine = HuggingFaceGeneration(MODEL, max_new_tokens=5)
    engine.config = engine.config.model_copy(update={"eos_token_id": 3})
    with pytest.raises(ConfigError, match=r"eos_token_id is 3, but the end-of-sequence tokens of the model are \[1\]"):
        GRPOTrainer(policy(), generation=engine, environments=ArithmeticEnvironment())


def test_a_trainer_checks_its_data_before_it_creates_its_folder(tmp_path):
    rows = [{"prompt": "1+2=", "chosen": "3", "rejected": "4"}]
    trainer = DPOTrainer(policy(), config={"global_batch_size": 1, "max_num_steps": 1}, folder=tmp_path / "run")
    with pytest.raises(DataError, match="record 0 has 20 tokens, but 16 are allowed"):
        trainer.train([{**rows[0], "prompt": "1+2+3+4+5+6+7+8+9="}])
    assert not (tmp_path / "run").exists()


def test_a_trainer_warns_once_of_a_warm_up_that_does_not_end(own_messages):
    scheduler = {"name": "linear", "kwargs": {"num_warmup_steps": 9, "num_training_steps": 20}}
    rows = [{"prompt": "1+2=", "chosen": "3", "rejected": "4"}] * 2
    DPOTrainer(policy(scheduler=scheduler), config={"global_batch_size": 2, "max_num_steps": 2}).train(rows)
    assert sum("the warm-up of 9 optimizer steps does not end before the run" in text for text in own_messages()) == 1


class FailingLoss(LossFunction):
    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        return data["no_such_key"], {}


def line_of(code, text: str) -> int:
    lines, first = inspect.getsourcelines(code)
    return first + next(number for number, line in enumerate(lines) if text in line)


def test_a_loss_that_raises_in_a_step_is_reported_with_its_line():
    rows = [{"question": f"{n}+1=", "expected_answer": str(n + 1)} for n in range(4)]
    conversations = [
        {"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["expected_answer"]}]}
        for row in rows
    ]
    trainer = SFTTrainer(policy(), config={"global_batch_size": 2, "max_num_steps": 1}, loss_fn=FailingLoss())
    line = line_of(FailingLoss, "no_such_key")
    with pytest.raises(ConfigError, match=rf"FailingLoss raised KeyError at .*test_trainer_checks\.py:{line}: "):
        trainer.train(conversations)
