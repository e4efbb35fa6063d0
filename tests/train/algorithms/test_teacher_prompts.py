"""A teacher with its own prompt scores the same sampled tokens: compared with plain Transformers and a loop over rows."""

import json
from types import SimpleNamespace

import model_folders
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from rl_backends_hf import HuggingFacePolicy
from rl_core.data.tokenizer import load_tokenizer
from rl_core.errors import ConfigError, DataError
from rl_train.algorithms import DistillationLossFn
from rl_train.algorithms.losses.config import DistillationLossConfig
from rl_train.config.algorithm import RuntimeNeeds, TeacherPrompt
from rl_train.data.messages import get_formatted_message_log
from rl_train.data.row_sections import OnTooLong
from rl_train.launch.train import train
from rl_train.metrics.measured import Recorder
from rl_train.rollouts.teacher_rows import TeacherPrompts, rows_of_teacher
from rl_train.rollouts.trajectory import Trajectory, to_batch
from rl_train.step import score

TEMPLATE = "{question} The answer is {expected_answer}. {note}"
NOTES = ("", "12 + 34", "a small model that learned to add, once upon a time")
ANSWERS = ("46", "The answer is 46.", "two numbers")
# Log-probabilities of the order of 5 nats, from float32 logits: another order of the sums changes them by about 1e-6.
CLOSE = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    return model_folders.make(tmp_path_factory.mktemp("models") / "student")


@pytest.fixture(scope="module")
def other(tmp_path_factory, folder):
    """Another model with the same tokenizer."""
    torch.manual_seed(1)
    made = model_folders.make(tmp_path_factory.mktemp("models") / "teacher")
    model = AutoModelForCausalLM.from_pretrained(made)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(str(folder))


def message(role, content, tokenizer, **more):
    ids = torch.tensor(tokenizer(content, add_special_tokens=False)["input_ids"], dtype=torch.int64)
    return {"role": role, "content": content, "token_ids": ids, **more}


def sampled(content, tokenizer, turn=1):
    made = message("assistant", content, tokenizer, weight_version=0, turn=turn, token_versions=None)
    return {**made, "generation_logprobs": torch.zeros(len(made["token_ids"]))}


def rollouts(tokenizer, answers=ANSWERS, notes=NOTES, *, turns=1, group_size=1):
    """One rollout for each answer; with several turns, the result of a tool follows each answer but the last."""
    made = []
    for number, (answer, note) in enumerate(zip(answers, notes, strict=True)):
        prompt = [{"role": "system", "content": "add"}, {"role": "user", "content": f"What is {number} + 34?"}]
        log = get_formatted_message_log(prompt, tokenizer, add_generation_prompt=True, trained=())
        log.append(sampled(answer, tokenizer))
        for turn in range(2, turns + 1):
            log += [message("tool", f"= {turn}", tokenizer), sampled(answer, tokenizer, turn)]
        made.append(
            Trajectory(
                message_log=log,
                metadata={"expected_answer": "46", "note": note},
                task_name="default",
                group_id=number // group_size,
                index=number,
                ordinal=number // group_size,
                sample=number % group_size,
                reward=float(number),
                feedback=f"feedback {number}",
                turns=turns,
                done=True,
            )
        )
    return made


def prompts_of(tokenizer, template=TEMPLATE, *, function=None, max_length=512, on_too_long=OnTooLong.DROP):
    key = "teacher_prompt" if function is None else "teacher_prompt_fn"
    prompt = TeacherPrompt(key=key, template=None if function else template, function=function)
    return TeacherPrompts(prompt, algorithm="distillation", tokenizer=tokenizer, max_length=max_length, on_too_long=on_too_long)


def run_of(student, teacher, prompts, loss_fn):
    """What `score` reads of a run."""
    algorithm = SimpleNamespace(is_on_policy=lambda _: True, runtime_needs=RuntimeNeeds(teaches_itself=True))
    return SimpleNamespace(
        policy=student,
        teacher=teacher,
        teacher_prompts=prompts,
        loss_fn=loss_fn,
        config=SimpleNamespace(loss_fn=loss_fn.config, algorithm=algorithm),
        metrics=Recorder(),
        timed=Recorder().timed,
        free_memory_for=lambda _: None,
    )


