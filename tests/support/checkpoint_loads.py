"""Checkpoints drawn over layouts, ZeRO, keys, frozen weights, groups and adapters, and calls that load them.

The reference is plain PyTorch in one process: a model takes a step; what a call is to load goes by name to the model of
the second run, which takes two more.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import deepspeed
import gradient_rule as rule
import layout_lives as lives
import peft
import pytest
import tensor_parallel_rule as dense
import tiny_models
import torch
import torch.distributed as dist
from torch import nn

from ds_npu.checkpoint.files import CheckpointError
from ds_npu.checkpoint.written import WrittenCheckpoint
from ds_npu.engine.checkpoints.written_files import CLASSES
from ds_npu.parallel.tensor.shard_access import allow_shard_access

Section = dict[str, object]


def over(**parallel: int) -> Section:
    ring = {"context_parallel": {"algorithm": "ring"}} if "context" in parallel else {}
    return {"parallel": parallel} | ring


LAYOUTS: dict[str, list[Section]] = {
    "llama": [{}, over(tensor=2), over(context=2), over(pipeline=2)],
    "qwen2": [{}, over(tensor=2), over(pipeline=2)],
    "mixtral": [{}, over(tensor=2), over(expert=2), over(expert_tensor=2)],
    "qwen3_moe": [{}, over(expert=2), over(tensor=2, expert=2), over(pipeline=2)],
}
"""Of two ranks."""
KEYS: list[Section] = [
    {},
    {"optimizer_memory": {"share_fp32": True, "swap": True}},
    {"swap": {"activations": True}},
    {"chunked_loss": 8},
    {"zero": {"offload_optimizer": {"device": "cpu"}}},
]
FROZEN = ["", "embed_tokens", "mlp", "lora"]
CALLS = ["whole", "without states", "module only", "not strict", "strict, frozen left out", "another model"]
OTHERS: list[dict[str, int]] = [
    {"intermediate_size": 40},
    {"vocab_size": 60},
    {"vocab_size": 128},
    {"num_hidden_layers": 2},
    {"num_hidden_layers": 6},
    {"num_key_value_heads": 2},
]
"""Other models."""
LAYERS = 4


@dataclass(frozen=True)
class Run:
    """A run that saves, or loads."""

    stage: int
    section: Section
    changes: dict[str, int] = field(default_factory=dict)
    """Of the model."""


@dataclass(frozen=True)
class Case:
    family: str
    writer: Run
    reader: Run
    call: str
    frozen: str = ""
    """Parts of names; "lora": all but PEFT's adapters."""
    groups: int = 1

    @property
    def leaves_out_frozen(self) -> bool:
        return self.call in ("not strict", "strict, frozen left out")

    @property
    def is_weights_only(self) -> bool:
        return self.call in ("without states", "module only")

    @property
    def dtype(self) -> torch.dtype:
        """optimizer_memory keeps states beside weights in 16 bits."""
        is_kept = any("optimizer_memory" in run.section for run in (self.writer, self.reader))
        return torch.bfloat16 if is_kept else torch.float32


def drawn(seed: object) -> Case:
    draw = random.Random(f"checkpoints {seed}")
    family = draw.choice(list(LAYOUTS))
    call = draw.choice(CALLS)
    frozen = draw.choice(FROZEN[1:] if "frozen" in call else FROZEN)
    if frozen == "lora" and family in tiny_models.OF_EXPERTS and "experts" in tiny_models.OF_EXPERTS[family][1]:
        frozen = "embed_tokens"
    changes = {}
    if call == "another model" or (call == "not strict" and draw.random() < 0.5):
        pool = [each for each in OTHERS if call == "another model" or "num_hidden_layers" in each]
        changes = draw.choice([each for each in pool if "num_key_value_heads" not in each or family == "llama"])
    return Case(
        family,
        run_of(draw, family, {}),
        run_of(draw, family, changes),
        call,
        frozen,
        draw.choice([1, 2]),
    )


