"""Tokenizers that Transformers cannot load: hidden and visible tokens, contents, parts of characters, spaces, and files."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_backends_base.rows import StopStringScanner
from rl_core.config.schema import PolicyConfig, TokenizerConfig
from rl_core.data.adapted_tokenizer import AdaptedTokenizer
from rl_core.data.tokenizer import conversation_tokens, decode, find_tokenizer, load_tokenizer
from rl_core.errors import DataError
from rl_serve.text import IncrementalText, decoded, token_texts
from rl_train.checkpoints.published_files import carry_over_tokenizer, tokenizer_code
from rl_train.data.messages import get_formatted_message_log
from rl_train.data.processors import load_policy_tokenizer
from rl_train.data.special_tokens import decode_answers, guarded
from rl_train.data.teacher_spans import byte_ends

END, TURN, THINK, STOP = 256, 257, 258, 259


class Bytes:
    """A token for each byte, and control tokens; padding is the end token."""

    vocab_size = 260
    special_tokens = {"<end>": END, "<turn>": TURN, "<think>": THINK, "<stop>": STOP}  # noqa: RUF012
    bos_token_id, eos_token_id, pad_token_id = None, END, END
    chat_template = (
        "{% for m in messages %}<turn>{{ m['role'] }}: {{ m['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
    )

    def __init__(self, model_name):
        pass

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids):
        return bytes(token_ids).decode(errors="replace")

    def save(self, folder):
        (folder / "inner").mkdir()
        (folder / "inner" / "marks.bin").write_bytes(b"marks")


class Words:
    """Words with spaces between them: the texts of single tokens do not add up to the text of all. No template, no padding."""

    words = ("red", "green", "blue")
    vocab_size = 4
    special_tokens = {"<end>": 3}  # noqa: RUF012
    bos_token_id, eos_token_id, pad_token_id = None, 3, None
    chat_template = None

    def __init__(self, model_name):
        pass

    def encode(self, text):
        return [self.words.index(word) if word in self.words else 0 for word in text.split()]

    def decode(self, token_ids):
        return " ".join(self.words[token] for token in token_ids)

    def save(self, folder):
        (folder / "config.json").write_text("{}")


@pytest.fixture
def model(tmp_path):
    """A model folder whose generation config has two end tokens."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, STOP]}))
    return tmp_path


def tokenizer_of(model, kind=Bytes, **section):
    keys = {"name": f"{__name__}:{kind.__name__}", **section}
    return load_policy_tokenizer(PolicyConfig(backend="hf", model_name=str(model), tokenizer=keys))


@pytest.mark.parametrize(("visible", "text"), [("content", "a<think>é"), ("all", "a<think>é<stop><end>"), ("none", "aé")])
def test_text_hides_every_end_token_of_the_model_and_shows_the_other_special_tokens(model, visible, text):
    tokenizer = tokenizer_of(model, visible_special_tokens=visible)
    assert decode_answers(tokenizer, [[*b"a", THINK, *"é".encode(), STOP, END]]) == [text]


def tokens_of(messages, tokenizer):
    log = get_formatted_message_log(messages, tokenizer, add_generation_prompt=True, trained=())
    return [token for message in log for token in message["token_ids"].tolist()]


def test_control_tokens_in_contents_stay_text_unless_the_config_parses_them(model):
    question = [{"role": "user", "content": "say <end>é"}]
    opening, closing = [TURN, *b"user: say "], [END, TURN, *b"assistant: "]
    tokenizer = tokenizer_of(model)
    assert tokens_of(question, tokenizer) == [*opening, *"<end>é".encode(), *closing]
    parsing = tokenizer_of(model, parse_control_tokens=True)
    assert tokens_of(question, parsing) == [*opening, END, *"é".encode(), *closing]
    copied = guarded(tokenizer, "<end>")
    assert copied is not tokenizer
    assert decode(tokenizer, [END]) == "<end>" != decode(copied, [END])
    assert (copied.pad_token_id, len(copied)) == (END, 260)


def test_a_template_of_the_config_also_renders_contents_with_control_tokens(model):
    tokenizer = tokenizer_of(model, chat_template="{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}<stop>")
    assert tokens_of([{"role": "user", "content": "<stop>"}], tokenizer) == [TURN, *b"<stop>", STOP]


def test_bytes_of_incomplete_characters_are_counted_one_by_one(model):
    assert byte_ends([*"aé€".encode()], tokenizer_of(model)) == [1, 2, 3, 4, 5, 6]


