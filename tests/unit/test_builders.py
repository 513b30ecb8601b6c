"""The operator builders: none lost, none raising without CANN, each with its reason; and Adam against its formula."""

from __future__ import annotations

import inspect
import math
import pkgutil

import npu_double
import pytest
import torch
from deepspeed.ops.op_builder import npu

from ds_npu.ops import builders
from ds_npu.ops.builders import builder
from ds_npu.ops.builders.fused_adam import NpuFusedAdam

BETAS, EPS = (0.9, 0.999), 1e-8


def own_classes():
    return {name: value for name, value in inspect.getmembers(builders, inspect.isclass) if name.endswith("Builder")}


@pytest.fixture(autouse=True)
def known_processor(monkeypatch):
    """py-cpuinfo takes more than a second per question, and builders ask it several times."""
    monkeypatch.setattr("cpuinfo.get_cpu_info", lambda: {"arch": "X86_64", "flags": []})


OPERATORS = {name: value for name, value in own_classes().items() if name != "ModuleBuilder"}


@pytest.fixture(params=[None, "/nowhere/at/all", "empty"], ids=["unset", "nowhere", "empty"])
def home(request, monkeypatch, tmp_path):
    """ASCEND_HOME_PATH in the three ways in which it is of no use."""
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    if request.param:
        monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path) if request.param == "empty" else request.param)
    return request.param


def test_no_builder_of_deepspeed_is_lost():
    from deepspeed.ops.op_builder import npu

    theirs = {name: value for name, value in inspect.getmembers(npu, inspect.isclass) if name.endswith("Builder")}
    assert set(theirs) <= set(OPERATORS)
    assert {name for name, value in theirs.items() if not issubclass(OPERATORS[name], value)} == set()
    assert {name for name, value in theirs.items() if OPERATORS[name].NAME != value.NAME} == set()


@pytest.mark.parametrize("name", OPERATORS)
def test_a_builder_without_cann_can_be_made_and_asked(home, name):
    made = OPERATORS[name]()
    for ask in (made.include_paths, made.cxx_args, made.extra_ldflags, made.sources, made.absolute_name):
        ask()
    assert bool(made.why_not()) is not made.is_compatible()


def test_why_a_builder_says_no(home, monkeypatch):
    npu_double.install(monkeypatch)
    assert builders.FusedAdamBuilder().why_not() == ""
    assert "no NPU implementation" in builders.NotImplementedBuilder().why_not()
    reason = builders.CPUAdamBuilder().why_not()
    assert {
        None: "ASCEND_HOME_PATH is not set" in reason,
        "/nowhere/at/all": "'/nowhere/at/all' is no folder" in reason,
        "empty": reason == "",
    }[home]


def test_why_a_builder_says_no_without_a_compiler(monkeypatch, tmp_path):
    npu_double.install(monkeypatch)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setattr(builder.shutil, "which", lambda program: None if program == "ninja" else program)
    assert "ninja" in builders.CPULionBuilder().why_not()
    assert "ninja" in builders.PinMemoryBuilder().why_not()
    assert builders.InferenceBuilder().why_not() == ""


@pytest.mark.parametrize("name", ["FusedLambBuilder", "FusedLionBuilder", "QuantizerBuilder"])
def test_a_builder_that_only_later_versions_of_deepspeed_have(name, monkeypatch):
    npu_double.install(monkeypatch)
    made = vars(builders)[name]()
    if name in vars(npu):
        assert (made.why_not(), made.sources(), vars(npu)[name] in type(made).__mro__) == ("", [], True)
    else:
        assert "no NPU implementation" in made.why_not()
        with pytest.raises(ValueError, match="not been implemented on NPU"):
            made.load()
    monkeypatch.delattr(npu, name, raising=False)
    assert builder.upstream(name) is builders.NotImplementedBuilder


@pytest.mark.parametrize("found", [True, False])
def test_why_asynchronous_io_says_no(monkeypatch, tmp_path, found):
    npu_double.install(monkeypatch)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    made = builders.AsyncIOBuilder()
    made.has_function = lambda *_, **__: found
    assert made.is_compatible() is found
    assert ("libaio" in made.why_not()) is not found


def test_a_reason_does_not_outlive_its_cause(monkeypatch, tmp_path):
    npu_double.install(monkeypatch)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    made = builders.CPUAdamBuilder()
    assert made.why_not()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert made.why_not() == ""
    assert made.error_log is None


