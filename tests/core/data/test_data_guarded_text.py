"""Texts of control tokens in messages stay text, in training data, prompts and the turns of rollouts."""

from pathlib import Path

import pytest
import torch
from model_folders import TEMPLATE, byte_level, unigram, write_tokenizer
from template_styles import CHATML, Style, tokenizer_of, trained_text
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from rl_core.data.tokenizer import decode, encode, load_tokenizer
from rl_train.data.chat_template import conversation_tokens
from rl_train.data.messages import get_formatted_message_log
from rl_train.data.processors import conversation_datum, preference_datum, prompt_datum
from rl_train.data.special_tokens import control_texts, control_tokens, guarded, keeps_text
from rl_train.rollouts.drivers import Rendered, TurnFormatter
from rl_train.rollouts.trajectory import Trajectory

CORPUS = ["What is 12 + 34? The answer is 46.", "user assistant system end start < | im _ > / s p a d", "a b c d e f g h i"]
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def with_byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2: words begin with `▁`, unknown characters are bytes, and tokens of turns swallow line breaks."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    bpe.decoder = decoders.Sequence(steps)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    bpe.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    roles = ("system", "user", "assistant", "end")
    made.add_special_tokens({"extra_special_tokens": [AddedToken(f"<|{name}|>", rstrip=True) for name in roles]})
    made.pad_token, made.chat_template = "</s>", PHI
    return made


def in_folder(folder: Path, tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(["<think>", "</think>"])
    write_tokenizer(folder, tokenizer, chat_template=TEMPLATE)
    return load_tokenizer(folder)


@pytest.fixture(scope="module", params=["byte-level", "unigram", "byte fallback", "words of Llama 3"])
def tokenizer(request, tmp_path_factory):
    match request.param:
        case "byte-level":
            return in_folder(tmp_path_factory.mktemp("bytes"), byte_level())
        case "unigram":
            return in_folder(tmp_path_factory.mktemp("unigram"), unigram())
        case "byte fallback":
            return with_byte_fallback()
    return tokenizer_of(Style(CHATML, ("<|im_start|>", "<think>", "</think>", "<|im_end|>"), None))


def forged(tokenizer, place: str) -> str:
    """A content that would end its turn and begin others."""
    names = [name for name in control_tokens(tokenizer) if len(name) > 1]
    return f"{place} " + " ".join(f"{name} user" for name in names) + names[-1]


def conversation(tokenizer, write) -> list[dict[str, str]]:
    roles = ("system", "user", "assistant", "user", "assistant")
    return [{"role": role, "content": write(tokenizer, f"turn {number}")} for number, role in enumerate(roles)]


def counted(tokenizer, ids) -> dict[str, int]:
    return {name: list(ids).count(token) for name, token in control_tokens(tokenizer).items()}


def tokens_of(log) -> list[int]:
    return torch.cat([message["token_ids"] for message in log]).tolist()


def plain(_, place: str) -> str:
    return f"{place} 12 + 34"


def test_control_tokens_in_messages_are_text_and_those_of_the_template_stay(tokenizer):
    messages, normal = conversation(tokenizer, forged), conversation(tokenizer, plain)
    log = get_formatted_message_log(messages, tokenizer)
    ids = tokens_of(log)
    assert counted(tokenizer, ids) == counted(tokenizer, tokens_of(get_formatted_message_log(normal, tokenizer)))
    assert counted(tokenizer, ids) == counted(tokenizer, conversation_tokens(messages, tokenizer, add_generation_prompt=False))
    for message, own in zip(messages, log, strict=True):
        assert message["content"].strip() in decode(tokenizer, own["token_ids"].tolist())


def test_all_other_texts_have_the_same_tokens(tokenizer):
    copy = guarded(tokenizer, tokenizer.eos_token)
    assert copy is not tokenizer
    examples = Path(__file__).parents[3] / "examples" / "smollm2"
    lines = [line for file in sorted(examples.glob("*/train.jsonl")) for line in file.read_text().splitlines()[:40]]
    texts = [*CORPUS, "", " ", "  a\n\n b ", "<think>x</think>", "<|", "é 漢 🙂", *lines]
    for text in texts:
        assert guarded(tokenizer, text) is tokenizer
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]
        rendered = [each.apply_chat_template(messages, tokenize=False) for each in (tokenizer, copy)]
        assert encode(rendered[1], copy) == encode(rendered[0], tokenizer)
        assert encode(text, copy) == encode(text, tokenizer)


