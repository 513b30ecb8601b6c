"""Tiny models that see, and batches for them: samples with two images, none, one, and a video."""

from __future__ import annotations

import tiny_models
import torch
import transformers
from torch import nn

BLOCKS = 4
IDS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
TEXT = tiny_models.COMMON | {"num_hidden_layers": BLOCKS, "tie_word_embeddings": False}
SECTIONED = {"head_dim": 8, "rope_parameters": tiny_models.SECTIONS["rope_parameters"]}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
QWEN2 = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 2}
STACKED = {"depth": 3, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
STACKED |= {"patch_size": 2, "deepstack_visual_indexes": [0, 1, 2], "num_position_embeddings": 16}
CLIP = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
KINDS: dict[str, tuple[str, dict, dict, dict]] = {
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", SECTIONED, QWEN2, IDS),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", SECTIONED, tiny_models.VISION | {"patch_size": 2}, IDS),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", SECTIONED, STACKED, IDS),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", SECTIONED | SPARSE, STACKED, IDS),
    "llava": (
        "LlavaForConditionalGeneration",
        {"model_type": "llama"},
        CLIP | {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, "projection_dim": 16},
        {"image_token_id": 60, "vision_feature_layer": -1},
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {"head_dim": 8, "sliding_window": 6},
        CLIP | {"image_size": 16, "patch_size": 4},
        {"mm_tokens_per_image": 4, "image_token_index": 60, "boi_token_index": 62, "eoi_token_index": 63},
    ),
}
"""Of each type of model: the class, changes of its text and vision part, and of its own settings."""
GRIDS = {"image": [(1, 4, 4), (1, 4, 8), (1, 8, 4)], "video": [(2, 4, 4)]}
"""Two images in the first sample, one in the third, the video in the last."""
LENGTH = 26


def seeing(kind: str, dtype: torch.dtype = torch.float64, **changes: object) -> nn.Module:
    """In training mode, the same at every call; every weight of it matters, and every one is trained."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(5)
    name, text, vision, own = KINDS[kind]
    made = getattr(transformers, name)
    config = made.config_class(
        text_config=TEXT | text | changes,
        vision_config=vision,
        attn_implementation="eager",
        experts_implementation="eager",
        **own,
    )
    config.tie_word_embeddings = False
    config.text_config.tie_word_embeddings = False
    model = made(config)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise))
    return model.to(dtype).train()


def batch(kind: str, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Four samples, the second without images, the third padded."""
    ids = tiny_models.tokens(4, LENGTH).clone()
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found["attention_mask"][2, 22:] = 0
    if "qwen" in kind:
        _grids(found, dtype, [(3, 5, 8, 61)] if kind.startswith("qwen2") else [(3, 5, 4, 61), (3, 12, 4, 61)])
    else:
        _of_one_size(kind, found, dtype)
    labels = ids.clone()
    labels[ids >= 60] = -100
    labels[2, 22:] = -100
    return found | {"labels": labels}


def _grids(found: dict[str, torch.Tensor], dtype: torch.dtype, video: list[tuple[int, ...]]) -> None:
    """``video``: sample, place, number and token of its tokens; time stamps stand between frames in Qwen3-VL."""
    types = found["mm_token_type_ids"] = torch.zeros_like(found["input_ids"])
    for sample, begin, count, token in [(0, 2, 4, 60), (0, 8, 8, 60), (2, 3, 8, 60), *video]:
        found["input_ids"][sample, begin - 1] = 62
        found["input_ids"][sample, begin : begin + count] = token
        types[sample, begin : begin + count] = token - 59
    for name, argument in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        rows = sum(t * h * w for t, h, w in GRIDS[name])
        found[f"{name}_grid_thw"] = torch.tensor(GRIDS[name])
        found[argument] = torch.randn(rows, 3 * 2 * 2 * 2, generator=torch.Generator().manual_seed(rows)).to(dtype)


def _of_one_size(kind: str, found: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    for sample, begin in ((0, 2), (0, 9), (2, 4), (3, 12)):
        found["input_ids"][sample, begin : begin + 4] = 60
    size = KINDS[kind][2]["image_size"]
    found["pixel_values"] = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(3)).to(dtype)
    if kind == "gemma3":
        found["token_type_ids"] = (found["input_ids"] == 60).long()
