"""Spans of text that two tokenizers have in common: their bytes, and the loss on them."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.tokenizer import encode
from rl_train.algorithms.losses.config import DistillationLossConfig
from rl_train.algorithms.losses.distillation import DistillationLossFn
from rl_train.data.teacher_spans import answer_spans
from rl_train.launch.train import train
from rl_train.rollouts.teacher_rows import TeacherRows

EXAMPLES = Path(__file__).parents[3] / "examples"
ADDITION = EXAMPLES / "addition" / "model"
TEXTS = ("the theory of the thing is that it then thins", "añb ñandú 三つ 三 😀😀 été", "12 + 34 = 46, 120 + 34 = 154")


def bpe(size, *texts):
    """A byte-level BPE of this size, whose tokens may be parts of characters."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


ONE, OTHER = bpe(300, *TEXTS), bpe(340, *reversed(TEXTS), "thth ñañ 46,46", "誂誃説読" * 20)
LETTERS = {
    letter: number
    for number, letter in zip(
        [*range(33, 127), *range(161, 173), *range(174, 256)],
        [chr(n) for n in [*range(33, 127), *range(161, 173), *range(174, 256)]],
        strict=True,
    )
}
LETTERS |= {chr(256 + n): byte for n, byte in enumerate(sorted(set(range(256)) - set(LETTERS.values())))}


def bytes_of(tokenizer, ids):
    """The bytes of tokens by the published table of byte-level BPE, independent of any decoder."""
    return bytes(LETTERS[letter] for token in ids for letter in tokenizer.convert_ids_to_tokens(token))


def parts(ids, spans):
    return {span: [token for token, own in zip(ids, spans, strict=True) if own == span] for span in dict.fromkeys(spans)}


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet="the iof12+ ñ三語😀é", max_size=25), ends=st.booleans())
def test_spans_are_the_shortest_with_equal_bytes_and_have_all_tokens(text, ends):
    ids = encode(text, ONE) + [ONE.eos_token_id] * ends
    read, of_student, of_teacher = (each.tolist() for each in answer_spans(ids, ONE, OTHER))
    assert read == encode(text, OTHER) + [OTHER.eos_token_id] * ends
    assert of_student == sorted(of_student)
    student, teacher = parts(ids, of_student), parts(read, of_teacher)
    assert student.keys() == teacher.keys()
    assert 0 not in student
    for span in student:
        if ends and span == max(student):
            assert (student[span], teacher[span]) == ([ONE.eos_token_id], [OTHER.eos_token_id])
            continue
        whole = bytes_of(ONE, student[span])
        assert whole == bytes_of(OTHER, teacher[span])
        inner = [
            {len(bytes_of(tokenizer, tokens[:count])) for count in range(1, len(tokens))}
            for tokenizer, tokens in ((ONE, student[span]), (OTHER, teacher[span]))
        ]
        assert not inner[0] & inner[1]


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="the iof12+ ñ三語😀é", max_size=25))
def test_with_equal_tokenizers_each_token_is_a_span(text):
    ids = encode(text, ONE)
    read, of_student, of_teacher = answer_spans(ids, ONE, ONE)
    assert read.tolist() == ids
    assert of_student.tolist() == of_teacher.tolist() == [*range(1, len(ids) + 1)]


def test_both_tokenizers_divide_a_character_of_the_tests_in_different_places():
    assert [len(bytes_of(ONE, [token])) for token in encode("語", ONE)] == [1, 1, 1]
    assert [len(bytes_of(OTHER, [token])) for token in encode("語", OTHER)] == [2, 1]


def test_invalid_utf8_and_what_follows_it_is_in_no_span():
    face = encode("🤖", ONE)
    assert len(face) > 1
    ids = [*encode("the", ONE), *face[:-1], *encode(" thing", ONE)]
    _, of_student, _ = answer_spans(ids, ONE, OTHER)
    assert of_student[: len(encode("the", ONE))].min() > 0
    assert of_student[len(encode("the", ONE)) :].eq(0).all()


def test_scores_of_spans_are_the_sums_over_the_tokens_of_the_teacher():
    of_student, of_teacher = (
        torch.tensor([[0, 1, 1, 2, 0], [0, 0, 0, 0, 0]]),
        torch.tensor([[0, 0, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0]]),
    )
    scores = torch.tensor([[0.0, -9, -1, -2, -4, -8], [0, -1, -1, 0, 0, 0]])
    moved = TeacherRows(rows=BatchedDataDict(), spans=(of_student, of_teacher)).aligned(scores)
    assert moved.tolist() == [[0, -1, -1, -14, 0], [0, 0, 0, 0, 0]]