def test_answers_are_trained_with_their_text_to_the_end_of_the_turn(tokenizer):
    end = "<|end|>" if "<|end|>" in control_tokens(tokenizer) else "<|im_end|>"
    answer = f"first {end} second"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
    datum = conversation_datum({"messages": messages}, idx=0, tokenizer=tokenizer)
    [trained] = trained_text(datum, tokenizer)
    assert trained.strip().startswith(answer)
    assert f"{answer}{end}" in trained
    mask = torch.cat([message["token_loss_mask"] for message in datum["message_log"]]).bool()
    ids = torch.tensor(tokens_of(datum["message_log"]))[mask].tolist()
    assert ids.count(control_tokens(tokenizer)[end]) == 1
    pair = preference_datum(
        {"prompt": messages[:1], "chosen": messages[1:], "rejected": messages[1:]}, idx=0, tokenizer=tokenizer
    )
    assert tokens_of(pair["message_log_chosen"]) == tokens_of(pair["message_log_rejected"]) == tokens_of(datum["message_log"])


def test_special_tokens_that_belong_to_answers_stay_tokens(tmp_path):
    tokenizer = in_folder(tmp_path, byte_level())
    think = tokenizer.convert_tokens_to_ids("<think>")
    for content in ("<think>5</think>6", "<think>5</think>6 <|im_end|>"):
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
        assert tokens_of(get_formatted_message_log(messages, tokenizer)).count(think) == 1


def test_observations_and_rendered_histories_forge_no_turns(tokenizer):
    end = tokenizer.eos_token_id
    observed = {"role": "user", "content": forged(tokenizer, "result")}
    normal = {"role": "user", "content": "result 12 + 34"}
    sampled = torch.tensor([*encode("5", tokenizer), end])
    formatter = TurnFormatter(tokenizer)
    after = [formatter.observation_ids(message, sampled).tolist() for message in (observed, normal)]
    assert counted(tokenizer, after[0]) == counted(tokenizer, after[1])
    spelled = [token for name in control_tokens(tokenizer) for token in encode(name, guarded(tokenizer, tokenizer.eos_token))]
    found = []
    for question, answer, message in ((observed, spelled, observed), (normal, encode("5", tokenizer), normal)):
        log = prompt_datum({"messages": [question]}, idx=0, tokenizer=tokenizer)["message_log"]
        rollout = Trajectory(message_log=log, metadata=None, task_name="t", group_id=0, index=0, ordinal=0, sample=0)
        rollout.add_answer(decode(tokenizer, answer), torch.tensor([*answer, end]), torch.zeros(len(answer) + 1))
        prompt = Rendered(tokenizer).next_prompt(rollout, message)
        found.append(
            counted(tokenizer, [*(rollout.token_ids().tolist() if prompt.continues else ()), *prompt.token_ids.tolist()])
        )
    assert found[0] == found[1]


def test_a_tokenizer_that_cannot_keep_text_is_used_as_it_is():
    class WithoutFile:
        """As a tokenizer in Python code of a model: it has no `tokenizer.json`."""

        chat_template, name_or_path, unk_token_id = None, "", None
        bos_token, eos_token, pad_token, unk_token = None, "</s>", None, None
        eos_token_id = 1

        def get_added_vocab(self):
            return {"</s>": 1}

        def convert_tokens_to_ids(self, name):
            return self.get_added_vocab()[name]

    tokenizer = WithoutFile()
    assert control_texts(tokenizer, [{"role": "user", "content": "a</s>"}]) == ["</s>"]
    assert not keeps_text(tokenizer)
    assert guarded(tokenizer, "a</s>") is tokenizer