def expected_prompt(rollout, tokenizer):
    """The tokens of the teacher's prompt, rendered by Transformers alone."""
    note, question = rollout.metadata["note"], rollout.message_log[1]["content"]
    messages = [
        {"role": "system", "content": "add"},
        {"role": "user", "content": f"{question} The answer is 46. {note}"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def plain_logprobs(model, prompt, rest):
    """[len(rest), V] of the tokens after a prompt, from one row without padding."""
    ids = torch.tensor([[*prompt, *rest]])
    return torch.log_softmax(model(input_ids=ids).logits[0].float(), -1)[len(prompt) - 1 : -1]


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("batching", [{"logprob_batch_size": 2}, {"sequence_packing": {"enabled": True}}])
@pytest.mark.parametrize("topk", [None, 6])
def test_a_teacher_scores_sampled_tokens_after_its_own_prompt_as_plain_transformers_does(
    folder, other, tokenizer, turns, batching, topk
):
    made = rollouts(tokenizer, turns=turns)
    batch = to_batch(made)
    settings = {"divergence": "reverse_kl"} if topk is None else {}
    loss_fn = DistillationLossFn(DistillationLossConfig(topk=topk, **settings))
    teacher = HuggingFacePolicy(str(other), frozen=True, max_total_sequence_length=512, **batching)
    score(run_of(teacher, teacher, prompts_of(tokenizer), loss_fn), batch)
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    for row, rollout in enumerate(made):
        start = sum(len(each["token_ids"]) for each in rollout.message_log[:2])
        rest = torch.cat([each["token_ids"] for each in rollout.message_log[2:]])
        with torch.no_grad():
            wanted = plain_logprobs(model, expected_prompt(rollout, tokenizer), rest.tolist())
        end = start + len(rest)
        if topk is None:
            found = batch["teacher_logprobs"][row]
            torch.testing.assert_close(found[start:end], wanted.gather(1, rest[:, None])[:, 0], **CLOSE)
        else:
            found = batch["teacher_topk_logprobs"][row]
            torch.testing.assert_close(found[start:end], wanted.topk(topk).values, **CLOSE)
            of_ids = wanted.gather(1, batch["teacher_topk_token_ids"][row, start:end])
            torch.testing.assert_close(found[start:end], of_ids, **CLOSE)
        assert not found[:start].any()
        assert not found[end:].any()


def test_the_gradient_is_that_of_a_loop_over_rows_in_plain_transformers(folder, other, tokenizer):
    made = rollouts(tokenizer)
    batch = to_batch(made)
    loss_fn = DistillationLossFn(DistillationLossConfig(topk=6, beyond_topk="renormalize"))
    student = HuggingFacePolicy(
        str(folder),
        max_total_sequence_length=512,
        train_micro_batch_size=2,
        max_grad_norm=None,
        optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}},
    )
    teacher = HuggingFacePolicy(str(other), frozen=True, max_total_sequence_length=512)
    score(run_of(student, teacher, prompts_of(tokenizer), loss_fn), batch)
    loss = student.train(batch, loss_fn)["loss"]

    own, theirs = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (folder, other))
    divergences = []
    for rollout in made:
        prompt = torch.cat([each["token_ids"] for each in rollout.message_log[:2]]).tolist()
        answer = rollout.message_log[2]["token_ids"].tolist()
        with torch.no_grad():
            p, ids = plain_logprobs(theirs, expected_prompt(rollout, tokenizer), answer).topk(6)
            p = p.log_softmax(-1)
        q = plain_logprobs(own, prompt, answer).gather(1, ids).log_softmax(-1)
        divergences += list((p.exp() * (p - q)).sum(-1))
    plain = torch.stack(divergences).mean()
    assert loss == pytest.approx(float(plain.detach()), abs=1e-5)
    plain.backward()
    before = {name: value.detach().clone() for name, value in own.named_parameters()}
    after = dict(student.group._worker.model.model.named_parameters())
    largest = max(float(value.grad.abs().max()) for _, value in own.named_parameters())
    for name, value in own.named_parameters():
        # The difference of weights has their float32 rounding, about 1e-7, in addition to that of the gradient.
        torch.testing.assert_close(before[name] - after[name], value.grad, rtol=1e-3, atol=1e-4 * largest + 1e-6)


