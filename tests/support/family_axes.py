"""What each axis makes of each decoder on the list, as a config asks for it: ``deepspeed.initialize`` and a step.

    python tests/support/family_axes.py [--axes tensor,context] RESULTS.json [FAMILY ...]

tries a tiny model of each family, in float64 on the CPU, against one process, and writes what it saw: ``yes``,
``refused: <the message>``, ``wrong: <what, by how much>``, ``error: <what was raised>`` or ``not built: <why>``.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import decoder_families as families
import gradient_rule as rule
import tensor_parallel_rule as dense
import tiny_models
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch import nn
from transformers import PreTrainedConfig

LIST = Path(__file__).parent / "causal_decoders.json"
SAMPLES, LENGTH = 2, 12
EXACT = 1e-12
DEADLINE_S = 150.0


@dataclass(frozen=True)
class Setting:
    """A section of a config, the ranks that it needs, ZeRO's stage, and batches of a step on each data rank."""

    section: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    zero: int = 0
    accumulation: int = 1

    @property
    def data(self) -> int:
        """The ranks that have other batches."""
        parallel = self.section["parallel"]
        return self.ranks // math.prod(parallel.get(axis, 1) for axis in ("tensor", "context", "pipeline"))


AXES = {
    "tensor": Setting({"parallel": {"tensor": 2}}),
    "context": Setting({"parallel": {"context": 2}}),
    "stages": Setting({"parallel": {"pipeline": 2}, "pipeline": {"micro_batches": 2}}),
}
"""The columns of the table in docs/models.md."""
RING = {"context_parallel": {"algorithm": "ring"}}
FURTHER = {
    "sequence": Setting({"parallel": {"tensor": 2, "sequence_parallel": True}}),
    "tensor, ZeRO 1": Setting({"parallel": {"tensor": 2}}, zero=1),
    "tensor, ZeRO 3": Setting({"parallel": {"tensor": 2}}, ranks=4, zero=3),
    "ring": Setting({"parallel": {"context": 2}} | RING),
    "ulysses": Setting({"parallel": {"context": 2}, "context_parallel": {"algorithm": "ulysses"}}),
    "context, ZeRO 3": Setting({"parallel": {"context": 2}}, zero=3),
    "tensor and context": Setting({"parallel": {"tensor": 2, "context": 2}}, ranks=4),
    "stages, ZeRO 1": Setting({"parallel": {"pipeline": 2}, "pipeline": {"micro_batches": 2}}, zero=1),
    "stages, data, ZeRO 1": Setting(
        {"parallel": {"pipeline": 2}, "pipeline": {"micro_batches": 2}}, ranks=4, zero=1, accumulation=2
    ),
    "experts": Setting({"parallel": {"expert": 2}}),
    # The third micro-batch is gathered as planned by the first ones, whose tokens differ between ranks.
    "data, ZeRO 3": Setting({"parallel": {}}, zero=3, accumulation=3),
}
SETTINGS = AXES | FURTHER
ON = {
    **dict.fromkeys(("sequence", "tensor, ZeRO 1", "tensor, ZeRO 3"), ("tensor",)),
    **dict.fromkeys(("ring", "ulysses", "context, ZeRO 3"), ("context",)),
    "tensor and context": ("tensor", "context"),
    **dict.fromkeys(("stages, ZeRO 1", "stages, data, ZeRO 1"), ("stages",)),
    **dict.fromkeys(("experts", "data, ZeRO 3"), ()),
}
"""The axes that a further setting is one of: a family with yes for each of them has to be right with it, too."""


def decoders() -> dict[str, str]:
    """The class of each family on the list."""
    return dict(json.loads(LIST.read_text())["decoders"])


def further(kind: str, recorded: dict[str, str]) -> list[str]:
    """The further settings of the family ``kind`` whose outcomes on the axes are ``recorded``."""
    right = [name for name, axes in ON.items() if all(recorded.get(axis) == "yes" for axis in axes)]
    return [name for name in right if name != "experts" or (has_experts(kind) and "yes" in recorded.values())]


