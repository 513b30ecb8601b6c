"""Scripts for DeepSpeed as its tutorials have them: none of them sets a device. Run by a test:

deepspeed --num_gpus 2 plain_script.py ROAD FOLDER --deepspeed --deepspeed_config CONFIG
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import convolving_models
import deepspeed
import gradient_rule as rule
import ranks
import tiny_models
import torch

STEPS = 2


def tutorial(args: argparse.Namespace) -> list[float]:
    torch.manual_seed(0)
    return trained(args, tiny_models.tiny("llama", torch.float32))


def zero_init(args: argparse.Namespace) -> list[float]:
    """As transformers does it: its from_pretrained makes the model within deepspeed.zero.Init."""
    import transformers

    deepspeed.init_distributed()
    kept = transformers.integrations.HfDeepSpeedConfig(args.deepspeed_config)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype=torch.float32)
    assert kept.is_zero3() and all("ds_tensor" in vars(weight) for weight in model.parameters())
    return trained(args, model.train())


def from_pretrained(args: argparse.Namespace) -> list[float]:
    import transformers

    from ds_npu.engine.pretrained import from_pretrained

    auto, folder = transformers.AutoModelForCausalLM, args.folder / "model"
    return trained(args, from_pretrained(auto, folder, args.deepspeed_config, dtype=torch.float32).train())


def pipeline(args: argparse.Namespace) -> list[float]:
    deepspeed.init_distributed()
    model = deepspeed.PipelineModule(rule.layers(), num_stages=2, loss_fn=rule.token_loss)
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    tokens = rule.samples(rule.MICRO)
    batches = iter([(tokens[:, :-1], tokens[:, 1:])] * STEPS)
    return [engine.train_batch(batches).item() for _ in range(STEPS)]


def convolving(args: argparse.Namespace) -> list[float]:
    """Train each family with convolutions, one after the other."""
    return [loss for family in convolving_models.FAMILIES for loss in trained(args, *convolving_models.made(family))]


def trained(
    args: argparse.Namespace, model: torch.nn.Module, batch: dict[str, torch.Tensor] | None = None
) -> list[float]:
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    tokens = tiny_models.tokens(2, 16)
    batch = batch or {"input_ids": tokens, "labels": tokens}
    batch = {name: value.to(engine.device) for name, value in batch.items()}
    losses = []
    for _ in range(STEPS):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


ROADS = {each.__name__: each for each in (tutorial, zero_init, from_pretrained, pipeline, convolving)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("road", choices=ROADS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args()
    losses = ROADS[args.road](args)
    # What a test wants to know besides.
    said = {"losses": losses, "npus": ranks.npus_in_use()}
    (args.folder / f"said by {os.environ['RANK']}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
