"""The tests of models, checkpoints and clients with the oldest releases that ds_npu supports, in their environment.

The newest are those of ``make env``, with which every other test runs.
"""

from __future__ import annotations

import json

import client_runs
import pytest

from ds_npu.capability import SUPPORTED

pytestmark = client_runs.ONLY_EXHAUSTIVE
NAME = "oldest"
CODE = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
FILES = (
    "tests/unit/test_hf_attention.py",
    "tests/unit/test_loading.py",
    "tests/unit/test_loading_errors.py",
    "tests/unit/test_model_plan.py",
    "tests/unit/test_plan_peft.py",
    "tests/unit/test_stages.py",
    "tests/engine/test_pretrained.py",
    "tests/engine/test_zero_init.py",
    "tests/engine/test_context_models.py",
    "tests/engine/test_context_uses.py",
    "tests/engine/test_sharded_model_uses.py",
    "tests/ranks/test_adapters.py",
    "tests/ranks/test_fused.py",
    "tests/ranks/test_sharded_models.py",
    "tests/clients/test_clients_saving.py",
    "tests/clients/test_clients_zero_init.py",
)


def test_the_environment_has_the_oldest_releases():
    names = ("transformers", "accelerate", "peft", "trl")
    found = json.loads(client_runs.run_in(NAME, ["python", "-c", CODE, *names]))
    assert found == {name: SUPPORTED[name].oldest for name in names}


@pytest.mark.parametrize("file", FILES)
def test_with_the_oldest_releases(file):
    client_runs.run_in(NAME, ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", file], EXHAUSTIVE="0")
