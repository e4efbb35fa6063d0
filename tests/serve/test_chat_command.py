"""`rlcore chat` with redirected input and in a terminal."""

import io
import json
from functools import partial
from pathlib import Path

import pytest

from rl_serve import served_model, terminal
from rl_serve.chat_format import ChatFormat
from rl_train.launch.train import train
from rl_train.metrics.progress import reported_start

MODEL = Path(__file__).parents[2] / "examples/addition/model"


@pytest.fixture
def chat(rlcore, monkeypatch):
    def call(*lines, arguments=(MODEL, "--backend", "hf", "--temperature", "0"), interactive=False):
        given = io.StringIO("".join(f"{line}\n" for line in lines))
        given.isatty = lambda: interactive
        monkeypatch.setattr("sys.stdin", given)
        return rlcore("chat", *arguments)

    return call


def test_redirected_input_gets_the_answers_only(chat):
    assert chat("12+34=", "/reset", "", "12+34=", "/exit", "2+2=") == (0, "46\n46\n")


def test_greedy_is_temperature_0(chat):
    assert chat("12+34=", arguments=(MODEL, "--backend", "hf", "--greedy")) == (0, "46\n")
    code, said = chat("12+34=", arguments=(MODEL, "--backend", "hf", "--greedy", "--temperature", "0.5"))
    assert (code, "Remove one of them" in said) == (2, True)


def test_a_run_that_was_trained_without_an_engine_gets_one_for_longer_conversations(chat, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "12+34=", "response": "46"}) + "\n")
    config = {
        "sft": {"max_num_steps": 1, "global_batch_size": 1},
        "policy": {"backend": "hf", "model_name": str(MODEL), "max_total_sequence_length": 12},
        "data": {
            "train": {
                "dataset_name": "jsonl",
                "path": str(tmp_path / "rows.jsonl"),
                "response_key": "response",
                "output_key": None,
            }
        },
        "checkpointing": {"save_period": 1},
        "logger": {"log_dir": str(tmp_path / "runs"), "run_name": "sft"},
        "cluster": {"backend": "in_process"},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    run = train(tmp_path / "config.yaml", console=False).folder
    assert chat("12+34=", "0000000000000+1=", arguments=(run, "--temperature", "0"))[0] == 0
    assert chat("12+34=", arguments=(run, "policy.generation.top_k=1"))[0] == 0
    code, said = chat("12+34=", arguments=(run, "policy.generation.max_new_tokens=1000"))
    assert (code, "1000 leaves no tokens for a prompt" in said) == (2, True), "what the user gives replaces the default"


def test_a_conversation_with_a_run_may_be_longer_than_the_rows_of_its_training(chat, tmp_path):
    config = {
        "grpo": {"max_num_steps": 1, "num_prompts_per_step": 2, "num_generations_per_prompt": 2},
        "policy": {
            "backend": "hf",
            "model_name": str(MODEL),
            "max_total_sequence_length": 16,
            "generation": {"backend": "hf", "max_new_tokens": 4},
        },
        "data": {"train": {"dataset_name": "arithmetic", "num_samples": 4}},
        "env": {"arithmetic": {}},
        "checkpointing": {"save_period": 1},
        "logger": {"log_dir": str(tmp_path / "runs"), "run_name": "grpo"},
        "cluster": {"backend": "in_process"},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    run = train(tmp_path / "config.yaml", console=False).folder
    assert chat("0000000000000+1=" * 2, arguments=(run, "--greedy"))[0] == 0
    own = "policy.max_total_sequence_length=16"
    code, said = chat("0000000000000+1=", arguments=(run, "--greedy", own))
    assert (code, said.startswith("error: The prompt has 16 tokens, which leave no room")) == (2, True), said
    assert "context has 16 tokens. Shorten the message, or begin a new conversation (/reset)." in said
    code, said = chat("12+34=", arguments=(run, "--max-tokens", "12", own))
    assert (code, "The prompt has 6 tokens and --max-tokens is 12, but the model's context has 16" in said) == (2, True), said


@pytest.fixture
def trained(tmp_path):
    """Trains on sums without their sign of equality, which the prompt adds; returns the run folder."""

    def make(model=MODEL, **keys):
        (tmp_path / "sum.yaml").write_text("user: '{question}='\n")
        (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "12+34", "expected_answer": "46"}) + "\n")
        rows = {"dataset_name": "jsonl", "path": str(tmp_path / "rows.jsonl"), "task_name": "arithmetic"}
        config = {
            "grpo": {"max_num_steps": 1, "num_prompts_per_step": 1, "num_generations_per_prompt": 2},
            "policy": {
                "backend": "hf",
                "model_name": str(model),
                "max_total_sequence_length": 60,
                "generation": {"backend": "hf", "max_new_tokens": 4},
            },
            "data": {"train": rows, **keys},
            "env": {"arithmetic": {}},
            "checkpointing": {"save_period": 1},
            "logger": {"log_dir": str(tmp_path / "runs"), "run_name": "grpo"},
            "cluster": {"backend": "in_process"},
        }
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        return train(tmp_path / "config.yaml", console=False).folder

    return make


