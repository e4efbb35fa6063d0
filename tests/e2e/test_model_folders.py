"""Models in the forms in which people publish them are trained, resumed, exported, and loaded again."""

from __future__ import annotations

import json

import model_folders
import pytest
import torch
from e2e_runs import metrics_of
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_backends_hf import HuggingFaceGeneration
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import UserError
from rl_train.launch.train import train
from rl_train.run_folders.convert import convert

pytestmark = pytest.mark.slow

REFUSED = {"invalid generation config": "num_return_sequences"}
"""Forms that Transformers cannot load, and what the error names."""
SFT = {"sft": {"global_batch_size": 2}}
GRPO = {"grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2}, "env": {"arithmetic": {"num_workers": 1}}}


def run(folder, name, algorithm, data, *, steps, model):
    """Train for `steps` steps in all, from the last checkpoint if there is one; returns the folder of that step."""
    [(key, section), *rest] = algorithm.items()
    config = {
        key: {**section, "max_num_steps": steps},
        **dict(rest),
        "policy": {
            "backend": "hf",
            "model_name": str(model),
            "max_total_sequence_length": 64,
            "optimizer": {"kwargs": {"lr": 1.0e-3}},
            **({"generation": {"backend": "hf", "max_new_tokens": 4}} if key == "grpo" else {}),
        },
        "data": {"train": data},
        "cluster": {"backend": "in_process"},
        "checkpointing": {"save_period": 1, "keep_latest_k": 1},
        "logger": {"log_dir": str(folder / "runs")},
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    train(path, resume="auto", console=False)
    assert max(metrics_of(folder, name)) == steps
    [step] = (folder / "runs" / name / "checkpoints").glob(f"step_*{steps}")
    return step


@pytest.mark.parametrize("form", model_folders.FORMS)
def test_each_form_is_trained_resumed_exported_and_loaded_again(tmp_path, form):
    model = model_folders.make(tmp_path / "model", form)
    talk = [{"role": "user", "content": "a 12 b"}, {"role": "assistant", "content": "46"}]
    (tmp_path / "talks.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 4)
    talks = {"dataset_name": "jsonl", "path": str(tmp_path / "talks.jsonl"), "input_key": "messages", "output_key": None}
    if form in REFUSED:
        with pytest.raises(UserError, match=REFUSED[form]):
            run(tmp_path, "sft", SFT, talks, steps=1, model=model)
        return
    for steps in (1, 2):
        trained = run(tmp_path, "sft", SFT, talks, steps=steps, model=model)
    exported = tmp_path / "exported"
    convert(trained, exported, to="hf")
    for steps in (1, 2):
        run(tmp_path, "grpo", GRPO, {"dataset_name": "arithmetic", "num_samples": 8}, steps=steps, model=exported)
    original, plain = Tokenizer.from_file(str(model / "tokenizer.json")), AutoTokenizer.from_pretrained(exported)
    assert Tokenizer.from_file(str(exported / "tokenizer.json")).encode("a 12 b").ids == original.encode("a 12 b").ids
    loaded, report = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(report.values())
    assert loaded.config.tie_word_embeddings == json.loads((model / "config.json").read_text())["tie_word_embeddings"]
    prompt = torch.tensor([original.encode("a 12 b").ids])
    rows = BatchedDataDict(input_ids=prompt, input_lengths=torch.tensor([prompt.shape[1]]))
    output = HuggingFaceGeneration(model_name=str(exported), max_new_tokens=4).generate(rows, greedy=True)["output_ids"]
    expected = loaded.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=plain.pad_token_id)
    assert output[0].tolist() == expected[0, : output.shape[1]].tolist()
