"""A damaged checkpoint is an error that names the damaged file and the next older undamaged checkpoint."""

import json
import shutil

import pytest
import transformers
from tokenizers import Tokenizer, models

from rl_backends_hf import HuggingFacePolicy
from rl_core.errors import CheckpointError
from rl_train.checkpoints.inputs import ComparedConfig
from rl_train.checkpoints.manifest import _own_digest, read_manifest, verify_checkpoint, write_manifest
from rl_train.checkpoints.state import Checkpoints
from rl_train.checkpoints.store import CheckpointStore

FILES = (
    "manifest.json",
    "state.json",
    "policy/weights/config.json",
    "policy/weights/generation_config.json",
    "policy/weights/model.safetensors",
    "policy/weights/tokenizer.json",
    "policy/weights/tokenizer_config.json",
    "policy/optimizer/.metadata",
    "policy/optimizer/__0_0.distcp",
    "policy/optimizer/rng-00000.pt",
    "policy/optimizer/trainer.pt",
)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def put_a_folder_there(path):
    path.unlink()
    path.mkdir()


DAMAGES = {
    "removed": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "one bit flipped": flip_a_bit,
    "replaced by a folder": put_a_folder_there,
    "overwritten with JSON of another form": lambda path: path.write_text("[1, 2]"),
    "overwritten with zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


class Position:
    """The position of the data."""

    def __init__(self):
        self.index = 0

    def state_dict(self):
        return {"index": self.index}

    def load_state_dict(self, state):
        self.index = state["index"]


@pytest.fixture(scope="module")
def policy(model_folder):
    return HuggingFacePolicy(model_folder("llama"))


@pytest.fixture(scope="module")
def saved(policy, parts, tmp_path_factory):
    """Checkpoints of steps 1 and 2."""
    vocabulary = {f"t{number}": number for number in range(parts.VOCAB_SIZE)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")), eos_token="t2"
    )
    checkpoints = Checkpoints(
        store=CheckpointStore(tmp_path_factory.mktemp("run") / "checkpoints"),
        models={"policy": policy},
        parts={"rollouts": Position()},
        config=ComparedConfig(values={"sft": {}, "policy": {"backend": "hf"}, "checkpointing": {}}, algorithm="sft"),
        save_optimizer=True,
        tokenizer=tokenizer,
    )
    for step in (1, 2):
        policy.train(parts.make_rows(), parts.NLL())
        checkpoints.save(step, {"loss": 1.0 / step})
    return checkpoints


@pytest.fixture
def copy(saved, tmp_path):
    """The two checkpoints, to be damaged; the newer one."""
    shutil.copytree(saved.store.folder, tmp_path / "checkpoints")
    return tmp_path / "checkpoints" / "step_000002"


def test_all_files_of_a_checkpoint_are_in_its_manifest(saved):
    newest = saved.store.latest()
    assert sorted(read_manifest(newest)["files"]) == sorted(set(FILES) - {"manifest.json"})
    verify_checkpoint(newest)
    assert saved.restore(newest) == 2


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_named_with_the_next_older_good_checkpoint(saved, copy, file, damage):
    DAMAGES[damage](copy / file)
    with pytest.raises(CheckpointError) as refused:
        saved.restore(copy)
    text = str(refused.value)
    assert file in text
    if file == "manifest.json" and not (copy / file).is_file():
        assert "is not a checkpoint: it has no manifest.json" in text
    else:
        assert f"--resume {copy.parent / 'step_000001'}" in text


@pytest.mark.parametrize(("manifest", "found"), [({"step": 2, "metrics": {}}, 1), ({"format": 3, "step": 2, "metrics": {}}, 3)])
def test_a_checkpoint_of_another_format_is_refused_with_both_formats(saved, copy, manifest, found):
    content = manifest if found == 1 else manifest | {"digest": _own_digest(manifest)}
    (copy / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"step_000002 has format {found}, but this version of rl-train reads format 2"):
        saved.restore(copy)


@pytest.mark.parametrize(
    ("key", "value"),
    [("step", 1), ("step", "2"), ("resumable", None), ("parts", []), ("parts", {}), ("parts", {"rollouts": 3}), ("config", 1)],
)
def test_a_state_that_contradicts_the_manifest_is_refused(saved, copy, key, value):
    state = json.loads((copy / "state.json").read_text())
    (copy / "state.json").write_text(json.dumps(state | {key: value}))
    write_manifest(copy, step=2, metrics={})
    with pytest.raises(CheckpointError, match=r"state\.json.*\n.*--resume .*step_000001"):
        saved.restore(copy)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(saved, copy):
    copy.rename(copy.with_name("step_000007"))
    with pytest.raises(CheckpointError, match="the folder name has step 7, but its manifest has step 2"):
        saved.restore(copy.with_name("step_000007"))
    copy.with_name("step_000007").rename(copy.with_name("before-the-change"))
    assert saved.restore(copy.with_name("before-the-change")) == 2


def test_a_file_added_to_a_model_is_an_error_but_one_outside_it_is_not(saved, copy):
    (copy / "notes.txt").write_text("the good one")
    assert saved.restore(copy) == 2
    (copy / "policy" / "weights" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json: is not part of the checkpoint; remove it"):
        saved.restore(copy)


def test_the_suggested_older_checkpoint_is_itself_undamaged(saved, copy):
    flip_a_bit(copy / "policy" / "weights" / "model.safetensors")
    flip_a_bit(copy.parent / "step_000001" / "policy" / "optimizer" / "trainer.pt")
    with pytest.raises(CheckpointError, match="No older checkpoint next to it is without damage"):
        saved.restore(copy)


def test_retention_by_a_metric_survives_a_damaged_manifest(tmp_path):
    from rl_train.checkpoints.store import Retention

    store = CheckpointStore(tmp_path, Retention(keep_latest_k=1, keep_top_k=1, metric_name="m"))
    for step in (1, 2):
        store.write(step, lambda folder: (folder / "a").write_text("1"), {"m": 1.0 / step})
    (store.path(1) / "manifest.json").write_text("{")
    store.write(3, lambda folder: (folder / "a").write_text("1"), {"m": 0.1})
    assert 3 in store.steps()