def loss_of(data, spans=None, logprobs=None, *, on_policy=True):
    loss = DistillationLossFn(DistillationLossConfig(divergence="reverse_kl", topk=None))
    loss.on_policy = on_policy
    rows = BatchedDataDict(data if spans is None else {**data, "teacher_spans": spans})
    value, metrics = loss(logprobs, rows, torch.tensor(2.0), data["token_mask"].sum())
    [gradient] = torch.autograd.grad(value, logprobs)
    return value.detach(), gradient, metrics


@pytest.mark.parametrize("on_policy", [True, False])
def test_spans_of_single_tokens_are_the_sampled_form_bit_for_bit(on_policy):
    torch.manual_seed(0)
    logprobs = (-3 * torch.rand(2, 6)).requires_grad_()
    mask = torch.tensor([[0.0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0]])
    data = {"token_mask": mask, "sample_mask": torch.ones(2), "teacher_logprobs": -3 * torch.rand(2, 6)}
    data["prev_logprobs"] = logprobs.detach() + 0.1 * torch.randn(2, 6)
    spans = (mask.cumsum(-1) * mask).long()
    value, gradient, metrics = loss_of(data, logprobs=logprobs, on_policy=on_policy)
    again, same_gradient, with_spans = loss_of(data, spans, logprobs, on_policy=on_policy)
    assert again.equal(value)
    assert same_gradient.equal(gradient)
    assert with_spans["distillation/kl_sampled"].equal(metrics["distillation/kl_sampled"])
    assert with_spans["distillation/aligned_frac"] == 1


def test_each_token_of_a_span_has_the_log_ratio_of_the_span_as_its_advantage():
    torch.manual_seed(1)
    logprobs = (-3 * torch.rand(1, 7)).requires_grad_()
    mask = torch.tensor([[0.0, 1, 1, 1, 1, 1, 1]])
    spans, teacher = torch.tensor([[0, 1, 1, 2, 3, 3, 0]]), {1: -2.0, 2: -0.5, 3: -4.0}
    scores = torch.tensor([[teacher.get(int(span), 0.0) for span in spans[0]]])
    data = {"token_mask": mask, "sample_mask": torch.ones(1), "teacher_logprobs": scores}
    _, gradient, metrics = loss_of(data, spans, logprobs)
    values, total = logprobs.detach()[0].tolist(), 0.0
    for token, span in enumerate(spans[0].tolist()):
        own = math.fsum(value for value, other in zip(values, spans[0].tolist(), strict=True) if other == span)
        expected = -(teacher[span] - own) / 6 if span else 0.0
        assert float(gradient[0, token]) == pytest.approx(expected, abs=1e-6)
    for span, score in teacher.items():
        total += math.fsum(value for value, other in zip(values, spans[0].tolist(), strict=True) if other == span) - score
    assert float(metrics["distillation/kl_sampled"]) == pytest.approx(total / 6, abs=1e-6)
    assert float(metrics["distillation/aligned_frac"]) == pytest.approx(5 / 6)


def trained(folder, name, teacher, **distillation):
    model = {"backend": "hf", "model_name": str(ADDITION), "max_total_sequence_length": 24}
    config = {
        "distillation": {"num_prompts_per_step": 8, "max_num_steps": 2, "max_rollout_turns": 1, **distillation},
        "loss_fn": {"divergence": "reverse_kl", "topk": None},
        "policy": {**model, "generation": {"backend": "hf", "max_new_tokens": 5}},
        "teacher": {"backend": "hf", "max_total_sequence_length": 64, **teacher},
        "data": {"train": {"dataset_name": "arithmetic", "num_samples": 16}},
        "cluster": {"backend": "in_process"},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(folder / "runs"), "run_name": name},
    }
    (folder / f"{name}.json").write_text(json.dumps(config))
    train(folder / f"{name}.json", console=False)
    steps = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in step.items() if key.startswith(("distillation/", "loss", "grad"))} for step in steps]


def test_a_run_with_the_same_tokens_is_that_of_a_teacher_with_the_policys_tokenizer(tmp_path):
    teacher = {"model_name": str(ADDITION)}
    changes = {"teacher_prompt": "1{question}"}
    plain, own = (
        trained(tmp_path, "plain", teacher, **changes),
        trained(tmp_path, "own", teacher, teacher_tokenizer="own", **changes),
    )
    for one, other in zip(plain, own, strict=True):
        assert other.pop("distillation/aligned_frac") == pytest.approx(1)
        assert other == pytest.approx(one, abs=1e-6)
    assert plain[0]["distillation/kl_sampled"] != 0


def test_a_teacher_reads_the_text_in_its_own_tokens(tmp_path):
    first, second = trained(tmp_path, "tools", {"model_name": str(EXAMPLES / "tools" / "model")}, teacher_tokenizer="own")
    for step in (first, second):
        assert 0.2 < step["distillation/aligned_frac"] <= 1
        assert step["distillation/kl_sampled"] > 0
        assert step["grad_norm"] > 0
