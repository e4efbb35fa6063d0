"""Images in requests, with tiny vision-language models by the Transformers engine; Transformers' own code is the reference."""

import io
import json
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import openai
import pytest
import torch
import transformers
import whole_vlms
from PIL import Image
from starlette.testclient import TestClient
from tiny_processors import own_processor
from whole_vlms import part, png, url

import rl_train.data.images
from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_backends_hf.config import HFPolicyConfig
from rl_core.data.tokenizer import load_tokenizer
from rl_core.interfaces import EnvironmentInterface
from rl_serve.agent_endpoint import AgentEndpoint
from rl_serve.backend import Backend
from rl_serve.chat_format import ChatFormat
from rl_serve.chat_service import ChatService
from rl_serve.conversation import Conversation, PromptFiller
from rl_serve.engine import EngineThread
from rl_serve.errors import ApiError
from rl_serve.sampling import Limits
from rl_serve.served_model import _served, started_model
from rl_serve.serving import create_app, create_proxy_app
from rl_serve.settings import BackendSection, ServedImages, load_chat_settings, split_overrides
from rl_serve.terminal import _talk
from rl_train.agents.driver import AgentDriver
from rl_train.agents.model_server import ServerSettings
from rl_train.agents.session import SessionLimits
from rl_train.config.data_sections import ImagesConfig
from rl_train.data.image_sources import ImageSource
from rl_train.data.images import ImageReader
from rl_train.data.messages import images_of
from rl_train.data.processors import prompt_datum
from rl_train.prompts.templates import load_prompt
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.source import start_rollouts
from rl_train.rollouts.trajectory import SampleStream, to_batch