@settings(max_examples=40, deadline=None)
@given(
    answers=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    lengths=st.lists(st.integers(0, 9), min_size=5, max_size=5),
    turns=st.integers(1, 3),
)
def test_scores_of_any_rows_are_moved_to_the_positions_of_their_tokens(tokenizer, answers, lengths, turns):
    made = rollouts(tokenizer, ["4" * n for n in answers], ["+ " * n for n in lengths[: len(answers)]], turns=turns)
    rows = to_batch(made)
    seen = rows_of_teacher(rows, prompts_of(tokenizer))
    first = rows["token_mask"].argmax(1)
    position = torch.arange(rows["input_ids"].shape[1])
    is_rest = (position >= first[:, None]) & (position < rows["input_lengths"][:, None])
    # With each token as its own score, moving them back gives the row after the prompt.
    assert torch.equal(seen.aligned(seen.rows["input_ids"]), rows["input_ids"] * is_rest)
    several = torch.stack([seen.rows["input_ids"], -seen.rows["input_ids"]], dim=-1)
    assert torch.equal(seen.aligned(several)[..., 1], -rows["input_ids"] * is_rest)
    for row, rollout in enumerate(made):
        prompt = expected_prompt(rollout, tokenizer)
        assert seen.rows["input_ids"][row, : len(prompt)].tolist() == prompt
        assert seen.rows["input_lengths"][row] == len(prompt) + is_rest[row].sum()


def test_rows_that_are_too_long_for_the_teacher_are_masked_and_counted_or_end_the_run(folder, other, tokenizer):
    made = rollouts(tokenizer)
    wanted = [len(expected_prompt(each, tokenizer)) + len(each.message_log[2]["token_ids"]) for each in made]
    limit = sorted(wanted)[-1] - 1
    batch = to_batch(made)
    loss_fn = DistillationLossFn(DistillationLossConfig(topk=4))
    teacher = HuggingFacePolicy(str(other), frozen=True, max_total_sequence_length=limit)
    run = run_of(teacher, teacher, prompts_of(tokenizer, max_length=limit), loss_fn)
    score(run, batch)
    assert batch["sample_mask"].tolist() == [float(length <= limit) for length in wanted]
    assert run.metrics.peek()["distillation/too_long_rows"] == 1
    strict = prompts_of(tokenizer, max_length=limit, on_too_long=OnTooLong.ERROR)
    with pytest.raises(ConfigError, match=rf"{limit + 1} tokens, but {limit} are allowed") as refused:
        rows_of_teacher(to_batch(made), strict)
    assert (refused.value.key, refused.value.exit_code) == ("distillation.teacher_prompt", 2)


def demonstration(row):
    """As SDPO: an answer of the group with a higher reward, and the feedback."""
    best = max(row["group"], key=lambda sample: sample["reward"])
    return f"{row['question']} Solution: {best['completion']} Yours: {row['completion']} {row['feedback']}"


def whole_prompt(row):
    return [*row["messages"], {"role": "assistant", "content": row["metadata"]["note"]}, {"role": "user", "content": "again"}]


def no_prompt(row):
    return 3


def test_a_function_sees_the_answers_of_its_group_and_the_feedback_of_the_environment(tokenizer):
    made = rollouts(tokenizer, ("a", "b", "12", "34"), ("",) * 4, group_size=2)
    seen = rows_of_teacher(to_batch(made), prompts_of(tokenizer, function=f"{__name__}:demonstration")).rows
    texts = [
        tokenizer.decode(row[:length]) for row, length in zip(seen["input_ids"], seen["input_lengths"].tolist(), strict=True)
    ]
    assert "What is 0 + 34? Solution: b Yours: a feedback 0<|im_end|>" in texts[0]
    assert "What is 3 + 34? Solution: 34 Yours: 34 feedback 3<|im_end|>" in texts[3]
    assert texts[0].endswith("<|im_start|>assistant\na")


