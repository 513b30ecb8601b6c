"""The models that are trained, their batches, and the losses and norms of one process on the CPU in plain PyTorch."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import nn
from torch.nn import functional

from ds_npu.acceptance.training_cases import Model, ModelSizes, TrainingRecipe

CLIP = 0.8
LEARNING_RATES = {"SGD": 0.1, "AdamW": 1e-3}
BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.01
EXPERTS = 4
BATCHES = 2
"""Number of batches, which steps repeat: losses fall within the steps."""
PIECES = 2
"""Pieces of a batch whose gradients one process adds up, as ranks and accumulation do."""


@dataclass(frozen=True)
class Curve:
    """The loss and the gradient's norm (before clipping) of each step."""

    losses: Sequence[float]
    norms: Sequence[float]


class Block(nn.Module):
    """A pre-norm decoder block in plain PyTorch: causal attention, and an MLP.

    It has SiLU, since NPUs approximate GELU with tanh.
    """

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.norms = nn.ModuleList(nn.LayerNorm(sizes.hidden) for _ in range(2))
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden)
        self.out = nn.Linear(sizes.hidden, sizes.hidden)
        self.mlp = nn.Sequential(
            nn.Linear(sizes.hidden, sizes.intermediate), nn.SiLU(), nn.Linear(sizes.intermediate, sizes.hidden)
        )

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        qkv = torch.unflatten(self.qkv(self.norms[0](x_BSH)), 2, (3, self.heads, -1))
        q_BNSD, k_BNSD, v_BNSD = qkv.permute(2, 0, 3, 1, 4)
        scores = (q_BNSD @ k_BNSD.mT) / q_BNSD.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        x_BSH = x_BSH + self.out((weights @ v_BNSD).transpose(1, 2).flatten(2))
        y_BSH: torch.Tensor = x_BSH + self.mlp(self.norms[1](x_BSH))
        return y_BSH


def token_loss(logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of all tokens, computed in float32 at least."""
    wide = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
    return functional.cross_entropy(wide.flatten(0, 1), labels_BS.flatten())


def decoder(sizes: ModelSizes, kind: Model) -> nn.Module:
    """A Llama, or a Mixtral with EXPERTS experts, in training mode."""
    values: dict[str, int | str | bool] = {
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.key_heads,
        "max_position_embeddings": sizes.length,
        "use_cache": False,
    }
    if kind == "decoder":
        model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values))
    else:
        # Mixtral's own grouped products take no float64.
        values |= {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "experts_implementation": "eager"}
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**values))
    return model.train()


def batch(sizes: ModelSizes, step: int) -> torch.Tensor:
    """The tokens of a step's global batch, [sequences, length + 1], by a rule that can be learned, and some noise."""
    generator = torch.Generator().manual_seed(step % BATCHES)
    starts = torch.randint(0, sizes.vocabulary, (sizes.sequences, 1), generator=generator)
    noise = torch.randint(0, 3, (sizes.sequences, sizes.length + 1), generator=generator)
    return (starts + 5 * torch.arange(sizes.length + 1) + noise) % sizes.vocabulary


def decoder_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The model's own loss on the first S of ``tokens`` [B, S + 1]."""
    loss: torch.Tensor = model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss
    return loss


def loss_of(recipe: TrainingRecipe, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of ``recipe``'s model, on one device."""
    return token_loss(model(tokens[:, :-1]), tokens[:, 1:]) if recipe.model == "layers" else decoder_loss(model, tokens)


def model_of(recipe: TrainingRecipe) -> nn.Module:
    """The whole model in float32, with the same weights at every call, rounded to the recipe's dtype."""
    torch.manual_seed(3)
    sizes = recipe.sizes
    if recipe.model != "layers":
        return decoder(sizes, recipe.model).to(dtype_of(recipe)).float()
    layers = [
        nn.Embedding(sizes.vocabulary, sizes.hidden),
        *(Block(sizes) for _ in range(sizes.layers)),
        nn.LayerNorm(sizes.hidden),
        nn.Linear(sizes.hidden, sizes.vocabulary),
    ]
    return nn.Sequential(*layers).to(dtype_of(recipe)).float()


def dtype_of(recipe: TrainingRecipe) -> torch.dtype:
    """The dtype that ``recipe`` names."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[recipe.dtype]


def trained(recipe: TrainingRecipe, compute: torch.dtype) -> Curve:
    """Train one process in ``compute``; weights and moments in float32, or in float64 where that is ``compute``."""
    whole = model_of(recipe).to(torch.promote_types(compute, torch.float32))
    model = copy.deepcopy(whole).to(compute)
    masters = list(whole.parameters())
    weights = list(model.parameters())
    rate = LEARNING_RATES[recipe.optimizer]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(masters, lr=rate)
    if recipe.optimizer == "AdamW":
        optimizer = torch.optim.AdamW(masters, lr=rate, betas=BETAS, eps=EPS, weight_decay=DECAY)
    losses, norms = [], []
    for step in range(recipe.steps):
        loss = 0.0
        for tokens in batch(recipe.sizes, step).chunk(PIECES):
            piece = loss_of(recipe, model, tokens) / PIECES
            torch.autograd.backward(piece)
            loss += piece.item()
            for master, weight in zip(masters, weights, strict=True):
                if weight.grad is not None:
                    gradient = weight.grad.to(master.dtype)
                    master.grad = gradient if master.grad is None else master.grad + gradient
                    weight.grad = None
        losses.append(loss)
        norms.append(float(nn.utils.clip_grad_norm_(masters, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, weight in zip(masters, weights, strict=True):
                weight.copy_(master)
    return Curve(losses, norms)


def kept_curves(recipe: TrainingRecipe, folder: Path) -> tuple[Curve, Curve]:
    """The curves of one process in float64 and in the recipe's dtype; computed once, and kept in ``folder``."""
    file = folder / recipe.file
    if not file.exists():
        curves = [trained(recipe, torch.float64), trained(recipe, dtype_of(recipe))]
        written = file.with_suffix(".new")
        written.write_text(json.dumps([[curve.losses, curve.norms] for curve in curves]))
        written.rename(file)
    exact, own = (Curve(*each) for each in json.loads(file.read_text()))
    return exact, own