def test_a_run_is_asked_as_in_training_unless_that_is_turned_off(chat, trained, tmp_path):
    file = str(tmp_path / "sum.yaml")
    run = trained(prompt={"prompt_config": file})
    code, said = chat("12+34", "12+34=", arguments=(run, "--greedy"))
    assert code == 0
    assert said.startswith("46\n")
    assert f"as in training: prompt_config '{file}' (without: --as-is)" in said
    code, said = chat("12+34=", arguments=(run, "--greedy", "--as-is"))
    assert (code, said) == (0, "46\n")


def test_the_system_message_of_the_run_is_replaced_by_an_option(chat, trained, monkeypatch):
    run, asked = trained(model=MODEL.parents[1] / "tools/model", prompt={"system_prompt": "Add."}), []
    prompt = ChatFormat.prompt
    monkeypatch.setattr(
        ChatFormat, "prompt", lambda self, messages, *images: asked.append(messages[0]) or prompt(self, messages, *images)
    )
    for option in ((), ("--system", "Calculate."), ("--as-is",)):
        assert chat("1", arguments=(run, "--max-tokens", "1", *option))[0] == 0
    assert [message["content"] for message in asked] == ["Add.", "Calculate.", "1"]


def test_an_answer_that_is_cut_says_so_and_how_to_get_more(chat, trained):
    run = trained()
    code, said = chat("12+34=", "/reset", "12+34=", arguments=(run, "--greedy", "--max-tokens", "1"))
    cut = "(cut; number of tokens: 1. --max-tokens N allows more, up to the model's context)"
    assert (code, sorted(said.splitlines())) == (0, sorted(["4", cut] * 2))


def test_a_model_that_loads_for_long_is_reported_apart_from_the_answers(chat, monkeypatch):
    monkeypatch.setattr(served_model, "reported_start", partial(reported_start, every_s=0.001))
    code, said = chat("12+34=")
    assert code == 0
    answers, *reports = said.splitlines()
    assert answers == "46"
    assert reports
    assert all(line.startswith("loading model: ") for line in reports)


def test_in_a_terminal_mistakes_are_reported_and_the_conversation_continues(chat):
    code, said = chat("/quit", "1" * 200, "12+34=", interactive=True)
    assert code == 0
    assert "error: There is no command /quit: /exit ends the conversation" in said
    assert "error: The prompt has " in said
    assert "46" in said


def test_control_characters_of_a_model_do_not_reach_a_terminal(capsys):
    class Answers:
        cut_at = None

        def answer(self, text, *, on_text):
            on_text("a\n\tb\x1b]0;title\x07\r\x9b2J")

    terminal._answer(Answers(), "1", True)
    assert capsys.readouterr().out == "a\n\tb\ufffd]0;title\ufffd\ufffd\ufffd2J\n"
    terminal._answer(Answers(), "1", False)
    assert "\x1b]0;title" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "arguments", "message"),
    [
        (("/quit",), (MODEL, "--backend", "hf"), "error: There is no command /quit"),
        (("1" * 200,), (MODEL, "--backend", "hf"), "error: The prompt has "),
        ((), (MODEL,), "error: --backend is required"),
        ((), (MODEL, "--backend", "hf", "--max-tokens", "0"), "Invalid value for '--max-tokens'"),
    ],
)
def test_wrong_input_ends_with_exit_code_2_and_the_reason(chat, lines, arguments, message):
    code, said = chat(*lines, arguments=arguments)
    assert code == 2
    assert message in said
