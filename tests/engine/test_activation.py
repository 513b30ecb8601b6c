"""ds_npu becomes active in every way it promises, stays out when told to, and never breaks an import."""

from __future__ import annotations

import importlib.metadata

import activation_probe
import npu_double
import pytest

from ds_npu.capability import SUPPORTED, Unavailable
from ds_npu.engine import activation, hooks, patches

ON = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}


@pytest.fixture
def installed(tmp_path):
    """A folder that makes ds_npu look installed, its entry point with it."""
    return activation_probe.hide_torch_npu(activation_probe.write_ours(tmp_path / "installed"))


def lines(done):
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


ORDERS = {
    "entry point: torch, deepspeed": "import torch, deepspeed",
    "entry point: deepspeed": "import deepspeed",
    "entry point: a part of deepspeed": "import deepspeed.runtime.config",
    "startup line: deepspeed": "import deepspeed",
    "by hand: ds_npu, deepspeed": "import ds_npu, deepspeed",
    "by hand: torch, ds_npu, deepspeed": "import torch, ds_npu, deepspeed",
    "by hand: deepspeed, ds_npu": "import deepspeed, ds_npu",
    "by hand: all of deepspeed, ds_npu": "import deepspeed, deepspeed.env_report\n"
    "import deepspeed.accelerator.npu_accelerator, ds_npu",
}


RARE = {"entry point: a part of deepspeed", "by hand: torch, ds_npu, deepspeed", "by hand: all of deepspeed, ds_npu"}


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.slow) if way in RARE else way for way in ORDERS])
def test_every_patch_is_in_force(way, installed, tmp_path):
    code = f"{ORDERS[way]}\nimport activation_probe\nprint(activation_probe.active(), activation_probe.unpatched())"
    if way.startswith("entry point"):
        done = npu_double.python(code, installed, DS_ACCELERATOR="cpu", **ON)
    elif way.startswith("startup line"):
        done = npu_double.python(activation_probe.startup(tmp_path / "site") + code, DS_ACCELERATOR="cpu", **ON)
    else:
        done = npu_double.python(code, DS_ACCELERATOR="cpu")
    assert lines(done) == ["True []"]
    assert "[ds_npu]" not in done.stderr


def test_a_module_patched_in_the_middle_of_its_import_is_an_ordinary_module_afterwards(installed):
    code = "import deepspeed, types\nprint(deepspeed.__name__, type(deepspeed) is types.ModuleType)"
    assert lines(npu_double.python(code, installed, DS_ACCELERATOR="cpu", **ON)) == ["deepspeed True"]


@pytest.mark.parametrize("switch", ["DS_NPU_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"])
def test_switched_off_until_imported_by_hand(switch, installed, tmp_path):
    code = """
        import deepspeed, sys, activation_probe
        print(activation_probe.active(), [name for name in sys.modules if name.startswith("ds_npu")])
        print(deepspeed.initialize.__code__.co_filename == deepspeed.__file__)
        import ds_npu
        print(activation_probe.active(), activation_probe.unpatched())
    """
    code = activation_probe.startup(tmp_path / "site") + "\n".join(line.strip() for line in code.splitlines())
    done = npu_double.python(code, installed, DS_ACCELERATOR="cpu", **{**ON, switch: "0"})
    assert lines(done) == ["False []", "True", "True []"]


def test_imported_by_hand_before_torch_it_stays_active_whatever_the_switch_says(installed):
    code = "import ds_npu, torch, activation_probe\nprint(activation_probe.active(), activation_probe.unpatched())"
    done = npu_double.python(code, installed, DS_ACCELERATOR="cpu", DS_NPU_AUTOLOAD="0", **ON)
    assert lines(done) == ["True []"]


def test_importing_torch_imports_little_of_ds_npu_and_nothing_of_deepspeed(installed, tmp_path):
    code = """import torch, sys
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("ds_npu", "deepspeed", "pydantic")))"""
    done = npu_double.python(activation_probe.startup(tmp_path / "site") + code, installed, **ON)
    assert lines(done) == ["['ds_npu', 'ds_npu.engine', 'ds_npu.engine.activation']"]