def test_a_reason_is_printed_where_ds_report_asks_for_it(monkeypatch, capsys):
    npu_double.install(monkeypatch)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    made = builders.CPUAdamBuilder()
    assert made.is_compatible(verbose=False) is False
    assert capsys.readouterr().out == ""
    assert made.is_compatible(verbose=True) is False
    assert "cpu_adam: ASCEND_HOME_PATH is not set" in capsys.readouterr().out


def test_a_refused_build_tells_the_reason(monkeypatch):
    npu_double.install(monkeypatch)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    with pytest.raises(RuntimeError, match=r"cpu_adam.*ASCEND_HOME_PATH is not set.*set_env\.sh"):
        builders.CPUAdamBuilder().jit_load(verbose=False)


def test_cann_reaches_the_compiler(monkeypatch, tmp_path):
    npu_double.install(monkeypatch)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert "-D__DISABLE_CANN__" in builders.CPUAdamBuilder().cxx_args()
    (tmp_path / "version.info").write_text("Version=8.5.0\n")
    made = builders.CPUAdamBuilder()
    assert "-D__ENABLE_CANN__" in made.cxx_args()
    assert str(tmp_path / "include") in made.include_paths()
    assert "/double/torch_npu/include" in made.include_paths()


def test_an_unknown_operator_raises_only_when_loaded():
    with pytest.raises(ValueError, match="not been implemented"):
        builders.NotImplementedBuilder().load()
    assert builders.NotImplementedBuilder("ragged").name == "ragged"


class _Json(builder.ModuleBuilder):
    NAME, MODULE = "json", "json"


class _Picky(_Json):
    def missing(self):
        return super().missing() or "this machine is too small"


def test_a_module_builder_loads_its_module(monkeypatch):
    import json

    npu_double.install(monkeypatch)
    assert _Json().load() is json
    assert (_Json().sources(), _Json().cxx_args()) == ([], [])
    with pytest.raises(RuntimeError, match="operator json cannot be loaded: this machine is too small"):
        _Picky().load()


def test_the_modules_show_deepspeed_only_their_own_builders():
    for module in pkgutil.iter_modules(builders.__path__):
        if module.name != "builder":
            names = vars(__import__(f"{builders.__name__}.{module.name}", fromlist=["*"]))
            assert {name for name in names if name.endswith("Builder")} <= set(OPERATORS)


def test_deepspeed_lists_exactly_these_operators():
    """all_ops of the real DeepSpeed, as ds_report and git_version_info read it, with our accelerator chosen."""
    done = npu_double.python(
        """
        import importlib, logging
        import deepspeed
        from deepspeed.accelerator import set_accelerator
        import ds_npu
        from deepspeed.accelerator.npu_accelerator import NPU_Accelerator as NpuAccelerator
        set_accelerator(NpuAccelerator())
        from deepspeed.ops.op_builder import all_ops
        from deepspeed import env_report
        names = importlib.reload(all_ops).ALL_OPS
        env_report.ALL_OPS = names
        env_report.op_report(verbose=False)
        print("listed", *sorted(names))
        """,
        DS_ACCELERATOR="cpu",
    )
    assert done.returncode == 0, done.stderr
    *_, listed = done.stdout.strip().split("\n")
    assert listed.split()[1:] == sorted(
        value.NAME for name, value in OPERATORS.items() if name != "NotImplementedBuilder"
    )
    assert "cpu_adam" in done.stdout and "deepspeed_not_implemented" not in done.stdout


def adam(grad, param, first, second, *, lr, step, w_mode, corrected, decay):
    """Adam of Kingma and Ba (2015) and AdamW of Loshchilov and Hutter (2019), in Python's float64."""
    if not w_mode:
        grad = grad + decay * param
    first = BETAS[0] * first + (1 - BETAS[0]) * grad
    second = BETAS[1] * second + (1 - BETAS[1]) * grad * grad
    scale1, scale2 = (1 - BETAS[0] ** step, 1 - BETAS[1] ** step) if corrected else (1.0, 1.0)
    update = (first / scale1) / (math.sqrt(second / scale2) + EPS)
    return param - lr * update - (lr * decay * param if w_mode else 0.0), first, second


def run(tensors, flag=None, *, lr=1e-2, step=1, w_mode=1, corrected=1, decay=0.1):
    flag = torch.zeros(1, dtype=torch.int32) if flag is None else flag
    lists = [[tensors[kind]] for kind in ("grad", "param", "first", "second")]
    NpuFusedAdam.multi_tensor_adam(2048 * 32, flag, lists, lr, *BETAS, EPS, step, w_mode, corrected, decay)


