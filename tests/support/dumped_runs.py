"""Runs of one model at any layout that dump their steps, and what may be wrong with one of them."""

from __future__ import annotations

import hashlib
import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import gradient_rule as rule
import peft
import tensor_parallel_rule as dense
import tiny_models
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch import nn

from ds_npu.comparison.dump_reader import DumpedRun
from ds_npu.parallel.pipeline.pass_through import PassThrough
from ds_npu.parallel.tensor.shard_access import allow_shard_access

SAMPLES, LENGTH, STEPS, BLOCKS = 8, 10, (0, 1), 4
LR, CLIP = rule.LR, rule.CLIP
SEQUENCE = {"tensor": 2, "sequence_parallel": True, "probe": False}
LAYOUTS: dict[str, tuple[int, dict, int]] = {
    "one process": (1, {}, 0),
    "dp4, ZeRO 3": (4, {}, 3),
    "tp2": (2, {"parallel": {"tensor": 2, "probe": False}}, 0),
    "tp2 of sequences x dp2, ZeRO 2": (4, {"parallel": SEQUENCE}, 2),
    "cp2, ring": (2, {"parallel": {"context": 2}, "context_parallel": {"algorithm": "ring"}}, 1),
    "tp2 of sequences x cp2": (4, {"parallel": {**SEQUENCE, "context": 2}}, 0),
    "pp2 x dp2, ZeRO 1": (4, {"parallel": {"pipeline": 2}}, 1),
    "pp2 x tp2, interleaved": (
        4,
        {"parallel": {"pipeline": 2, **SEQUENCE}, "pipeline": {"virtual_stages": 2, "micro_batches": 2}},
        0,
    ),
}
"""The world, its section, and the stage of ZeRO."""
EXPERTS: dict[str, tuple[int, dict, int]] = {
    "ep2": (2, {"parallel": {"expert": 2}}, 0),
    "ep2 x tp2, ZeRO 1": (4, {"parallel": {"expert": 2, "tensor": 2, "probe": False}}, 1),
    "ep2 x etp2, ZeRO 3": (4, {"parallel": {"expert": 2, "expert_tensor": 2}}, 3),
    "pp2 x ep2": (4, {"parallel": {"pipeline": 2, "expert": 2}}, 0),
}


@dataclass(frozen=True)
class Fault:
    """A mistake in a run: a ``bit`` of a weight's mantissa, near its upper end, or the ``scale`` of an output."""

    kind: str
    name: str
    rank: int | None = None
    """The one rank that makes it; None: all of them, and a weight before it is sharded."""
    index: int = 5
    """The element of the weight, or of what is there of it."""

    def spoil(self, weight: torch.Tensor) -> None:
        flat = weight.detach().view(-1)
        one = flat[self.index : self.index + 1]
        kind, bit = (torch.int64, 50) if one.dtype == torch.float64 else (torch.int32, 21)
        one.copy_((one.cpu().view(kind) ^ (1 << bit)).view(one.dtype))

    def before(self, model: nn.Module) -> None:
        if self.kind != "scale" and self.rank is None:
            self.spoil(model.get_parameter(self.name))

    def after(self, model: nn.Module, rank: int) -> None:
        if self.rank not in (None, rank):
            return
        if self.kind == "scale":
            for name, module in model.named_modules():
                if name == self.name:  # It may be in another stage.
                    module.register_forward_hook(scaled)
        elif self.rank is not None:
            weight = model.get_parameter(self.name)
            with torch.no_grad(), allow_shard_access():
                self.spoil(getattr(weight, "ds_tensor", weight))


def scaled(module: nn.Module, args: object, out: object) -> object:
    if isinstance(module, PassThrough):
        return out
    return (out[0] * 1.001, *out[1:]) if isinstance(out, tuple) else out * 1.001


@dataclass(frozen=True)
class Setting:
    """All of a run but its layout."""

    family: str = "llama"
    dtype: torch.dtype = torch.float64
    padded: bool = False
    packed: bool = False
    adam: bool = False
    lora: bool = False
    checkpointing: bool = False
    """transformers' gradient checkpointing, reentrant."""
    what: str = "statistics"
    modules: tuple[str, ...] = ()
    section: str = "{}"
    """Further keys of the section, as JSON."""

    def model(self) -> nn.Module:
        changes: dict[str, object] = {"num_hidden_layers": BLOCKS}
        if self.family == "mixtral":
            changes["output_router_logits"] = False  # Its loss is a mean over micro-batches, which differ.
        model = tiny_models.tiny(self.family, torch.float32, **changes)
        if self.lora:
            targets = ["q_proj", "v_proj", "down_proj"]
            model = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets))
            generator = torch.Generator().manual_seed(4)
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    if "lora_" in name:
                        weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": True})
            model.enable_input_require_grads()
        return model.to(self.dtype).train()

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """A batch; padded: each sample has two tokens of padding; packed: each has documents of 3 and 7 tokens."""
        ids = torch.randint(3, 60, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))
        if self.padded:
            mask = torch.ones_like(ids)
            mask[:, -2:] = 0
            return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
        if self.packed:
            positions = torch.cat([torch.arange(3), torch.arange(7)]).expand(SAMPLES, -1)
            return {"input_ids": ids, "labels": ids, "position_ids": positions}
        return {"input_ids": ids, "labels": ids}

    def config(self, folder: str, section: dict, stage: int) -> dict:
        dump = {"steps": list(STEPS), "folder": folder, "what": self.what, "modules": list(self.modules)}
        config = dense.config(stage, self.dtype, {**section, **json.loads(self.section), "dump": dump})
        if self.adam:
            config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
        return config


PLAIN = Setting()


def train(folder: str, layout: tuple[int, dict, int], setting: Setting, fault: Fault | None) -> None:
    """Train one step of each of STEPS on this world and dump it."""
    import deepspeed

    rule.without_extension()
    _, section, stage = layout
    config = setting.config(folder, section, stage)
    dp = dist.get_world_size()
    for axis in ("tensor", "context", "pipeline"):
        dp //= section.get("parallel", {}).get(axis, 1)
    config["train_micro_batch_size_per_gpu"] = SAMPLES // dp // 2
    config["gradient_accumulation_steps"] = 2
    model = setting.model()
    if fault is not None:
        fault.before(model)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    if fault is not None:
        fault.after(engine.module, dist.get_rank())
    for step in range(max(STEPS) + 1):
        whole = setting.batch(step)
        rank = engine.topology.rank("dp")
        own = {name: each.view(2, dp, -1, LENGTH)[:, rank] for name, each in whole.items()}
        for index in range(2):
            with tiny_models.Float64() if setting.dtype == torch.float64 else nullcontext():
                loss = engine(**{name: each[index].to(engine.device) for name, each in own.items()}).loss
            engine.backward(loss)
            engine.step()


def dumped(folder: Path, layout: str, setting: Setting = PLAIN, fault: Fault | None = None) -> DumpedRun:
    """The dump of a run at one of LAYOUTS or EXPERTS; of the same run only one is made in ``folder``."""
    own = folder / hashlib.sha256(f"{layout} {setting} {fault}".encode()).hexdigest()[:12]
    if not own.exists():
        found = (LAYOUTS | EXPERTS)[layout]
        run_on_ranks(found[0], train, str(own), found, setting, fault)
    return DumpedRun(own)
