"""The routers of every family of transformers that has experts: found, their scores known, their logits raw."""

from __future__ import annotations

import decoder_families as families
import pytest
import tiny_models
import torch
from expert_families import FAMILIES

from ds_npu.features.experts.routing import collect_ids, collecting, correction_of, router_of
from ds_npu.features.modules.expert_layout import is_of_transformers

UNKNOWN = {"deepseek_v4"}
"""Some of its routers look experts up by the token."""
WITHOUT_SCORES = {"cohere2_moe", "phimoe", "inkling2_text"}
"""Their settings choose the scores, or it is another function."""
WITH_NO_EXPERT = {"zaya"}
"""Their routers score a further choice: no expert."""
SIGMOID = {"deepseek_v3", "glm4_moe", "minimax_m2", "dots1"}
SOFTMAX = {"mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe", "deepseek_v2"}
CORRECTED = {"deepseek_v3", "glm4_moe", "minimax_m2", "dots1", "hy_v3"}
QUICK = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "minimax_m2", "deepseek_v4")


@pytest.mark.matrix(corners=len(QUICK), drawn=3)
@pytest.mark.parametrize("kind", [*QUICK, *(each for each in FAMILIES if each not in QUICK)])
def test_the_router_beside_experts_is_found(kind):
    if not families.is_buildable(kind):
        pytest.skip("no tiny model of it can be made from the sizes that all families share")
    model, calls, checked = families.made(kind), {}, 0
    for name, module in model.named_modules():
        if not is_of_transformers(module):
            continue
        router = router_of(model, name)
        assert (router is None) == (kind in UNKNOWN), name
        if router is None:
            continue
        assert (router.scores is None) == (kind in WITHOUT_SCORES)
        assert kind not in SIGMOID or router.scores == "sigmoid"
        assert kind not in SOFTMAX or router.scores == "softmax"
        count = module.down_proj.shape[0]
        assert kind not in CORRECTED or correction_of(model, name, count) is not None
        module.register_forward_pre_hook(lambda _, args, n=name: calls.setdefault(n, {}).update(ids=args[1]))
        router.module.register_forward_hook(
            lambda _, args, out, n=name, r=router: calls.setdefault(n, {}).update(logits=out[r.index])
        )
        calls[name], checked = {"experts": count}, checked + 1
    ids = tiny_models.tokens(families.SAMPLES, families.LENGTH)
    try:
        model(input_ids=ids)
    except RuntimeError:
        pytest.skip("transformers itself cannot compute the tiny model")
    for name, call in calls.items():
        assert call["logits"].shape == (len(call["ids"]), call["experts"] + (kind in WITH_NO_EXPERT)), name
        sums = call["logits"].double().sum(1)
        assert not torch.allclose(sums, torch.ones_like(sums)), f"{name}: scores, not logits"
    assert checked or kind in UNKNOWN or not any(map(is_of_transformers, model.modules()))


def test_a_token_that_chose_no_expert_is_counted_as_one_of_none():
    model, logits = families.made("zaya"), {}
    routers = {name: router_of(model, name) for name, each in model.named_modules() if name.endswith("mlp.experts")}
    for name, router in routers.items():
        # As likely to be chosen as an expert.
        router.module.balancing_biases.zero_()
        collect_ids(name, model.get_submodule(name))
        router.module.register_forward_hook(lambda _, args, out, n=name: logits.update({n: out[0].detach()}))
    with collecting() as collected:
        model(input_ids=tiny_models.tokens(families.SAMPLES, families.LENGTH))
    experts = model.config.num_experts
    expected = {name: each.softmax(-1).argmax(-1, keepdim=True) for name, each in logits.items()}
    assert len(routers) == 4 and any((each == experts).any() for each in expected.values())
    for name in routers:
        assert collected.ids[name][0].equal(expected[name]), name