@pytest.fixture(scope="module", params=whole_vlms.FAMILIES)
def of_each_family(request, tmp_path_factory):
    """The folder of a model, the served model, its engine and a client."""
    with serving(tmp_path_factory.mktemp("vlm"), request.param) as served:
        yield served


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The same of one family."""
    with serving(tmp_path_factory.mktemp("vlm"), "idefics3") as served:
        yield served


@contextmanager
def serving(folder, family):
    whole_vlms.write(folder, family)
    limits = ServedImages(max_images=3, max_megapixels=1, max_file_mib=1)
    options = {"backend": "hf", "overrides": ["policy.generation.max_new_tokens=6"], "name": "vlm", "images": limits}
    with started_model(str(folder), **options) as model:
        engine = EngineThread(model.generation)
        with TestClient(create_app(model, engine, limits=Limits())) as client:
            yield folder, model, engine, client
        engine.close()


def asked(*pictures, text="What is it?"):
    return {"role": "user", "content": [*map(part, pictures), {"type": "text", "text": text}]}


CONVERSATIONS = {
    "no image": [{"role": "user", "content": "What is it?"}],
    "one image": [asked(png(1))],
    "two images": [asked(png(1), png(2, (64, 40)))],
    "images in two turns": [asked(png(1)), {"role": "assistant", "content": "It is red."}, asked(png(3), text="And this?")],
}


def post(client, messages, **body):
    body = {"messages": messages, "temperature": 0, "return_token_ids": True} | body
    return client.post("/v1/chat/completions", json=body)


def choices(client, messages, **body):
    response = post(client, messages, **body)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def in_parts(message):
    content = message["content"]
    return message | {"content": [{"type": "text", "text": content}] if isinstance(content, str) else content}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_prompts_and_greedy_answers_are_those_of_the_models_own_processor_and_generate(of_each_family, name):
    folder, _, _, client = of_each_family
    messages = CONVERSATIONS[name]
    processor = own_processor(folder)
    texts = [[{"type": "image"} if each["type"] == "image_url" else each for each in in_parts(m)["content"]] for m in messages]
    text = processor.apply_chat_template(
        [message | {"content": content} for message, content in zip(messages, texts, strict=True)], add_generation_prompt=True
    )
    urls = [each["image_url"]["url"] for m in messages for each in in_parts(m)["content"] if each["type"] == "image_url"]
    pictures = [Image.open(io.BytesIO(whole_vlms.base64.b64decode(each.partition(",")[2]))) for each in urls]
    inputs = processor(text=[text], images=[pictures] if pictures else None, return_tensors="pt", add_special_tokens=False)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    whole = model.generate(**inputs, do_sample=False, max_new_tokens=6)[0].tolist()
    [choice] = choices(client, messages)
    assert choice["prompt_token_ids"] == inputs["input_ids"][0].tolist()
    assert choice["prompt_token_ids"] + choice["token_ids"] == whole


def test_tokens_and_tensors_are_those_of_a_row_of_training(served, monkeypatch):
    folder, _, engine, client = served
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.image_reader = ImageReader(str(folder), ImagesConfig())
    messages = CONVERSATIONS["images in two turns"]
    datum = prompt_datum({"messages": messages}, idx=0, tokenizer=tokenizer)
    sampled, sample = [], engine.sample
    monkeypatch.setattr(engine, "sample", lambda rows, **options: (sampled.extend(rows), sample(rows, **options))[1])
    choices(client, messages, n=2)
    expected = [(image.start, image.digest) for image in images_of(datum["message_log"])]
    for row in sampled:
        assert row.prompt == torch.cat([message["token_ids"] for message in datum["message_log"]]).tolist()
        assert [(image.start, image.digest) for image in row.images] == expected
    assert len(sampled) == 2


def test_streams_and_several_choices_have_the_same_answers(served):
    client = served[3]
    messages = CONVERSATIONS["two images"]
    [whole] = choices(client, messages)
    for choice in choices(client, messages, n=3):
        assert choice["message"] == whole["message"]
    with client.stream("POST", "/v1/chat/completions", json={"messages": messages, "temperature": 0, "stream": True}) as lines:
        events = [json.loads(line[6:]) for line in lines.iter_lines() if line.startswith("data: {")]
    deltas = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(deltas) == whole["message"]["content"]


def test_equal_tokens_with_other_pictures_have_other_answers(served):
    client = served[3]
    answers = [choices(client, [asked(png(seed))], logprobs=True)[0] for seed in (1, 2)]
    assert answers[0]["prompt_token_ids"] == answers[1]["prompt_token_ids"]
    first, second = (each["logprobs"]["content"][0] for each in answers)
    assert abs(first["logprob"] - second["logprob"]) > 1e-3 or first["token"] != second["token"]


def test_pictures_of_earlier_turns_are_not_decoded_or_processed_again(served, monkeypatch):
    client, passes = served[3], {"decoded": 0, "_result": 0}

    def counted(name, call, *arguments):
        passes[name] += 1
        return call(*arguments)

    for name in passes:
        monkeypatch.setattr(rl_train.data.images, name, partial(counted, name, getattr(rl_train.data.images, name)))
    choices(client, [asked(png(60), png(61))])  # the first row with several pictures asks the processor about them
    passes.update(dict.fromkeys(passes, 0))
    messages, sent = [], 0
    for picture in (png(62), None, png(63), None, png(62)):
        messages.append(asked(*filter(None, [picture])))
        sent += sum(each["type"] == "image_url" for message in messages for each in in_parts(message)["content"])
        [choice] = choices(client, messages)
        messages.append(choice["message"])
    assert sent == 9
    assert passes == {"decoded": 2, "_result": 2}


def test_detail_has_no_effect(served):
    client = served[3]
    parts = [[part(png(1), **fields)] for fields in ({}, {"detail": "low"}, {"detail": "high"})]
    low, auto, high = (choices(client, [{"role": "user", "content": each}])[0]["token_ids"] for each in parts)
    assert low == auto == high


def image(**fields):
    return [{"role": "user", "content": [{"type": "image_url", **fields}]}]


def large(size):
    file = io.BytesIO()
    Image.new("RGB", size).save(file, "PNG")
    return file.getvalue()


REFUSED = {
    "URL of the network": (image(image_url={"url": "https://example.com/1.png"}), "not downloaded"),
    "file of the server": (image(image_url={"url": "/etc/passwd"}), "not downloaded"),
    "file URL": (image(image_url={"url": "file:///etc/passwd"}), "not downloaded"),
    "no URL": (image(image_url={}), r"image_url must be"),
    "URL that is a text": (image(image_url=url(png(1))), r"image_url must be"),
    "detail": (image(image_url={"url": url(png(1)), "detail": "ultra"}), "auto, low, high"),
    "form of Transformers": ([{"role": "user", "content": [{"type": "image", "path": "/etc/passwd"}]}], "must be a string or"),
    "image of the run": (image(image_url={"url": "rlcore-image:00"}), "not downloaded"),
    "answer": (
        [*CONVERSATIONS["one image"], {"role": "assistant", "content": [part(png(1))]}, asked()],
        "messages of the assi",
    ),
    "base64": (image(image_url={"url": "data:image/png;base64,AAA"}), "Image 0.*base64.*invalid"),
    "no picture": (image(image_url={"url": "data:image/png;base64,AAAA"}), "Image 0.*not an image"),
    "second picture": ([asked(png(1), png(1)[:200])], "Image 1 .*(corrupt|truncated)"),
    "too many": ([asked(*[png(1)] * 4)], "4 images: at most 3"),
    "pixels": ([asked(large((1001, 1000)))], "raise images.max_megapixels"),
    "size": ([asked(png(1, (700, 600)))], "raise images.max_file_mib"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_images_get_status_400_with_the_reason(served, name):
    messages, reason = REFUSED[name]
    error = post(served[3], messages).json()["error"]
    assert post(served[3], messages).status_code == 400
    with pytest.raises(ApiError, match=reason):
        raise ApiError(400, error["message"])
    assert error["param"].startswith("messages")


def test_keys_besides_the_url_name_no_file(served):
    client, picture = served[3], part(png(1))
    [right] = choices(client, [{"role": "user", "content": [picture]}])
    for extra in (
        {"path": "/etc/passwd"},
        {"image": "/etc/passwd"},
        {"image_url": picture["image_url"] | {"path": "/etc/hosts"}},
    ):
        [choice] = choices(client, [{"role": "user", "content": [picture | extra]}])
        assert choice["token_ids"] == right["token_ids"]


def test_a_model_of_text_refuses_images(client):
    response = post(client, [asked(png(1))])
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "Messages cannot have images, because addition is a model of text."


def test_an_engine_without_the_capability_refuses_images(served):
    folder = served[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    section = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=None, max_new_tokens=8, backend="vllm")
    component = SimpleNamespace(capabilities=frozenset({"top_logprobs"}))
    found = _served("vlm", SimpleNamespace(facts={}), section, tokenizer, component, str(folder), ServedImages())
    with pytest.raises(ApiError, match=r"backend 'vllm' does not have the capability `images`") as caught:
        ChatFormat(found.tokenizer).with_references([asked(png(1))])
    assert caught.value.status == 400


def test_a_proxy_passes_images_on(served, serve_http):
    _, model, engine, client = served
    backend = Backend(
        BackendSection(port=serve_http(create_app(model, engine, limits=Limits())), host="127.0.0.1"), concurrency=4
    )
    with TestClient(create_proxy_app(backend, name="proxy", limits=Limits())) as proxy:
        for messages in CONVERSATIONS.values():
            assert choices(proxy, messages)[0]["token_ids"] == choices(client, messages)[0]["token_ids"]
        assert "not downloaded" in post(proxy, REFUSED["URL of the network"][0]).json()["error"]["message"]


def test_a_prompt_config_fills_the_text_after_the_images(served, serve_http):
    _, model, engine, client = served
    filler = PromptFiller(load_prompt("generic/math"))
    text = load_prompt("generic/math").fill({"problem": "What is it?"})[0]["content"]
    [right] = choices(client, [asked(png(1), text=text)])
    local = create_app(model, engine, limits=Limits(), service=ChatService(filler))
    backend = Backend(
        BackendSection(port=serve_http(create_app(model, engine, limits=Limits())), host="127.0.0.1"), concurrency=4
    )
    for app in (local, create_proxy_app(backend, name="vlm", limits=Limits(), service=ChatService(filler))):
        with TestClient(app) as filled:
            message = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, part(png(1))]}
            assert choices(filled, [message])[0]["prompt_token_ids"] == right["prompt_token_ids"]


def test_graders_get_references_to_images(served, serve_http, monkeypatch):
    _, model, engine, _ = served
    graded = []

    class Recorder:
        async def grade(self, messages, answer, record):
            graded.append(messages)
            return {}

    monkeypatch.setattr(ChatService, "start_grader", lambda self, name: Recorder())
    backend = Backend(
        BackendSection(port=serve_http(create_app(model, engine, limits=Limits())), host="127.0.0.1"), concurrency=4
    )
    for app in (create_app(model, engine, limits=Limits()), create_proxy_app(backend, name="vlm", limits=Limits())):
        with TestClient(app) as grading:
            choices(grading, [asked(png(1))], expected_answer="4")
    [local], [proxy] = graded
    assert [*local["content"][0]] == ["type", "digest", "width", "height"]
    assert proxy["content"] == "[image]What is it?"


def test_a_chat_in_the_terminal_shows_pictures(served, tmp_path, capsys, monkeypatch):
    _, model, engine, client = served
    (tmp_path / "1.png").write_bytes(png(1))
    lines = io.StringIO(f"/image {tmp_path}/1.png\nWhat is it?\nAnd now?\n")
    monkeypatch.setattr("sys.stdin", lines)
    _talk(Conversation(model, engine, temperature=0), "vlm")
    [first] = choices(client, [asked(png(1))])
    said = {"role": "assistant", "content": first["message"]["content"]}
    [second] = choices(client, [asked(png(1)), said, {"role": "user", "content": "And now?"}])
    assert capsys.readouterr().out == f"{first['message']['content']}\n{second['message']['content']}\n"
    with pytest.raises(ApiError, match=r"missing.png' cannot be read"):
        Conversation(model, engine).attach(str(tmp_path / "missing.png"))


def test_bodies_with_images_may_be_larger():
    assert Limits().with_body(None, has_images=False).max_body_bytes == 4 << 20
    assert Limits().with_body(None, has_images=True).max_body_bytes == 20 << 20
    assert Limits().with_body(64, has_images=False).max_body_bytes == 64 << 20


def test_limits_of_images_are_settings_of_the_server():
    of_settings, others = split_overrides(["images.max_images=2", "max_request_mib=8", "policy.generation.max_new_tokens=3"])
    settings = load_chat_settings([], of_settings)
    assert (settings.images.max_images, settings.max_request_mib, len(others)) == (2, 8, 1)


@pytest.fixture
def endpoint(tmp_path):
    folder = whole_vlms.write(tmp_path / "vlm", "qwen2_5_vl")
    tokenizer = load_tokenizer(str(folder))
    tokenizer.image_reader = ImageReader(str(folder), ImagesConfig())
    server = AgentEndpoint(ServerSettings(tokenizer=tokenizer, model="vlm", temperature=1.0))
    yield folder, tokenizer, server
    server.shutdown()


def test_agents_send_images_and_another_picture_with_equal_tokens_begins_a_segment(endpoint):
    folder, tokenizer, server = endpoint
    engine = HuggingFaceGeneration(str(folder), max_new_tokens=5, max_model_len=400, torch_dtype="float32")
    given = []

    def agent(base_url, api_key, messages):
        given.extend(messages)
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        log = [*messages]
        for seed in (5, 6):
            answer = client.chat.completions.create(model="vlm", messages=log)
            log += [{"role": "assistant", "content": answer.choices[0].message.content}, asked(png(seed), text="And?")]
        log[2] = asked(png(7), text="And?")  # another picture with the same tokens
        client.chat.completions.create(model="vlm", messages=log)
        return 1.0

    datum = prompt_datum({"messages": [asked(png(1))], "task_name": "t"}, idx=0, tokenizer=tokenizer)
    [row] = start_rollouts([datum], 1)
    limits = SessionLimits(max_turns=4, max_total_length=400, max_new_tokens=5)
    options = {"model": "vlm", "limits": limits, "timeout_s": 60.0, "task_name": "t", "returns_reward": True}
    collector = Collector(
        generation=engine,
        environments={"t": Scores()},
        tokenizer=tokenizer,
        seed=0,
        max_turns={"t": 1},
        max_total_length=400,
        drivers={"t": AgentDriver(agent, server, tokenizer, **options)},
    )
    collector.collect([row], stream=SampleStream.TRAINING)
    engine.shutdown()
    assert row.failure is None, row.failure_details
    [shown] = [each for each in given[0]["content"] if each["type"] == "image_url"]
    assert shown["image_url"]["url"] == f"rlcore-image:{shown['digest']}"
    batch = to_batch([row])
    digests = {number: digest_of(png(number), tokenizer) for number in (1, 5, 6, 7)}
    assert [[image.digest for image in images] for images in batch["images"]] == [
        [digests[1], digests[5]],
        [digests[1], digests[7], digests[6]],
    ]
    policy = HuggingFacePolicy(config=HFPolicyConfig(model_name=str(folder), max_total_sequence_length=400))
    scores = policy.get_logprobs(batch)["logprobs"]
    torch.testing.assert_close(scores * batch["token_mask"], batch["generation_logprobs"], atol=1e-4, rtol=0)


def digest_of(content, tokenizer):
    [found] = tokenizer.image_reader.read([ImageSource(content)], tokenizer)
    return found.digest


class Scores(EnvironmentInterface):
    def step(self, message_log_batch, metadata):
        raise NotImplementedError