def run_of(draw: random.Random, family: str, changes: dict[str, int]) -> Run:
    section = draw.choice(LAYOUTS[family])
    stage = draw.choice([0, 1, 2] if "pipeline" in section.get("parallel", {}) else [0, 1, 2, 3])
    key = draw.choice(KEYS)
    if stage == 0 and ("zero" in key or "optimizer_memory" in key):
        key = {}
    return Run(stage, section | key, changes)


def model_of(case: Case, run: Run) -> nn.Module:
    changes: dict[str, object] = {"num_hidden_layers": LAYERS} | run.changes
    if case.family in tiny_models.OF_EXPERTS and case.family not in ("llama", "qwen2"):
        changes["output_router_logits"] = False
    model = tiny_models.tiny(case.family, torch.float32, **changes)
    if case.frozen == "lora":
        torch.manual_seed(7)
        targets = ["q_proj", "o_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    elif case.frozen:
        for name, weight in model.named_parameters():
            weight.requires_grad_(case.frozen not in name)
    return model.train()


def groups_of(case: Case, model: nn.Module) -> list[dict[str, object]]:
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if case.groups == 1:
        return [{"params": list(trained.values())}]
    first = [each for name, each in trained.items() if "q_proj" in name or "norm" in name]
    others = [each for name, each in trained.items() if "q_proj" not in name and "norm" not in name]
    found = [{"params": first, "lr": 3e-3, "weight_decay": 0.0}, {"params": others}]
    return [each for each in found if each["params"]]


def engine_of(case: Case, run: Run):
    rule.without_extension()
    section = {**run.section}
    zero, parallel = section.pop("zero", {}), section.get("parallel", {})
    shared = parallel.get("tensor", 1) * parallel.get("pipeline", 1) * parallel.get("context", 1)
    config = dense.config(run.stage, case.dtype, section)
    if case.dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True}
    config |= {"optimizer": {"type": "AdamW", "params": lives.ADAM | {"torch_adam": True}}}
    config |= {"train_micro_batch_size_per_gpu": lives.SAMPLES * shared // dist.get_world_size()}
    config["gradient_accumulation_steps"] = 1
    config["zero_optimization"] = {**config["zero_optimization"], **zero}
    model = model_of(case, run).to(case.dtype)
    return deepspeed.initialize(model=model, model_parameters=groups_of(case, model), config=config)[0]


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    found = []
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for step in steps:
        loss = dense.loss_of(model, lives.tokens(step), torch.float32)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, rule.CLIP)
        optimizer.step()
        found.append(loss.item())
    return found


def expected_of(case: Case) -> list[float]:
    """The losses of the steps that follow the load."""
    first, second = model_of(case, case.writer), model_of(case, case.reader)
    optimizers = [torch.optim.AdamW(groups_of(case, model), **lives.ADAM) for model in (first, second)]
    plain_steps(first, optimizers[0], range(1))
    written = first.state_dict()
    if case.leaves_out_frozen:
        frozen = {name for name, weight in first.named_parameters() if not weight.requires_grad}
        written = {name: each for name, each in written.items() if name not in frozen}
    second.load_state_dict(written, strict=False)
    if case.call in ("whole", "not strict"):
        before = dict(first.named_parameters())
        for name, weight in second.named_parameters():
            if name in before and (state := optimizers[0].state.get(before[name])):
                optimizers[1].state[weight] = {key: each.clone() for key, each in state.items()}
    return plain_steps(second, optimizers[1], range(1, 3))


def arguments_of(case: Case) -> dict[str, bool]:
    return {
        "without states": {"load_optimizer_states": False},
        "module only": {"load_module_only": True},
        "not strict": {"load_module_strict": False},
    }.get(case.call, {})


def refusal_of(case: Case) -> str | None:
    """How the error begins; None for a load that is right."""
    if case.call == "another model":
        return r"does not fit .*(missing from the checkpoint|in the checkpoint only|of another shape)"
    if case.call == "strict, frozen left out":
        return r"missing from the checkpoint.*exclude_frozen_parameters=True.*load_module_strict=False"
    return None


