"""Rows with images: `rlcore serve` computes with the tensors of the policy, and plain Transformers is the reference."""

import base64
import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import safetensors.torch
import torch
import transformers
import whole_vlms
from openai_servers import ADMIN, KEY, engine_of, prompts, proxy_of, synchronizer, updatable
from whole_vlms import part, png, tiny_vlms

from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.policy import HuggingFacePolicy
from rl_backends_openai.server import _sent_image
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import NotSupportedError
from rl_core.http import HttpError
from rl_train.algorithms.losses import NLLLossFn
from rl_train.config.data_sections import ImagesConfig
from rl_train.data.images import ImageReader
from rl_train.data.messages import images_of
from rl_train.data.processors import prompt_datum

FAMILY = "qwen2_5_vl"
NEW, LENGTH = 6, 256
PICTURES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with its processor."""
    return whole_vlms.write(tmp_path_factory.mktemp("vlm"), FAMILY)


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory):
    """URL of its server, and the folder of weight updates."""
    updates = tmp_path_factory.mktemp("updates")
    with updatable(updates, model=folder, name="vlm", max_new_tokens=NEW) as (url, _):
        yield url, updates


@contextmanager
def connected(served, **keys):
    url, updates = served
    own = {"weight_updates": "rlcore", "admin_key": ADMIN, "refit_folder": str(updates), "model": "vlm", "api": "inference"}
    with engine_of(url, **{**own, "max_model_len": LENGTH, **keys}) as engine:
        yield engine


@pytest.fixture(scope="module")
def addition(tmp_path_factory):
    """URL of the server of a model of text."""
    with updatable(tmp_path_factory.mktemp("updates")) as (url, _):
        yield url


@pytest.fixture(scope="module")
def rows(folder):
    """Prompts without, with one, and with two pictures; the first two have equal tokens and other pictures."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.image_reader = ImageReader(str(folder), ImagesConfig())
    tokens, images = [], []
    for pictures in ([png(1)], [png(2)], [], [png(3), png(1, (64, 40))]):
        message = {"role": "user", "content": [*map(part, pictures), {"type": "text", "text": "What is it?"}]}
        log = prompt_datum({"messages": [message]}, idx=0, tokenizer=tokenizer)["message_log"]
        tokens.append(torch.cat([each["token_ids"] for each in log]).tolist())
        images.append(images_of(log) or None)
    assert tokens[0] == tokens[1]
    return prompts(*tokens, images=images)


def differences(output, images, model):
    """Differences of the sampled tokens' log-probabilities from those of each row alone by the model's own forward pass."""
    columns = {"input_ids": output["output_ids"], "input_lengths": output["unpadded_sequence_lengths"], "images": images}
    with torch.no_grad():
        expected = tiny_vlms.plain_logprobs(model, BatchedDataDict(columns))
    return (output["logprobs"] - expected)[output["logprobs"] != 0].abs()


def test_log_probabilities_are_those_of_plain_transformers_and_pictures_are_not_confused(served, folder, rows):
    with connected(served) as engine:
        assert engine.facts["images"]
        rows = BatchedDataDict({**rows, "sample_seeds": torch.zeros(rows.size, dtype=torch.int64)})
        output = engine.generate(rows)
    # Float32 sums in another order, in the tower as well.
    assert float(differences(output, rows["images"], tiny_vlms.plain(folder)).max()) < 1e-4
    swapped = [rows["images"][1], rows["images"][0], *rows["images"][2:]]
    assert float(differences(output, swapped, tiny_vlms.plain(folder)).max()) > 0.1


