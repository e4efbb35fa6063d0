#!/usr/bin/env bash
# Transformers 5.19: how many tokens LLaVA-OneVision's processor writes for a conversation with two pictures depends on how its argument
# `images` is nested. As a flat list, which it accepts, each picture is cut into tiles, as if it were alone. With one list per conversation,
# which is the form of chat templates, the same pictures have no tiles. There is no message. A good guess would be that both forms mean the
# same, as they do for Qwen2.5-VL, and that a picture has the same tokens next to another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.19.0 pillow==12.0.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2>"$folder/messages" <<'PY'
from importlib.metadata import version

from PIL import Image
from tokenizers import Tokenizer, models
from transformers import LlavaOnevisionProcessor, PreTrainedTokenizerFast, Qwen2_5_VLProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

PICTURES = [Image.new("RGB", (96, 64), (200, 30, 30)), Image.new("RGB", (64, 160), (30, 30, 200))]


def with_images_only(base):
    """The class, which accepts that there is no video processor: that needs torchvision."""
    check = base.check_argument_for_proper_class
    return type(base.__name__, (base,), {"check_argument_for_proper_class": lambda *given: given[2] and check(*given)})


def made(base, image_processor, tokens, **settings):
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate([*tokens, "[UNK]"])}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=tokens, unk_token="[UNK]")
    return with_images_only(base)(image_processor=image_processor, tokenizer=tokenizer, video_processor=None, **settings)


def count(processor, images):
    text = processor.image_token * len(PICTURES)
    return len(processor(text=[text], images=images)["input_ids"][0])


sizes = {"size": {"height": 16, "width": 16}, "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32], [16, 48], [48, 16]]}
llava = made(
    LlavaOnevisionProcessor,
    LlavaOnevisionImageProcessorPil(**sizes),
    ["<image>", "<video>"],
    num_image_tokens=16,
    vision_feature_select_strategy="full",
)
qwen = made(
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=256, max_pixels=4096),
    ["<|image_pad|>", "<|video_pad|>"],
)
print(f"transformers {version('transformers')}")
found = {}
for name, processor in (("LLaVA-OneVision", llava), ("Qwen2.5-VL", qwen)):
    alone = [len(processor(text=[processor.image_token], images=[[each]])["input_ids"][0]) for each in PICTURES]
    found[name] = sum(alone), count(processor, PICTURES), count(processor, [PICTURES])
    print(f"{name}: tokens of each picture alone {alone}; of both, flat {found[name][1]}, nested {found[name][2]}")
assert len(set(found["Qwen2.5-VL"])) == 1
alone, flat, nested = found["LLaVA-OneVision"]
assert flat == alone and nested < flat / 2
PY
if grep -qi "nested\|flat\|tiles\|patch" "$folder/messages"; then echo "there is a message now"; exit 1; fi
echo "no message about the form"