def states_in(engine, with_masters: bool) -> list[torch.Tensor]:
    """Copies of this rank's tensors that a load writes to: weights, and those that its optimizer steps."""
    with allow_shard_access():
        found = [getattr(each, "ds_tensor", each).detach().clone() for each in engine.module.parameters()]
        if with_masters:
            found += [each.detach().clone() for each in engine.optimizer_layout.flats]
    return found


def same_states(engine, folder: str, weights_only: bool) -> None:
    """Save what was loaded, and compare float32 weights and moments with those of the first save, bit for bit.

    ``weights_only``: the masters are those of the weights in 16 bits, and there are no moments.
    """
    engine.save_checkpoint(folder, tag="again")
    before, after = (WrittenCheckpoint(Path(folder, tag), CLASSES) for tag in ("global_step1", "again"))
    trained = [name for name, weight in engine.module.named_parameters() if weight.requires_grad]
    names = [name for name in trained if name in before.plain_weights()]
    for name in names:
        if weights_only:
            assert after.value(name).equal(before.value(name).bfloat16().float()), name
            continue
        assert after.value(name).equal(before.value(name)), name
        states = [each.state(name) for each in (before, after)]
        assert {"exp_avg", "exp_avg_sq"} <= states[0].keys(), (name, states[0].keys())
        assert all(states[0][key].equal(states[1][key]) for key in ("exp_avg", "exp_avg_sq")), name
    assert names or not trained


def life(case: Case, folder: str) -> None:
    first = engine_of(case, case.writer)
    lives.step_of(first, 0, case.dtype)
    first.save_checkpoint(folder, exclude_frozen_parameters=case.leaves_out_frozen)
    engine = engine_of(case, case.reader)
    with_masters = "optimizer_memory" not in case.reader.section and engine.optimizer_layout is not None
    before = states_in(engine, with_masters)
    refusal = refusal_of(case)
    if refusal is not None:
        with pytest.raises(CheckpointError, match=refusal) as caught:
            engine.load_checkpoint(folder, **arguments_of(case))
        said: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(said, str(caught.value))
        assert len(set(said)) == 1 and "What to do:" in said[0], said
        after = states_in(engine, with_masters)
        with allow_shard_access():
            assert all(map(torch.equal, after, before))
        lives.step_of(engine, 1, case.dtype)
        return
    path, _ = engine.load_checkpoint(folder, **arguments_of(case))
    assert path is not None
    if case.dtype == torch.bfloat16:
        same_states(engine, folder, case.is_weights_only)
        return
    # Adam counts one number of steps for all that ZeRO's flat partition holds, also for weights that begin anew.
    has_new = case.reader.changes.get("num_hidden_layers", 0) > LAYERS and case.reader.stage > 0
    for step, expected in enumerate(expected_of(case)[: 1 if has_new else 2], 1):
        mean = lives.step_of(engine, step, torch.float32)
        assert abs(mean / expected - 1) <= lives.BOUND, (step, mean, expected)


def lead(cases: list[Case], folder: str) -> None:
    """All ``cases`` in one world."""
    for index, case in enumerate(cases):
        try:
            life(case, str(Path(folder, f"{index}")))
        except BaseException as error:
            raise AssertionError(f"{case}") from error
        dist.barrier()


def other_dtypes(folder: str) -> None:
    """Float32 weights and moments go over between runs in float32 and in bf16, at the same layout, too."""
    bf16 = {"bf16": {"enabled": True}}
    for stage, section in ((0, {}), (1, {}), (3, {}), (2, over(tensor=2))):
        for index, kinds in enumerate(((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32))):
            where = f"{folder}/{stage}-{index}"
            for number, dtype in enumerate(kinds):
                keys = bf16 if dtype == torch.bfloat16 else {}
                engine = lives.engine_of("llama", stage, section, dtype, **keys)
                if number == 0:
                    lives.step_of(engine, 0, dtype)
                    engine.save_checkpoint(where)
                else:
                    engine.load_checkpoint(where)
                    same_states(engine, where, weights_only=False)
                    lives.step_of(engine, 1, dtype)
