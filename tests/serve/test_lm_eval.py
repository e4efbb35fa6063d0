"""EleutherAI's lm-evaluation-harness against `/v1/completions`, on a task made here: its results equal our own computation.

Skipped unless its command `lm_eval` is on the PATH (`pip install 'lm_eval[api]' transformers`, in a separate environment).
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_serve.sampling import Limits
from rl_serve.serving import create_app

LM_EVAL = shutil.which("lm_eval")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(LM_EVAL is None, reason="lm_eval is not on the PATH")]
MODEL = Path(__file__).parents[2] / "examples/addition/model"
TASK = """
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
"""
CHOICES = 'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n'
GENERATED = """doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
"""


def sums(count):
    generator = torch.Generator().manual_seed(4)
    for _ in range(count):
        a, b, shift = torch.randint(1, 50, (3,), generator=generator).tolist()
        choices = [str(a + b), str(a + b + shift), str(a + b + 10), str(shift)]
        answer = int(torch.randint(4, (1,), generator=generator))
        choices[0], choices[answer] = choices[answer], choices[0]
        yield {"question": f"{a}+{b}=", "choices": choices, "answer": answer}


@pytest.fixture
def evaluate(tmp_path, model, engine, serve_http):
    """Runs a task; returns the results, and the samples in the order of the data."""
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in sums(60)))
    port = serve_http(create_app(model, engine, limits=Limits()))

    def run(task, kind, rest):
        (tmp_path / "tasks").mkdir()
        (tmp_path / "tasks/sums.yaml").write_text(TASK.format(task=task, data=data, kind=kind) + rest)
        url = f"http://127.0.0.1:{port}/v1/completions"
        arguments = f"model={model.name},base_url={url},tokenizer={MODEL},tokenizer_backend=huggingface,num_concurrent=4"
        command = [LM_EVAL, "--model", "local-completions", "--model_args", arguments, "--tasks", task, "--batch_size", "8"]
        command += ["--include_path", str(tmp_path / "tasks"), "--output_path", str(tmp_path / "out"), "--log_samples"]
        own = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        ended = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
        [results], [samples] = (list((tmp_path / "out").rglob(f"{kind}_*")) for kind in ("results", "samples"))
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        return json.loads(results.read_text())["results"][task], sorted(lines, key=lambda line: line["doc_id"])

    return run


def test_accuracy_and_log_likelihoods_of_a_multiple_choice_task_are_those_of_transformers(evaluate):
    results, samples = evaluate("sums_choice", "multiple_choice", CHOICES)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    plain = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    right, right_normalized, greedy = [], [], []
    for row, sample in zip(sums(60), samples, strict=True):
        question = tokenizer(row["question"], add_special_tokens=False)["input_ids"]
        scores = []
        for choice, (found, is_greedy) in zip(row["choices"], sample["filtered_resps"], strict=True):
            tokens = question + tokenizer(choice, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logprobs = plain(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)[len(question) - 1 :]
            target = torch.tensor(tokens[len(question) :])
            scores.append(logprobs.gather(1, target.unsqueeze(1)).sum().item())
            assert float(found) == pytest.approx(scores[-1], abs=1e-3)  # a sum of float32 logarithms
            greedy.append((str(is_greedy) == "True", torch.equal(logprobs.argmax(-1), target)))
        right.append(max(range(4), key=scores.__getitem__) == row["answer"])
        normalized = [score / len(choice) for score, choice in zip(scores, row["choices"], strict=True)]
        right_normalized.append(max(range(4), key=normalized.__getitem__) == row["answer"])
    assert all(found == expected for found, expected in greedy)
    assert {expected for _, expected in greedy} == {True, False}
    assert results["acc,none"] == pytest.approx(sum(right) / 60)
    assert results["acc_norm,none"] == pytest.approx(sum(right_normalized) / 60)
    assert 0.3 < results["acc,none"] < 1.0  # otherwise the comparison would show nothing


def test_a_task_that_samples_answers_has_the_exact_matches_of_greedy_decoding(evaluate, client):
    results, samples = evaluate("sums_sampled", "generate_until", GENERATED)
    expected = []
    for row, sample in zip(sums(60), samples, strict=True):
        body = {"prompt": row["question"], "temperature": 0, "max_tokens": 6, "stop": ["\n"]}
        [choice] = client.post("/v1/completions", json=body).json()["choices"]
        assert sample["resps"] == [[choice["text"]]]
        expected.append(choice["text"] == row["choices"][row["answer"]])
    assert results["exact_match,none"] == pytest.approx(sum(expected) / 60)