def has_experts(kind: str) -> bool:
    """Whether the configuration of the family ``kind`` counts some."""
    config = families.config_of(kind).get_text_config()
    parts = [config, *(each for each in vars(config).values() if isinstance(each, PreTrainedConfig))]
    numbers = (each for part in parts for each in vars(part).items())
    return any("expert" in name and type(value) is int and value > 0 for name, value in numbers)


def outcome(kind: str, setting: Setting, plan: dict[str, str] | None = None) -> str:
    """What the engine makes of the family ``kind`` with ``setting``; every rank of the world calls it."""
    import deepspeed

    rule.without_extension()
    batches = tiny_models.tokens(SAMPLES * setting.data * setting.accumulation, LENGTH).split(SAMPLES)
    given = [{"input_ids": ids, "labels": ids} for ids in batches]
    plain = families.made(kind)
    try:
        expected = one_process(plain, given)
    except Exception as error:
        return f"not built: one process: {told(error)}"
    section = setting.section | ({"plan": plan} if plan else {})
    config = rule.config(setting.zero, torch.float64, {}, stage3_param_persistence_threshold=0)
    config |= {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": setting.accumulation,
        "ds_npu": rule.ON_NPUS | section,
    }
    config["gradient_clipping"] = 0.0
    model = families.made(kind)
    try:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    except Exception as error:
        return refused(error, "")
    rank = engine.topology.rank("dp")
    mine = given[rank * setting.accumulation : (rank + 1) * setting.accumulation]
    return compared(engine, mine, plain, expected[rank * setting.accumulation : (rank + 1) * setting.accumulation])


def one_process(plain: nn.Module, given: list[dict[str, torch.Tensor]]) -> list[float]:
    """The loss of each batch; ``plain`` gets the mean of their gradients."""
    losses = [families.step(plain, batch) for batch in given]
    for weight in plain.parameters():
        if weight.grad is not None:
            weight.grad /= len(given)
    return losses


def compared(engine: Any, given: list[dict[str, torch.Tensor]], plain: nn.Module, expected: list[float]) -> str:
    """The losses and the gradients of ``engine`` against those of ``plain``, which has done its backward."""
    model, topology = engine.module, engine.topology
    losses = []
    try:
        for index, batch in enumerate(given):
            losses.append(backward(engine, batch))
            if index < len(given) - 1:
                engine.step()
    except Exception as error:
        return refused(error, "at the first step, ")
    gradients = rule.reduced_gradients(engine, model)
    named = dict(model.named_parameters())
    whole = {name: dense.assembled(topology, named[name], part).clone() for name, part in gradients.items()}
    every: list[Any] = [None] * topology.size("pp")
    dist.all_gather_object(every, whole, group=topology.group("pp"))
    whole = {name: value for each in every for name, value in each.items()}
    problems = list(differences(plain, whole, losses, expected))
    if problems:
        return f"wrong: {problems[0]}"
    if topology.size("tp") > 1:
        left = sorted(unsharded(model))
        if left:
            return f"partly: not sharded {', '.join(left)}"
    return "yes"


def backward(engine: Any, given: dict[str, torch.Tensor]) -> float:
    """The loss, after its backward."""
    with tiny_models.Float64():
        loss = loss_of(engine, given)
        engine.backward(loss)
    return float(loss.detach())