def fresh(dtype=torch.float64, size=5):
    generator = torch.Generator().manual_seed(0)
    made = {kind: torch.randn(size, generator=generator, dtype=dtype) for kind in ("grad", "param", "first", "second")}
    return {**made, "second": made["second"].abs()}


@pytest.mark.parametrize("w_mode", [0, 1])
@pytest.mark.parametrize("corrected", [0, 1])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("step", [1, 2, 1000])
def test_adam_is_its_formula(w_mode, corrected, decay, step):
    tensors = fresh()
    expected = [
        adam(*numbers, lr=1e-2, step=step, w_mode=w_mode, corrected=corrected, decay=decay)
        for numbers in zip(*(tensors[kind].tolist() for kind in ("grad", "param", "first", "second")), strict=True)
    ]
    run(tensors, step=step, w_mode=w_mode, corrected=corrected, decay=decay)
    got = torch.stack([tensors["param"], tensors["first"], tensors["second"]], dim=1)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)


def test_a_learning_rate_of_zero_changes_the_moments_only():
    tensors = fresh()
    before = tensors["param"].clone()
    run(tensors, lr=0.0)
    assert torch.equal(tensors["param"], before)
    assert not torch.equal(tensors["first"], fresh()["first"])


@pytest.mark.parametrize("step", [0, -3])
def test_a_step_below_one_is_refused(step):
    with pytest.raises(ValueError, match=f"step is {step}"):
        run(fresh(), step=step)


def test_the_overflow_flag_stops_the_update_and_only_while_it_is_set():
    flag = torch.zeros(1, dtype=torch.int32)
    tensors = fresh()
    tensors["grad"].fill_(math.inf)
    flag.fill_(1)
    run(tensors, flag)
    untouched = fresh()
    assert all(torch.equal(tensors[kind], untouched[kind]) for kind in ("param", "first", "second"))
    flag.zero_()
    run(tensors, flag)
    assert not torch.equal(tensors["first"], untouched["first"])
    flag.fill_(1)
    before = tensors["first"].clone()
    run(tensors, flag)
    assert torch.equal(tensors["first"], before)


def test_no_tensor_is_made_and_no_flag_is_read_again_per_call(monkeypatch):
    flag = torch.zeros(1, dtype=torch.int32)
    run(fresh(), flag)
    for maker in ("tensor", "full", "zeros", "as_tensor"):
        monkeypatch.setattr(torch, maker, lambda *_, **__: pytest.fail("a tensor is made in every call"))
    monkeypatch.setattr(torch.Tensor, "item", lambda _: pytest.fail("the host waits for the device in every call"))
    tensors = {kind: torch.arange(1.0, 4.0) for kind in ("grad", "param", "first", "second")}
    run(tensors, flag, step=2)
    run(tensors, flag, step=3, corrected=0)


def test_an_empty_list_is_no_error():
    flag = torch.zeros(1, dtype=torch.int32)
    NpuFusedAdam.multi_tensor_adam(2048, flag, [[], [], [], []], 1e-3, *BETAS, EPS, 1, 1, 1, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adam_w", [True, False])
def test_deepspeeds_optimizer_with_it_follows_torchs(monkeypatch, dtype, adam_w):
    from deepspeed.ops.adam import fused_adam as deepspeeds

    monkeypatch.setattr(deepspeeds, "FusedAdamBuilder", builders.FusedAdamBuilder)
    start = [torch.randn(7, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    ours = [torch.nn.Parameter(each.to(dtype)) for each in start]
    # float64, so that the comparison does not depend on how torch rounds.
    theirs = [torch.nn.Parameter(each.to(dtype).double()) for each in start]
    optimizer = deepspeeds.FusedAdam(ours, lr=1e-2, weight_decay=0.1, adam_w_mode=adam_w)
    reference = (torch.optim.AdamW if adam_w else torch.optim.Adam)(theirs, lr=1e-2, weight_decay=0.1)
    for number in range(5):
        for index, (own, other) in enumerate(zip(ours, theirs, strict=True)):
            grad = torch.randn(7, generator=torch.Generator().manual_seed(100 * number + index)).to(dtype)
            own.grad, other.grad = grad, grad.double()
        optimizer.step()
        reference.step()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.double(), other, rtol=tolerance, atol=tolerance)
