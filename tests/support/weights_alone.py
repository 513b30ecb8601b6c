"""Loads of a checkpoint's weights without the state of their optimizer, each held to a run that begins with them."""

from __future__ import annotations

from pathlib import Path

import gradient_rule as rule
import kept_state as rig
import pytest
import tiny_models
import torch
import torch.distributed as dist
from kept_state import Case
from torch import nn

from ds_npu.checkpoint.files import CheckpointError
from ds_npu.checkpoint.manifest import manifest_path

CALLS: tuple[dict[str, bool], ...] = ({"load_optimizer_states": False}, {"load_module_only": True})
FORMS: dict[str, dict[str, object]] = {
    "plain": {},
    "shared": {"share_fp32": True},
    "swapped": {"swap": True},
    "both": {"share_fp32": True, "swap": True, "resident_gib": 6e-5},
    "bf16": {"moments": "bf16", "swap": True},
    "int8": {"moments": "int8", "share_fp32": True},
}


def model_of(case: Case) -> nn.Module:
    return tiny_models.tiny(case.family, torch.float32).to(torch.bfloat16)


def saved(case: Case, folder: str) -> dict[str, torch.Tensor]:
    """The whole weights of a run at tag ``first``; the latest tag is another one, of other weights."""
    engine = rig.engine_of(case, {})
    rig.train(engine)
    engine.save_checkpoint(folder, tag="first")
    weights = {name: each.clone() for name, each in engine.whole_weights()}
    rig.train(engine, rig.STEPS)
    engine.save_checkpoint(folder, tag="second")
    return weights


def begins_with(case: Case, memory: dict[str, object], weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """What is trained from ``weights`` by an optimizer without a state."""
    model = model_of(case)
    model.load_state_dict(weights)
    engine = rig.engine_of(case, memory, model)
    return [*rig.train(engine), *rig.weights_of(engine)]


def loads(case: Case, folder: str, forms: tuple[str, ...], written: Case | None = None) -> None:
    """Load a checkpoint that ``written`` (``case`` without it) wrote, in each form of memory and by each call."""
    rule.without_extension()
    weights = saved(written or case, folder)
    for form in forms:
        expected = begins_with(case, FORMS[form], weights)
        for call in CALLS:
            where = (case, form, call)
            engine = rig.engine_of(case, FORMS[form])
            path, _ = engine.load_checkpoint(folder, "first", **call)
            assert path is not None, where
            found = dict(engine.whole_weights())
            assert all(torch.equal(found[name], each) for name, each in weights.items()), where
            assert rig.alike([*rig.train(engine), *rig.weights_of(engine)], expected), where
            # Masters of weights that had been trained before are not written back.
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.0
            engine.load_checkpoint(folder, "first", **call)
            rig.train(engine, steps=1)
            found = dict(engine.whole_weights())
            assert all(torch.equal(found[name], each) for name, each in weights.items()), where
        dist.barrier()


def without_manifests(case: Case, folder: str) -> None:
    """Under ZeRO 3 DeepSpeed alone loads nothing, or the latest weights: refused, and the model stays as it was."""
    rule.without_extension()
    saved(case, folder)
    engine = rig.engine_of(case, {})
    before = rig.weights_of(engine)
    dist.barrier()
    manifest_path(Path(folder, "first"), dist.get_rank()).unlink()
    dist.barrier()
    for call in CALLS:
        with pytest.raises(CheckpointError, match=r"no manifests .* under ZeRO 3 without the optimizer"):
            engine.load_checkpoint(folder, "first", **call)
    assert rig.alike(rig.weights_of(engine), before)