def test_what_is_applied_to_other_projects_modules_imports_no_deepspeed():
    """Their scripts may not use it; the import contract does not see an import that moves out of a function."""
    code = """import importlib, pkgutil, sys, ds_npu.engine.clients as clients
names = [each.name for each in pkgutil.iter_modules(clients.__path__)]
for name in names: importlib.import_module(f"{clients.__name__}.{name}")
print(len(names) > 4, "deepspeed" in sys.modules)"""
    assert lines(npu_double.python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")) == ["True False"]


def test_what_activation_imports_is_in_every_interpreter_or_cheap():
    code = "import sys; before = set(sys.modules)\nimport ds_npu\nprint(sorted(set(sys.modules) - before))"
    known = {"__future__", "ds_npu", "ds_npu.engine", "ds_npu.engine.activation", "importlib", "types", "warnings"}
    assert set(eval(lines(npu_double.python(code))[0])) <= known | {
        "importlib._bootstrap",
        "importlib._bootstrap_external",
    }


@pytest.mark.parametrize(
    "damage",
    ["sys.modules['ds_npu.engine.patches'] = None", "sys.modules['ds_npu.engine.hooks'] = None"],
)
def test_damaged_it_raises_into_no_import(damage, installed):
    code = f"import sys; {damage}\nimport torch, deepspeed\nprint(deepspeed.initialize.__code__.co_filename)"
    done = npu_double.python(code, installed, DS_ACCELERATOR="cpu", **ON)
    assert lines(done)[0].endswith("deepspeed/__init__.py")
    said = [line for line in done.stderr.splitlines() if "[ds_npu]" in line]
    assert said
    assert all("ds_npu is not active" in line and "What to do: " in line for line in said)
    assert "Traceback" not in done.stderr


def test_an_error_of_the_entry_point_itself_is_a_warning(installed):
    code = """
        import ds_npu.engine.activation as activation
        def activate(): raise KeyError("broken")
        activation.activate = activate
        import torch
        print(torch.ones(1).item())
    """
    done = npu_double.python(code, installed, **ON)
    assert lines(done) == ["1.0"]
    assert done.stderr == "[ds_npu] WARNING: ds_npu is not active: KeyError: 'broken'\n"


def test_a_deepspeed_that_has_changed_is_a_warning_and_with_the_section_an_error():
    code = """
        import dataclasses, ds_npu.engine.patches as patches
        patches.PATCHES = tuple(
            dataclasses.replace(patch, parameters=("another",)) if patch.name == "PipelineParallelGrid"
            else dataclasses.replace(patch, name="Gone.__init__") if patch.name == "Init.__init__"
            else patch for patch in patches.PATCHES)
        import deepspeed
        try:
            deepspeed.initialize(model=None, config={"ds_npu": {}})
        except RuntimeError as error:
            print(error)
        try:
            deepspeed.initialize(model=None, config={"train_batch_size": 1})
        except AssertionError as error:
            print(error)
    """
    done = npu_double.python(code, DS_ACCELERATOR="cpu")
    refused, grid, init, plain = lines(done)
    assert refused == "the config asks for ds_npu, which cannot run here:"
    assert {" ".join(line.split()[:1]) for line in (grid, init)} == {
        "deepspeed.runtime.pipe.module.PipelineParallelGrid",
        "deepspeed.runtime.zero.partition_parameters.Gone.__init__",
    }
    assert any(line.endswith("it does not exist") for line in (grid, init))
    assert any("it has ('topology', 'process_group'" in line for line in (grid, init))
    assert plain == "deepspeed.initialize requires a model"
    assert done.stderr.count("a change that ds_npu needs was not made") == 2


def test_an_engine_that_gets_a_constructor_of_its_own_is_noticed(monkeypatch):
    import types

    patch = next(patch for patch in patches.PATCHES if patch.name == "DeepSpeedEngine.__new__")
    module = types.ModuleType("changed")
    module.DeepSpeedEngine = type("DeepSpeedEngine", (), {"__new__": staticmethod(lambda cls, x: object.__new__(cls))})
    monkeypatch.setattr(patches, "FAILED", [])
    monkeypatch.setattr(patches, "warn_once", lambda message: None)
    patches._apply(patch, module)
    version = importlib.metadata.version("deepspeed")
    assert f"deepspeed {SUPPORTED['deepspeed']}); in deepspeed {version} it has ('cls', 'x')" in patches.FAILED[0]


def test_the_finder_watches_exactly_the_modules_of_the_table():
    assert sorted(activation.PATCHED) == sorted({patch.module for patch in patches.PATCHES})


def test_a_late_import_on_an_npu_replaces_the_accelerator_and_the_builders(tmp_path):
    npu_double.write_package(tmp_path / "npu", body=npu_double.WORKING.format(devices=2))
    code = """
        import torch, torch_npu, deepspeed, deepspeed.env_report, sys
        from deepspeed.accelerator import get_accelerator
        before = get_accelerator()
        import ds_npu
        print(type(before).__name__, type(get_accelerator()).__name__)
        print([f"{module}.{key}" for module, found in list(sys.modules.items())
               if module.startswith("deepspeed.") and not module.startswith("deepspeed.ops.op_builder.npu")
               for key, value in vars(found).items()
               if key.endswith("Builder") and value.__module__.startswith("deepspeed.ops.op_builder.npu")])
        print(deepspeed.ops.adam.fused_adam.FusedAdamBuilder.__module__,
              {type(each).__module__.startswith("ds_npu.") for each in deepspeed.env_report.ALL_OPS.values()})
        import ds_npu.ops.builders.fused_adam, deepspeed.ops.op_builder.npu as definitions
        print(definitions.FusedAdamBuilder.__module__)
    """
    done = npu_double.python(code, tmp_path / "npu", ASCEND_HOME_PATH=str(tmp_path))
    accelerators, left, builders, definition = lines(done)
    assert accelerators == "NPU_Accelerator NpuAccelerator"
    assert left == "[]"
    assert builders == "ds_npu.ops.builders.fused_adam {True}"
    assert definition == "deepspeed.ops.op_builder.npu.fused_adam"


def test_a_late_import_leaves_an_accelerator_of_the_users_own_alone():
    code = """
        import deepspeed
        from deepspeed.accelerator import get_accelerator, set_accelerator
        from deepspeed.accelerator.npu_accelerator import NPU_Accelerator
        mine = type("Mine", (NPU_Accelerator,), {})()
        set_accelerator(mine)
        import ds_npu
        print(get_accelerator() is mine)
    """
    assert lines(npu_double.python(code, DS_ACCELERATOR="cpu")) == ["True"]


@pytest.fixture
def initialize():
    return hooks.initialize(lambda model=None, config=None: "trained")


@pytest.fixture
def idle_npus(monkeypatch):
    """A machine with NPUs, a torch_npu that cannot be imported, and no word from the user."""
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setattr(hooks, "ascend_hardware_present", lambda: True)
    monkeypatch.setattr(
        hooks, "torch_npu_importable", lambda: Unavailable("libhccl.so was not found", "source set_env.sh")
    )


def test_npus_that_torch_npu_cannot_reach_end_training_before_it_starts(idle_npus, initialize):
    with pytest.raises(RuntimeError, match=r"has Ascend NPUs.*libhccl.so was not found\. What to do: source") as caught:
        initialize()
    assert "DS_ACCELERATOR=cpu" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_cpu_of_a_machine_with_npus_can_be_asked_for(idle_npus, initialize, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert initialize() == "trained"


def test_the_cpu_of_a_machine_without_npus_needs_no_asking(idle_npus, initialize, monkeypatch):
    monkeypatch.setattr(hooks, "ascend_hardware_present", lambda: False)
    assert initialize() == "trained"


def test_a_cpu_that_the_script_has_set_although_torch_npu_works_is_its_choice(idle_npus, initialize, monkeypatch):
    monkeypatch.setattr(hooks, "torch_npu_importable", lambda: None)
    assert initialize() == "trained"
