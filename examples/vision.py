"""A model that reads images learns to name colors: python -m examples.vision, on two processes of a laptop.

    make a small Llava and pictures of one color -> fit with tp=2 by examples/vision.yaml

Elsewhere: ``lightning-automodel fit --config=examples/vision.yaml`` with another ``model`` and other ``train_files``.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).with_suffix(".yaml")
BUILD = Path("build/vision")
COLORS = {"red": (230, 20, 20), "green": (20, 200, 40), "blue": (30, 40, 220), "white": (250, 250, 250)}
SIDE = 16  # pixels
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def main() -> None:
    """Runs all steps in the current directory."""
    shutil.rmtree(BUILD, ignore_errors=True)
    make_model(BUILD / "model")
    make_pictures(BUILD / "data")
    command = [str(Path(sys.executable).with_name("lightning-automodel")), "fit", f"--config={CONFIG}", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}).returncode)


def make_processor() -> Any:
    """Builds a processor that knows bytes, and images as four tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlavaProcessor, PreTrainedTokenizerFast
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    bytes_only = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=bytes_only, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "<eos>", "pad_token": "<pad>", "extra_special_tokens": {"image_token": "<image>"}}
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}),
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special),
        patch_size=SIDE // 2,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def make_model(directory: Path) -> None:
    """Writes a small random Llava with its processor: the stand-in for a model that one would download."""
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    processor = make_processor()
    processor.save_pretrained(directory)
    tokenizer = processor.tokenizer
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32, intermediate_size=64, image_size=SIDE, patch_size=SIDE // 2, **sizes
        ),
        text_config=LlamaConfig(
            vocab_size=260,
            hidden_size=64,
            intermediate_size=128,
            num_key_value_heads=2,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **sizes,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    LlavaForConditionalGeneration(config).save_pretrained(directory)


def make_pictures(folder: Path, count: int = 32) -> None:
    """Writes pictures of one color each, and chats about them."""
    from PIL import Image

    folder.mkdir(parents=True)
    with (folder / "chats.jsonl").open("w") as file:
        for index in range(count):
            color = list(COLORS)[index % len(COLORS)]
            Image.new("RGB", (SIDE + index % 5, SIDE), COLORS[color]).save(folder / f"{index}.png")
            question = [{"type": "image", "image": f"{index}.png"}, {"type": "text", "text": "What color?"}]
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": color}]
            file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main()