def test_a_function_may_return_all_messages_and_nothing_else(tokenizer):
    batch = to_batch(rollouts(tokenizer))
    seen = rows_of_teacher(batch, prompts_of(tokenizer, function=f"{__name__}:whole_prompt")).rows
    assert "<|im_start|>assistant\n12 + 34<|im_end|>\n<|im_start|>user\nagain<|im_end|>" in tokenizer.decode(
        seen["input_ids"][1]
    )
    with pytest.raises(DataError, match="the result of no_prompt is neither a text nor a list of messages") as refused:
        rows_of_teacher(batch, prompts_of(tokenizer, function=f"{__name__}:no_prompt"))
    assert refused.value.key == "distillation.teacher_prompt_fn"


def test_images_are_refused_because_the_teacher_would_not_see_them(tokenizer):
    batch = to_batch(rollouts(tokenizer))
    batch["images"] = [None, ["an image"], None]
    with pytest.raises(DataError, match="A row has images"):
        rows_of_teacher(batch, prompts_of(tokenizer))


def padded(folder, path, *, rows):
    """A model whose LM head has further rows, which are the most likely ones, and the tokenizer of the other."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    head = model.get_output_embeddings().weight.detach().clone()
    model.resize_token_embeddings(len(head) + rows)
    with torch.no_grad():
        model.get_output_embeddings().weight[len(head) :] = head.mean(0) + 4 * head[:rows]
    model.save_pretrained(path)
    for file in folder.glob("*token*"):
        (path / file.name).write_bytes(file.read_bytes())
    for file in folder.glob("*.jinja"):
        (path / file.name).write_bytes(file.read_bytes())
    return path


@pytest.mark.parametrize("topk", [None, 6])
def test_rows_of_a_teachers_head_without_a_token_have_probability_zero(other, tokenizer, tmp_path, topk):
    larger = padded(other, tmp_path / "larger", rows=8)
    batch = to_batch(rollouts(tokenizer))
    model = AutoModelForCausalLM.from_pretrained(larger, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits
    assert (logits[:, 5:].argmax(-1) >= len(tokenizer)).any()
    wanted = torch.log_softmax(logits[..., : len(tokenizer)], -1)[:, :-1]
    teacher = HuggingFacePolicy(str(larger), frozen=True, vocab_size=len(tokenizer))
    valid = torch.arange(1, batch["input_ids"].shape[1]) < batch["input_lengths"][:, None]
    if topk is None:
        found = teacher.get_logprobs(batch)["logprobs"][:, 1:]
        wanted = wanted.gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    else:
        scores = teacher.get_topk_logprobs(batch, topk)
        assert scores["topk_token_ids"].max() < len(tokenizer)
        found, wanted = scores["topk_logprobs"][:, 1:], wanted.topk(topk).values
    torch.testing.assert_close(found[valid], wanted[valid], **CLOSE)


def test_a_run_uses_the_rows_that_teacher_and_policy_have_in_common(folder, other, tmp_path):
    larger = padded(other, tmp_path / "larger", rows=8)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"question": f"{n} + 1", "expected_answer": "2"}) + "\n" for n in range(8)))
    config = {
        "distillation": {
            "num_prompts_per_step": 4,
            "max_num_steps": 1,
            "teacher_prompt": "{question} {expected_answer}",
        },
        "loss_fn": {"topk": 16},
        "policy": {
            "backend": "hf",
            "model_name": str(folder),
            "max_total_sequence_length": 64,
            "generation": {"backend": "hf", "max_new_tokens": 4},
        },
        "teacher": {"backend": "hf", "model_name": str(larger), "max_total_sequence_length": 80},
        "data": {"train": {"dataset_name": "jsonl", "path": str(data)}},
        "cluster": {"backend": "in_process"},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(tmp_path / "runs")},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    train(tmp_path / "run.yaml", console=False)
    [metrics] = map(json.loads, (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines())
    assert metrics["distillation/kl_forward"] > 0
    assert metrics["distillation/too_long_rows"] == 0
