"""Folders with a small tokenizer and an image processor, and pictures to put into them."""

import io
import json

import tokenizers
import torch
from PIL import Image
from tokenizers import decoders, models, pre_tokenizers

TAGS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
TOKENS = {
    "Qwen2VL": ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>"],
    "Gemma3": ["<start_of_image>", "<image_soft_token>", "<end_of_image>"],
    "Mllama": ["<|image|>", "<|python_tag|>"],
    "Pixtral": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    "Llava": ["<image>"],
    "Siglip": ["<image>"],
    "Idefics3": ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TAGS],
}
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|>"
    "<|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # fmt: skip


def byte_tokenizer(kind):
    """A token for each byte, and the family's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*TOKENS[kind], "<bos>", "<pad>"])
    return tokenizer


def write_folder(folder, kind, image, text, template=None):
    """image, text: the fields of preprocessor_config.json and of processor_config.json."""
    byte_tokenizer(kind).save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "pad_token": "<pad>", "eos_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | ({"chat_template": template} if template else {}))
    )
    (folder / "preprocessor_config.json").write_text(
        json.dumps(image | {"image_processor_type": f"{kind}ImageProcessor"})
    )
    (folder / "processor_config.json").write_text(json.dumps(text))
    return folder


def picture(height, width, seed=0):
    pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.numpy())


def png(image):
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()