def loss_of(engine: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a forward with what is ``given``, and with positions where ds_npu asks for them."""
    try:
        loss: torch.Tensor = engine(**given).loss
    except ValueError as error:
        if "What to do: give it position_ids" not in str(error):
            raise
        samples, length = given["input_ids"].shape
        loss = engine(**given, position_ids=torch.arange(length).expand(samples, -1)).loss
    return loss


def differences(plain: nn.Module, found: dict[str, torch.Tensor], losses: list[float], expected: list[float]) -> Any:
    for loss, other in zip(losses, expected, strict=True):
        if not abs(loss / other - 1) <= EXACT:
            yield f"loss {loss} instead of {other}"
    graded = {name: each.grad for name, each in plain.named_parameters() if each.grad is not None}
    # The gradients of a key's bias are 0 but for rounding.
    floor = 1e-3 * max(float(each.abs().max()) for each in graded.values())
    worst = (0.0, "")
    for name, gradient in graded.items():
        other = found.get(name)
        if other is None:
            if float(gradient.abs().max()) > 0:
                yield f"no gradient of {name}"
            continue
        if other.shape != gradient.shape:
            yield f"{name}: a gradient {list(other.shape)} instead of {list(gradient.shape)}"
            continue
        largest = max(float(gradient.abs().max()), floor)
        worst = max(worst, (float((other - gradient).abs().max()) / largest, name))
    if not worst[0] <= EXACT:
        yield f"{worst[1]} by {worst[0]:.1e}"


def unsharded(model: nn.Module) -> set[str]:
    """Parts of blocks that hold matrices of which none is sharded over the tensor ranks, with * for indices."""
    from ds_npu.models import names
    from ds_npu.parallel.runtime.placement import placement_of

    decoder = model.get_decoder()
    left = set()
    for stack in (each for each in decoder.modules() if isinstance(each, nn.ModuleList)):
        for block in stack:
            for name, part in block.named_children():
                # A few columns of a linear that stands in the block itself (Gemma 4) are no attention and no MLP.
                matrices = [] if isinstance(part, nn.Linear) else [each for each in part.parameters() if each.dim() > 1]
                if matrices and not any("tp" in placement_of(each).sharded for each in matrices):
                    left.add(names.generic(f"{name} ({type(part).__name__})"))
        break
    return left


def told(error: BaseException) -> str:
    text = re.sub(r"/\S*/(site-packages/|(?=ds_npu/))", "", f"{type(error).__name__}: {error}")
    return " ".join(text.split())[:1200]


def refused(error: Exception, when: str) -> str:
    if families.is_ours(error):
        return f"refused: {when}{told(error)}"
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"error: {when}{told(error)} ({Path(where.filename).name}:{where.lineno})"


def record(kind: str, names: list[str], path: str) -> None:
    """Write each outcome to ``path`` as soon as it is known."""
    found = {}
    for name in names:
        found[name] = outcome(kind, SETTINGS[name])
        if dist.get_rank() == 0:
            Path(path).write_text(json.dumps(found))


def outcomes(kind: str, names: list[str]) -> dict[str, str]:
    """The outcome of each of the settings ``names``, which need equally many ranks, in one world."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        why = "nothing was recorded"
        try:
            run_on_ranks(SETTINGS[names[0]].ranks, record, kind, names, str(path), deadline_s=DEADLINE_S)
        except Exception as error:
            why = told(error)[-300:]
        found = dict(json.loads(path.read_text())) if path.exists() else {}
    missing = [name for name in names if name not in found]
    if not missing:
        return found
    found[missing[0]] = f"error: {why}"
    return found | (outcomes(kind, missing[1:]) if missing[1:] else {})


def tried(kind: str, names: list[str]) -> dict[str, str]:
    """The outcome of each of the settings ``names``."""
    try:
        families.check_buildable(kind)
    except Exception as error:
        return dict.fromkeys(names, f"not built: {told(error)[:200]}")
    found: dict[str, str] = {}
    for ranks in sorted({SETTINGS[name].ranks for name in names}):
        found |= outcomes(kind, [name for name in names if SETTINGS[name].ranks == ranks])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--axes", default=",".join(AXES), help="or further: all that the recorded outcomes ask for")
    parser.add_argument("--commit", help="its name, where this is no checkout")
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    results = json.loads(options.results.read_text()) if options.results.exists() else {"outcomes": {}, "further": {}}
    for kind in options.families or decoders():
        begun = time.perf_counter()
        recorded = results["outcomes"].get(kind, {})
        is_further = options.axes == "further"
        found = tried(kind, further(kind, recorded) if is_further else options.axes.split(","))
        told_of = results["further" if is_further else "outcomes"].setdefault(kind, {})
        told_of.update(found | {"commit": options.commit or commit.stdout.strip()})
        options.results.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{kind} ({time.perf_counter() - begun:.0f} s)", *(f"\n  {k}: {v}" for k, v in found.items()), flush=True)


if __name__ == "__main__":
    main()