TOKENIZERS = {kind: AdaptedTokenizer(kind(None), f"acme:{kind.__name__}") for kind in (Bytes, Words)}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_streamed_text_only_grows_and_ends_as_the_text_of_all_tokens(kind, data):
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, kind.vocab_size - 1), max_size=90))
    stream, seen = IncrementalText(tokenizer), ""
    for count in range(len(ids) + 1):
        now = stream.read(ids[:count])
        assert now.startswith(seen)
        seen = now
    whole = decoded(tokenizer, ids)
    assert whole.startswith(seen)
    assert not whole.removeprefix(seen).strip("\N{REPLACEMENT CHARACTER}")


def test_words_without_a_template_and_padding_are_joined_with_spaces_and_padded_with_the_end_token(tmp_path):
    tokenizer = tokenizer_of(tmp_path, Words)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 3
    messages = [{"role": "user", "content": "red green"}, {"role": "assistant", "content": "blue"}]
    assert conversation_tokens(messages, tokenizer) == [0, 1, 2, 3]
    assert decode_answers(tokenizer, [torch.tensor([0, 1, 2, 3])]) == ["red green blue"]
    assert token_texts(tokenizer, [0, 1, 2]) == ["red", " green", " blue"]
    batch = tokenizer(["red", "red green blue"], padding=True, return_tensors="pt")
    assert batch["input_ids"].tolist() == [[0, 3, 3], [0, 1, 2]]


def test_the_files_and_the_template_of_a_tokenizer_are_those_of_its_folder(model):
    template = "{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}"
    carry_over_tokenizer(tokenizer_of(model, chat_template=template), model)
    name = f"{__name__}:Bytes"
    assert tokenizer_code(model) == (name, ["tokenizer_code.txt", "chat_template.jinja", "inner/marks.bin"])
    assert (model / "inner" / "marks.bin").read_bytes() == b"marks"
    assert load_tokenizer(name, model_name=model).chat_template == template
    assert tokenizer_of(model).chat_template == template
    assert load_tokenizer(name).chat_template == Bytes.chat_template


def test_code_that_only_a_folder_names_is_not_run(model):
    carry_over_tokenizer(tokenizer_of(model), model)
    (model / "tokenizer_code.txt").write_text("shutil:rmtree\n")
    with pytest.raises(DataError, match=r"is code that you must name: policy\.tokenizer\.name='shutil:rmtree'"):
        load_tokenizer(model)
    assert model.is_dir()


def test_names_outside_of_the_folder_and_code_are_not_files_of_a_tokenizer(tmp_path):
    folder, secret = tmp_path / "model", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("key")
    for name in ("a.bin", "b.py", "c.pkl", "pytorch_model.bin"):
        (folder / name).write_text(name)
    names = ["a.bin", "b.py", "c.pkl", "pytorch_model.bin", "../secret", str(secret), "missing"]
    (folder / "tokenizer_code.txt").write_text("\n".join(["acme:T", *names]))
    assert tokenizer_code(folder) == ("acme:T", ["tokenizer_code.txt", "a.bin"])


def test_a_tokenizer_that_would_replace_files_of_the_model_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"wrote config\.json, which would replace files of the model"):
        carry_over_tokenizer(tokenizer_of(tmp_path, Words), tmp_path)
    assert not list(tmp_path.iterdir())


def test_ids_that_only_the_model_has_add_no_text(model):
    assert decode_answers(tokenizer_of(model), [[*b"a", 300, *b"b"]]) == ["ab"]
    assert tokenizer_of(model).convert_ids_to_tokens(300) == "token 300"


class WithGaps(Bytes):
    """An id without a token, for which `decode` raises."""

    vocab_size = 261


def test_an_id_that_cannot_be_decoded_is_an_error_before_the_run(model):
    with pytest.raises(DataError, match=r"cannot load the tokenizer \S+:WithGaps of .*ValueError: bytes must be in range"):
        tokenizer_of(model, WithGaps)


class WithVocabulary(Bytes):
    """Its file has a name that Transformers reads as that of a vocabulary."""

    def save(self, folder):
        (folder / "vocab.json").write_text("{}")


def test_files_of_other_tokenizers_are_not_read_as_a_vocabulary_of_transformers(model):
    carry_over_tokenizer(tokenizer_of(model, WithVocabulary), model)
    assert find_tokenizer(model, TokenizerConfig()) is None
    with pytest.raises(DataError, match="is code that you must name"):
        load_tokenizer(model)


@pytest.mark.parametrize(("kind", "stop", "tokens"), [(Words, "n b", [0, 1, 2]), (Bytes, "aé", [*"aé".encode()])])
def test_a_stop_string_is_found_at_the_token_that_completes_it(kind, stop, tokens):
    scanner = StopStringScanner(TOKENIZERS[kind], [stop], [0])
    assert [scanner.push(token) for token in tokens] == [False, False, True]
