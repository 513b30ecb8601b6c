"""``ds_npu accept`` without an NPU: its cases, what its checks can see, worlds that break, the file, the summary."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import socket
import sys
import time
from argparse import Namespace
from pathlib import Path

import acceptance_double as double
import pytest
import torch
from torch import nn

from ds_npu.acceptance import machine, one_process, operators, record, training, world
from ds_npu.acceptance.case import GROUP_NAMES, Case, Check, Scope
from ds_npu.acceptance.collective_cases import FOR_EACH_RANK, KINDS, collective_cases
from ds_npu.acceptance.groups import GROUPS
from ds_npu.acceptance.machine import Npus, without_names
from ds_npu.acceptance.operator_cases import attention_output, operator_cases
from ds_npu.acceptance.record import is_clean, verdict
from ds_npu.acceptance.training_cases import (
    LARGE_SIZES,
    SMALL_SIZES,
    STEPS,
    TrainingCase,
    TrainingRecipe,
    training_cases,
)
from ds_npu.acceptance.world import CaseResult, run_group
from ds_npu.capability.releases import CANN_OF_TORCH_NPU, PYTHON_OF_TORCH
from ds_npu.cli import accept, acceptance_run
from ds_npu.cli.main import main
from ds_npu.config.check import check
from ds_npu.config.parallel import ParallelSection
from ds_npu.ops.all import OPERATORS
from ds_npu.ops.attention import attention, kernel_refusal

ROOT = Path(__file__).parents[2]
SCOPES = [Scope(npus, small) for npus in (1, 2, 4, 8, 16) for small in (True, False)]
ATTENTION = (attention, attention_output)
NPUS = Npus(["Ascend910B2"] * 2, [64.0] * 2)


# ---- the cases ----


@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_names_are_unique_and_the_npus_are_there(scope):
    assert tuple(group.name for group in GROUPS) == GROUP_NAMES
    for group in GROUPS:
        cases = group.cases(scope)
        assert len({case.name for case in cases}) == len(cases)
        assert all(1 <= case.ranks <= scope.npus for case in cases)
        assert all(case.timeout_s <= 420 for case in cases)


def test_every_operator_has_cases():
    called = {case.call.function for case in GROUPS[0].cases(Scope(1, False)) if case.call}
    assert {each.name for each in OPERATORS} == {case.operator for case in GROUPS[0].cases(Scope(1, True))} - {""}
    # Attention's forward and backward are reached through autograd.
    missing = {each.name for each in OPERATORS if each not in called}
    assert missing == {"attention_forward", "attention_backward"}
    assert {"attention", "attention_output"} == {each.__name__ for each in called if hasattr(each, "__name__")}


def test_the_kernel_takes_every_attention():
    """A call that it does not take would compare the reference with itself."""
    seen = 0
    for case in operator_cases(Scope(1, False)):
        if case.dtype == torch.bfloat16 and case.call and case.call.function in ATTENTION:
            assert kernel_refusal(*case.call.args(case.dtype)) is None, case.name
            seen += 1
    assert seen == 19


def test_messages_are_larger_than_the_buffer(monkeypatch):
    for buffer_mib in (None, "512"):
        if buffer_mib:
            monkeypatch.setenv("HCCL_BUFFSIZE", buffer_mib)
        for kind in KINDS:
            own = [case for case in collective_cases(Scope(8, False)) if case.kind == kind and case.ranks == 8]
            largest = max(case.count * case.dtype.itemsize * (8 if kind in FOR_EACH_RANK else 1) for case in own)
            small = [case for case in own if case.buffer_mib]
            assert kind.endswith("of reals") or largest > int(buffer_mib or 200) * 2**20, kind
            assert all(case.count * case.dtype.itemsize > case.buffer_mib * 2**20 for case in small)


def test_every_axis_that_is_built_is_trained():
    cases = training_cases(Scope(8, False))
    assert {case.stage for case in cases} == {0, 1, 2, 3}
    keys = {key for case in cases for key in dict((case.section or {}).get("parallel", {}))}
    assert keys == {*ParallelSection.model_fields} - {"probe"}
    algorithms = {(case.section or {}).get("context_parallel", {}).get("algorithm") for case in cases}
    assert algorithms == {None, "ring", "ulysses", "allgather", "hybrid"}
    assert {(case.section or {}).get("tensor_overlap") for case in cases} == {None, "pipelined", "fused"}


@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_every_config_is_right_and_trains_the_global_batch(scope):
    for case in training_cases(scope):
        config = training.ds_config(case)
        assert check(config, case.ranks, 2 if case.recipe.model == "layers" else None).warnings == (), case.name
        sequences = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
        assert sequences * training.data_ranks(case) == case.recipe.sizes.sequences, case.name


def test_tensor_ranks_of_the_large_model_have_what_fused_products_take():
    assert LARGE_SIZES.hidden >= 256 and LARGE_SIZES.intermediate // 2 >= 256


# ---- what the checks can see ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_rounding_passes_and_small_mistakes_do_not(dtype):
    true = torch.randn(64, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def passes(found):
        return all(check.passed for check in operators.comparisons("x", found, true))

    assert passes(true.to(dtype))
    unit = max(torch.finfo(dtype).eps, 2**-13)
    assert not passes((true * (1 + 2 * unit)).to(dtype))
    off = true.to(dtype)
    off[3, 7] += 60 * unit
    assert not passes(off)
    assert not passes(true.roll(1, 1).to(dtype))
    assert not passes(torch.where(true == true[0, 0], torch.nan, true).to(dtype))


def test_rows_without_a_key_may_be_minus_infinity():
    true = torch.tensor([-torch.inf, 1.0], dtype=torch.float64)
    assert all(check.passed for check in operators.comparisons("lse", true.float(), true))
    assert not all(check.passed for check in operators.comparisons("lse", torch.zeros(2), true))


RECIPE = TrainingRecipe("decoder", SMALL_SIZES, "float32")
LAYERS = TrainingRecipe("layers", SMALL_SIZES, "bfloat16")
EXPERTS = TrainingRecipe("experts", SMALL_SIZES, "float32")


def checks_of(recipe, found, exact, own):
    unit = training.UNITS[recipe.dtype]
    pairs = (("losses", found.losses, exact.losses, own.losses), ("norms", found.norms, exact.norms, own.norms))
    return [check for name, *curves in pairs for check in training.curve_checks(name, *curves, unit)]


def half_of_one_gradient(model):
    """Of the largest weight: that of a small one is within what bf16 rounds."""
    max(model.parameters(), key=torch.Tensor.numel).register_hook(lambda gradient: gradient / 2)


def one_weight_left_out(model):
    list(model.parameters())[-1].register_hook(torch.zeros_like)


def with_mistake(mistake):
    """``loss_of`` of a model in which ``mistake`` was made at the first call."""
    right, made = one_process.loss_of, []

    def loss_of(recipe, model, tokens):
        if not made:
            made.append(mistake(model))
        return right(recipe, model, tokens)

    return loss_of


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [RECIPE, LAYERS, EXPERTS, dataclasses.replace(RECIPE, optimizer="AdamW")], ids=str)
def test_one_process_passes_and_a_wrong_gradient_does_not(recipe, monkeypatch):
    exact = one_process.trained(recipe, torch.float64)
    assert len(exact.losses) == STEPS and exact.losses[-1] < (1 - training.FALL) * exact.losses[0]
    assert max(exact.norms) > one_process.CLIP
    own = one_process.trained(recipe, one_process.dtype_of(recipe))
    assert all(check.passed for check in checks_of(recipe, own, exact, own))
    for mistake in (half_of_one_gradient, one_weight_left_out):
        with monkeypatch.context() as patched:
            patched.setattr(one_process, "loss_of", with_mistake(mistake))
            wrong = one_process.trained(recipe, torch.float64)
        assert not all(check.passed for check in checks_of(recipe, wrong, exact, own)), mistake.__name__


def test_the_pieces_of_a_batch_are_its_whole():
    """One process cuts the batch into pieces; whole, in float64, it has the same losses."""
    model = one_process.model_of(LAYERS).double()
    tokens = one_process.batch(SMALL_SIZES, 0)
    whole = one_process.loss_of(LAYERS, model, tokens)
    pieces = [one_process.loss_of(LAYERS, model, piece) for piece in tokens.chunk(one_process.PIECES)]
    torch.testing.assert_close(torch.stack(pieces).mean(), whole, rtol=1e-12, atol=0)


def test_curves_are_computed_once_and_kept(tmp_path, monkeypatch):
    curves = {torch.float64: [1.0, 2.0], torch.float32: [3.0, 4.0]}
    monkeypatch.setattr(
        one_process, "trained", lambda recipe, dtype: one_process.Curve(curves[dtype], [dtype.itemsize])
    )
    first = one_process.kept_curves(RECIPE, tmp_path)
    monkeypatch.setattr(one_process, "trained", lambda recipe, dtype: pytest.fail("computed again"))
    assert one_process.kept_curves(RECIPE, tmp_path) == first
    assert first[0].losses == [1.0, 2.0] and first[1].norms == [4]


def test_a_block_sees_no_later_token():
    block = one_process.Block(SMALL_SIZES).double()
    x = torch.randn(1, 6, SMALL_SIZES.hidden, dtype=torch.float64)
    changed = x.clone()
    changed[:, 4] += 1
    assert torch.equal(block(x)[:, :4], block(changed)[:, :4])
    assert not isinstance(block, nn.Sequential)


def test_a_check_passes_up_to_what_is_allowed():
    assert Check("", 2.0, 2.0).passed and Check("", 0.0, 0.0).share == 0 and Check("", 1.0, 2.0).share == 0.5
    for error in (3.0, math.nan, math.inf):
        assert not Check("", error, 2.0).passed and Check("", error, 2.0).share > 1
    assert Check("", 1.0, 0.0).share == math.inf


# ---- worlds that break ----


@pytest.mark.slow
def test_what_follows_a_case_that_breaks_is_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests' / 'support'}")
    # Ranks are started for NPUs; here torch_npu is left out of them.
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.setattr(world, "GRACE_S", 1.0)
    names = ("passes", "raises", "worse_on_rank_1", "hangs", "ends", "no_number", "cannot", "passes")
    known = {case.name: case for case in double.GROUP.cases(Scope(2, True))}
    found = list(run_group(double.GROUP, [known[name] for name in names], Scope(2, True), tmp_path, math.inf))
    assert [(result.case, result.outcome) for result in found] == [
        ("passes", "passed"),
        ("raises", "crashed"),
        ("worse_on_rank_1", "failed"),
        ("hangs", "timed out"),
        ("ends", "crashed"),
        ("no_number", "failed"),
        ("cannot", "not run"),
        ("passes", "passed"),
    ]
    said = [result.message for result in found]
    assert said[0] == "" and found[0].check == Check("error", 1.0, 2.0)
    assert found[0].series == {"loss": [0.333333333, 2.0]}
    assert re.fullmatch(r"rank 0: RuntimeError in acceptance_double.py:\d+: the device is not well", said[1])
    assert "printed before the error" in found[1].output
    assert said[2] == "error: 3, and 2 is allowed"
    assert said[3] == "no answer within 1 s" and "in hangs" in found[3].output
    assert re.match(r"rank [01] ended with exit code 7", said[4])
    assert said[5] == "error: nan, and 2 is allowed" and said[6] == "no such kernel here"


def test_ranks_that_do_not_start_are_said_once_with_their_output(tmp_path):
    group = dataclasses.replace(double.GROUP, module="no_such_module")
    cases = [Case("one"), Case("two")]
    first, second = run_group(group, cases, Scope(1, True), tmp_path, math.inf)
    assert first.outcome == second.outcome == "crashed"
    assert first.message == "its ranks did not start: rank 0 ended with exit code 1"
    assert "No module named no_such_module" in first.output and not second.output


def test_no_case_is_begun_after_the_last_minute(tmp_path):
    late = list(run_group(double.GROUP, [Case("one"), Case("two")], Scope(1, True), tmp_path, time.monotonic() - 1))
    assert [(result.outcome, result.message) for result in late] == [("not run", world.TIME_OVER)] * 2


# ---- the file and the summary ----


def result(outcome="passed", case="norm", **others):
    return CaseResult("operators", case, 1, outcome, **others)


def test_the_file_is_json_and_names_no_machine(tmp_path):
    kept = record.Record.begun(tmp_path / "out.json", NPUS, small=True)
    said = f"in {sys.prefix}/lib/x.py on {socket.gethostname()} at 192.168.1.17, {Path.home()}/secret"
    kept.add(result("failed", check=Check("x", math.nan, 1.0), message=said, output=said, series={"loss": [math.inf]}))
    found = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)
    (entry,) = found["cases"]
    assert (entry["error"], entry["loss"], entry["allowed"]) == ("nan", ["inf"], 1.0)
    assert entry["said"] == "in <python>/lib/x.py on <host> at <address>, <home>/secret" == entry["output"][0]
    assert found["simulated"] is False and found["npus"] == [{"name": "Ascend910B2", "memory GiB": 64.0}] * 2
    assert {"torch", "torch_npu", "cann", "driver", "deepspeed", "ds_npu", "commit"} <= set(found["versions"])
    text = (tmp_path / "out.json").read_text()
    assert str(tmp_path) not in text and socket.gethostname() not in text


def test_a_run_is_continued_where_it_stopped(tmp_path):
    path = tmp_path / "out.json"
    kept = record.Record.begun(path, NPUS, small=True)
    kept.add(result("passed", "one"))
    kept.add(result("crashed", "two", message="it raised"))
    again = record.Record.begun(path, NPUS, small=True).continued()
    assert again.passed("operators", "one") and not again.passed("operators", "two")
    again.add(result("passed", "two"))
    assert [entry["result"] for entry in json.loads(path.read_text())["cases"]] == ["passed", "passed"]
    with pytest.raises(ValueError, match=r"is of another run: other cases of, npus"):
        record.Record.begun(path, Npus([], []), small=False).continued()
    path.write_text("{")
    with pytest.raises(ValueError, match="cannot be continued"):
        record.Record.begun(path, NPUS, small=True).continued()


def test_the_summary_says_what_failed_and_what_to_do():
    entries = [
        record.entry_of(each)
        for each in (
            result("passed"),
            result("failed", "swiglu, bfloat16", message="result 0: 0.3, and 0.1 is allowed"),
            CaseResult("training", "tensor 2", 2, "not run", message="transformers is not installed"),
        )
    ]
    said = "\n".join(verdict(entries, "out.json", simulated=False, seconds=90))
    assert "1 passed, 1 failed, 1 not run; 1.5 minutes." in said
    assert "swiglu, bfloat16: failed: result 0: 0.3, and 0.1 is allowed" in said
    assert "training: 1 not run: transformers is not installed" in said
    assert "Send out.json to the authors" in said and "train." not in said.splitlines()[-1]
    assert not is_clean(entries) and is_clean(entries[::2]) and not is_clean(entries[2:])
    clean = verdict(entries[:1], "out.json", simulated=True, seconds=1)
    assert "these NPUs are simulated" in clean[-1]


# ---- the command ----


def test_without_an_npu_it_says_so_and_names_the_simulator(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(accept, "npus_here", lambda: Npus([], [], "there is none. What to do: buy one."))
    assert main(["accept", "--out", str(tmp_path / "out.json")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("ds_npu accept: no NPU to try: there is none. What to do: buy one.")
    assert said.endswith("ds_npu sim -- ds_npu accept\n") and said.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


def test_a_file_that_is_there_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(accept, "npus_here", lambda: pytest.fail("asked for NPUs"))
    (tmp_path / "out.json").write_text("an hour's work")
    assert main(["accept", "--out", str(tmp_path / "out.json")]) == 2
    assert "--resume continues it" in capsys.readouterr().err


def test_the_screen_has_a_line_for_each_case(tmp_path, monkeypatch, capsys):
    results = {
        "operators": [
            result(check=Check("x", 0.5, 1.0), call_s=1e-4),
            result("crashed", "swiglu", message="it raised"),
        ],
        "collectives": [],
        "training": [],
    }
    monkeypatch.setattr(acceptance_run, "run_group", lambda group, *rest: iter(results[group.name]))
    options = Namespace(out=tmp_path / "out.json", resume=False, only=["operators"], cases="small")
    assert acceptance_run.run_acceptance(options, NPUS) == 1
    said = capsys.readouterr().out
    assert "2 NPUs (Ascend910B2, 64 GiB)" in said and "SIMULATED" not in said
    assert re.search(r"\[ *1/\d+\] passed +norm +error +0.5 of +1 +0.0 s +100 us a call\n", said)
    assert re.search(r"\[ *2/\d+\] CRASHED +swiglu +0.0 s\n    it raised\n", said)


def test_a_machine_without_npus_says_why(monkeypatch):
    found = machine.npus_here()
    assert found.names == [] and "What to do" in found.why_none


def test_names_of_the_machine_are_left_out():
    assert without_names("fe 10.0.0.255 and 1.2.3") == "fe <address> and 1.2.3"


# ---- the container file ----


def test_the_container_has_versions_that_go_together():
    text = (ROOT / "examples" / "container" / "Dockerfile").read_text()
    given = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    assert CANN_OF_TORCH_NPU[given["TORCH_NPU"]] == given["CANN"]
    assert given["TORCH"].rpartition(".")[0] == given["TORCH_NPU"].rpartition(".")[0]
    assert int(given["PYTHON"].partition(".")[2]) in PYTHON_OF_TORCH[given["TORCH"].rpartition(".")[0]]


def test_a_case_of_training_is_data():
    assert dataclasses.asdict(TrainingCase("x"))["recipe"]["sizes"]["hidden"] == SMALL_SIZES.hidden