def test_after_a_refit_of_the_tower_pictures_are_computed_with_it(served, folder, rows, tmp_path):
    policy = HuggingFacePolicy(config=HFPolicyConfig(model_name=str(folder), max_total_sequence_length=LENGTH))
    try:
        with connected(served) as engine:
            sync = synchronizer(policy, engine, served[1])
            sync.sync()
            before = engine.generate(rows)
            columns = {"input_lengths": torch.tensor([4]), "token_mask": torch.ones(1, 4), "sample_mask": torch.ones(1)}
            policy.train(BatchedDataDict({"input_ids": torch.tensor([[5, 6, 7, 8]]), **columns}), NLLLossFn())
            with torch.no_grad():
                for tensor in policy.group.worker.model.model.model.visual.parameters():
                    tensor.mul_(1.3)
            sync.sync()
            after = engine.generate(rows)
            sync.close()
        policy.save_checkpoint(str(tmp_path / "after"))
    finally:
        policy.shutdown()
    now = tiny_vlms.plain(tmp_path / "after")
    assert float(differences(after, rows["images"], now).max()) < 1e-4
    assert float(differences(before, rows["images"], now).max()) > 0.01
    assert after["weight_version"].tolist() == [1] * rows.size


def test_a_proxy_forwards_images(served, folder, rows):
    url, updates = served
    with proxy_of(url) as proxy, connected((proxy, updates), model="addition") as through, connected(served) as engine:
        assert torch.equal(through.generate(rows, greedy=True)["output_ids"], engine.generate(rows, greedy=True)["output_ids"])


def test_images_that_are_not_those_of_the_prompt_or_the_model_are_refused_by_name_and_the_server_continues(served, rows):
    [image], tokens = rows["images"][0], rows["input_ids"][0, : rows["input_lengths"][0]].tolist()
    right = _sent_image(image)
    broken = {**image.inputs, "pixel_values": torch.full_like(image.inputs["pixel_values"], torch.nan)}
    with_nan = _sent_image(replace(image, inputs=type(image.inputs)(broken), digest=type(image.inputs)(broken).digest()))
    cases = [
        ({"digest": "0" * 32}, f"images[0].tensors have the digest {image.digest}"),
        ({"start": image.start + 1}, "images[0]: An image has"),
        ({"placeholder_id": 5}, "images[0].placeholder_id is 5, and the token for images of vlm is"),
        ({"tensors": "AAAA"}, "images[0].tensors is not a file in the format of safetensors"),
        ({"tensors": "no base64"}, "images[0].tensors is not a file in the format of safetensors"),
        (with_nan, "images[0].tensors have values that are NaN or infinite"),
        ({"path": "x.png"}, "images[0].path: Extra inputs"),
    ]
    with httpx.Client(base_url=served[0], headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:

        def post(images):
            body = {"token_ids": tokens, "images": images, "sampling_params": {"temperature": 0, "max_tokens": 2}}
            return client.post("/inference/v1/generate", json=body)

        whole = post([right])
        assert whole.status_code == 200, whole.text
        for changes, message in cases:
            refused = post([right | changes])
            assert (refused.status_code, message in refused.json()["error"]["message"]) == (400, True), refused.text
        refused = post([right] * 17)
        assert "at most 16 are allowed" in refused.json()["error"]["message"]
        # Tensors that no processor of the model returns fail in the model, without an end of the server.
        for inputs in ({"pixels": torch.zeros(2, 3)}, {**image.inputs, "pixel_values": torch.zeros(3, 5)}):
            inputs = type(image.inputs)(inputs)
            content = base64.b64encode(safetensors.torch.save(dict(inputs))).decode()
            assert post([right | {"tensors": content, "digest": inputs.digest()}]).status_code in (400, 503)
        assert post([right]).json()["choices"] == whole.json()["choices"]


def test_a_server_of_a_text_model_refuses_images_and_the_engine_says_why(addition, rows):
    with engine_of(addition, model="addition", api="inference", max_model_len=LENGTH) as engine:
        assert not engine.facts["images"]
        with pytest.raises(NotSupportedError, match=r"does not report that addition reads images.*vision-language model does"):
            engine.generate(prompts([5] * 10, images=[rows["images"][0]]))
    with httpx.Client(base_url=addition, headers={"Authorization": f"Bearer {KEY}"}) as client:
        body = {"token_ids": [5, 6], "images": [_sent_image(rows["images"][0][0])]}
        refused = client.post("/inference/v1/generate", json=body)
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "addition does not read images.")


