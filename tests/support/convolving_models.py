"""Tiny models of transformers with convolutions or linear attention, each with a batch that its loss is computed of."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import nn

Batch = dict[str, torch.Tensor]
VOCABULARY = 96


def vit() -> tuple[nn.Module, Batch]:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        num_labels=5,
    )
    return transformers.ViTForImageClassification(config), images(16)


def resnet() -> tuple[nn.Module, Batch]:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config), images(32)


def whisper() -> tuple[nn.Module, Batch]:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    labels = torch.randint(3, VOCABULARY, (2, 8))
    return transformers.WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(2, 8, 32),
        "labels": labels,
    }


def wav2vec2() -> tuple[nn.Module, Batch]:
    without_dropout = dict.fromkeys(
        ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout"), 0.0
    )
    config = transformers.Wav2Vec2Config(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        layerdrop=0.0,
        ctc_loss_reduction="mean",
        **without_dropout,
    )
    batch = {"input_values": torch.randn(2, 400), "labels": torch.randint(1, 32, (2, 5))}
    return transformers.Wav2Vec2ForCTC(config), batch


def mamba2() -> tuple[nn.Module, Batch]:
    config = transformers.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        state_size=8,
        num_hidden_layers=2,
        chunk_size=8,
        expand=2,
    )
    return transformers.Mamba2ForCausalLM(config), words()


def qwen3_next() -> tuple[nn.Module, Batch]:
    config = transformers.Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        max_position_embeddings=64,
    )
    return transformers.Qwen3NextForCausalLM(config), words()


def qwen2_5_vl() -> tuple[nn.Module, Batch]:
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "out_hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    begin, image, end = 92, 90, 93
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=91,
        vision_start_token_id=begin,
        vision_end_token_id=end,
    )
    ids = torch.randint(3, 80, (1, 16))
    ids[0, 2], ids[0, 3:7], ids[0, 7] = begin, image, end
    batch = {
        "input_ids": ids,
        "labels": ids.clone(),
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == image).long(),
        "pixel_values": torch.randn(16, 3 * 2 * 16),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    return transformers.Qwen2_5_VLForConditionalGeneration(config), batch


def images(size: int) -> Batch:
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([1, 3])}


def words() -> Batch:
    ids = torch.randint(0, VOCABULARY, (2, 20))
    return {"input_ids": ids, "labels": ids}


FAMILIES: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    each.__name__: each for each in (vit, resnet, whisper, wav2vec2, mamba2, qwen3_next, qwen2_5_vl)
}


def made(family: str) -> tuple[nn.Module, Batch]:
    """The same model, in training, and batch at each call."""
    torch.manual_seed(0)
    model, batch = FAMILIES[family]()
    return model.train(), batch