def test_rows_with_images_are_refused_with_the_other_endpoints_and_by_the_server_at_other_tokens(served, rows):
    for keys in ({"api": "completions"}, {"api": "chat", "weight_updates": None, "admin_key": None, "refit_folder": None}):
        with connected(served, **keys) as engine, pytest.raises(NotSupportedError, match=r"Set openai_cfg\.api to inference"):
            engine.generate(BatchedDataDict({**rows, "messages": [[]] * rows.size}))
    with connected(served, max_retries=0) as engine, pytest.raises(HttpError, match="An image has"):
        engine.generate(BatchedDataDict({**rows, "images": [[each.moved(1) for each in row or ()] for row in rows["images"]]}))


def config_of(url, **server):
    """GRPO on pictures, with two prompts in a step."""
    return {
        "defaults": str(PICTURES / "grpo_pictures.yaml"),
        "grpo": {
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 4,
            "max_num_steps": 2,
            "val_at_start": False,
            "val_at_end": False,
            "val_period": 0,
        },
        "policy": {
            "generation": {
                "_override_": True,
                "backend": "openai",
                "max_new_tokens": 6,
                "openai_cfg": {"base_url": f"{url}/v1", "model": "vlm", **server},
            }
        },
        "data": {"train": {"size": 16}, "validation": None},
        "checkpointing": {"enabled": False},
    }


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"api": "completions", "weight_updates": "rlcore"}, "openai_cfg.api is completions"),
        ({"api": "inference", "weight_updates": "vllm", "admin_key": None}, "vLLM's own server cannot receive"),
    ],
    ids=["completions", "vllm"],
)
def test_a_run_that_cannot_send_its_images_ends_with_exit_code_2_before_a_server_is_called(
    rlcore, tmp_path, monkeypatch, keys, reason
):
    config = config_of("http://127.0.0.1:1", **{"admin_key": "${oc.env:AN_ADMIN_KEY}", **keys})
    config["policy"]["generation"] |= {"refit_folder": str(tmp_path), "refit_transport": "disk"}
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    monkeypatch.syspath_prepend(PICTURES)
    monkeypatch.setenv("AN_ADMIN_KEY", ADMIN)
    code, output = rlcore("train", tmp_path / "run.yaml", folder=tmp_path)
    said = " ".join(output.split())
    assert code == 2, output
    assert "Rows of the data have images, which policy.generation cannot use" in said
    assert reason in said
    assert "Traceback" not in said


def test_grpo_on_pictures_trains_with_a_server_that_agrees_with_the_policy(rlcore, tmp_path, monkeypatch):
    (tmp_path / "updates").mkdir()
    with updatable(tmp_path / "updates", model=PICTURES / "pictures" / "model", name="vlm", api_keys=()) as (url, _):
        config = config_of(url, api="inference", weight_updates="rlcore", admin_key="${oc.env:AN_ADMIN_KEY}")
        config["policy"]["generation"] |= {"refit_folder": str(tmp_path / "updates"), "refit_transport": "disk"}
        (tmp_path / "run.yaml").write_text(json.dumps(config))
        monkeypatch.syspath_prepend(PICTURES)
        monkeypatch.setenv("AN_ADMIN_KEY", ADMIN)
        code, output = rlcore("train", tmp_path / "run.yaml", "logger.log_dir=runs", "logger.run_name=run", folder=tmp_path)
    assert code == 0, output
    steps = [json.loads(line) for line in (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(step["agreement/mean"] for step in steps) < 1e-5
    assert max(step["refit/canary_error"] for step in steps) < 1e-4
    assert [step["refit/weight_version"] for step in steps] == [0, 1]
