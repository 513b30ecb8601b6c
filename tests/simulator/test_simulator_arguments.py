"""`ds_npu sim`'s command line: whatever it is given works, or ends in one line that says what is wrong."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
import simulated
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ds_npu.cli import main as command_line
from ds_npu.cli import sim
from ds_npu.simulator.build import CONTENTS
from ds_npu.simulator.fault import faultable

FUNCTIONS = {
    "hccl/a.cpp": ["HcclAllReduce", "HcclGetErrorString"],
    "aclnn/b.cpp": ["aclnnAdd", "aclnnAddGetWorkspaceSize"],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """What a build leaves of which the command line reads something."""
    folder = tmp_path_factory.mktemp("home")
    (folder / CONTENTS).write_text(json.dumps(FUNCTIONS))
    return folder


@pytest.fixture
def stopped(home, monkeypatch):
    """A command line that goes as far as the command it would run."""
    monkeypatch.setattr(sim, "built", lambda: home)
    monkeypatch.setattr(sim, "markdown", lambda home: "")
    monkeypatch.setattr(sim, "_made", lambda folder: folder)
    monkeypatch.setattr(sim.os, "execve", lambda *_: 0)
    monkeypatch.setattr(sim, "run", lambda *_: 0)


def ended(arguments: list[str]) -> tuple[int, str]:
    """The exit code of `ds_npu sim ARGUMENTS`, and what is on stderr."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = command_line.main(["sim", *arguments])
        except SystemExit as error:
            code = error.code
    return code, said.getvalue()


WRONG = [
    (["--devices", "0"], "found '0'; an integer from 1 to 1024"),
    (["--devices", "999999999"], "found '999999999'; an integer from 1 to 1024"),
    (["--devices", "9" * 5000], "an integer from 1 to 1024"),
    (["--devices", "1024", "--memory", "1TiB"], "4096 GiB together are accepted"),
    (["--memory", "lots"], "found 'lots'; a size such as 64GiB"),
    (["--memory", "999999999999GiB"], "found '999999999999GiB'; a size such as 64GiB or 512MiB, up to 1TiB"),
    (["--memory", "9" * 400], "up to 1TiB"),
    (["--memory", "0.1"], "up to 1TiB"),
    (["--soc", "A100"], "910B2"),
    (["--soc", "new\nline"], "new\\n"),
    (["--chaos", "-1"], "found '-1'; an integer from 0 to 18446744073709551615"),
    (["--chaos", "\u0663"], "an integer from 0 to"),
    (["--fault", "malloc"], "found 'malloc'; NAME[:CALL][@RANK]=CODE"),
    (["--fault", "HcclAllReduce=0"], "found CODE '0' in 'HcclAllReduce=0'; an integer from 1 to 2147483647"),
    (["--fault", "HcclAllReduce=" + "1" * 20], "an integer from 1 to 2147483647"),
    (["--fault", "HcclAllReduce:0=4"], "found CALL '0'"),
    (["--fault", "HcclAllReduce@99999999999=4"], "found RANK '99999999999'"),
    (["--fault", "HcclAllReduces=4"], "found 'HcclAllReduces' in 'HcclAllReduces=4'"),
    (["--fault", "HcclAllReduces=4"], "(HcclAllReduce?)"),
    (["--fault", "HcclGetErrorString=4"], "a function that is simulated and can fail"),
    (["--fault", "aclnnAddGetWorkspaceSize=4"], "(aclnnAdd?)"),
    (["--no-such-option\n"], "\\n"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=str)
def test_a_wrong_argument_is_one_line_with_what_is_accepted(stopped, arguments, said):
    code, err = ended([*arguments, "--", "true"])
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith("ds_npu") and said in line


TEXT = st.text(st.characters(codec=None, exclude_characters="\0"), max_size=30)  # as argv: surrogates, but no NUL
NUMBER = st.integers().map(str) | st.floats().map(str)
UNIT = st.sampled_from(["", "KiB", "MiB", "GiB", "TiB", " GiB", "gb"])
FAULT = st.builds(
    "{}{}{}={}".format,
    st.sampled_from(["HcclAllReduce", "aclnnAdd", "aclrtNothing", "", "acl"]) | TEXT,
    st.just("") | NUMBER.map(":{}".format),
    st.just("") | NUMBER.map("@{}".format),
    st.just("exit") | NUMBER | TEXT,
)
OPTION = st.sampled_from(
    ["--devices", "--soc", "--memory", "--chaos", "--fault", "--trace", "--list", "--dev", "-h", "-"]
)
WORD = OPTION | TEXT | NUMBER | st.builds("{}{}".format, NUMBER, UNIT) | FAULT | st.builds("{}={}".format, OPTION, TEXT)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=500)
@given(st.lists(WORD, max_size=6), st.sampled_from([[], ["--", "true"], ["true", "--devices"], ["--"]]))
@example(["--memory", "1e400"], ["--", "true"])
@example(["--trace=\r"], ["--", "true"])
def test_any_arguments_work_or_end_in_one_line(stopped, arguments, command):
    code, err = ended([*arguments, *command])
    assert code in (0, None, 2, 127), (code, err)
    assert len(err.splitlines()) <= 1, err
    if code == 2:
        assert err.startswith("ds_npu")


def test_a_command_that_cannot_be_run_is_one_line(home, tmp_path, monkeypatch):
    monkeypatch.setattr(sim, "built", lambda: home)
    script = tmp_path / "script"
    script.write_text("echo no interpreter is named")
    script.chmod(0o755)
    code, err = ended(["--", str(script)])
    assert code == 126 and err.splitlines()[-1].endswith("Exec format error: " + repr(str(script))), err


@pytest.mark.slow
def test_every_function_that_can_fail_is_one_that_a_source_plants_faults_in(tmp_path):
    from ds_npu.simulator.build import built

    names = faultable(built())
    assert {"HcclAllReduce", "aclrtMallocAlign32", "aclnnAdd", "aclrtSetDevice"} <= names
    assert not names & {"aclnnAddGetWorkspaceSize", "HcclGetErrorString", "aclrtGetSocName", "aclGetRecentErrMsg"}
    assert not {name for name in names if name.startswith("aclop") and name.endswith("Softmax")}


PROCESSES = """
import os, sys
if os.fork() == 0:
    import torch
    {child}
    os._exit(0)
os.wait()
"""
USE = "torch.ones(4, device='npu').cpu()"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("child", "code", "fires"), [(USE, 0, True), ("pass", 1, False), (f"{USE}; os._exit(0)", 0, True)]
)
def test_a_fault_has_fired_if_it_has_in_any_process_of_the_run(child, code, fires):
    done = simulated.python(PROCESSES.format(child=child), "--fault", "aclrtMallocAlign32@0=507015", RANK="0")
    assert done.returncode == code, done.stderr
    silent = (
        "ds_npu sim: --fault aclrtMallocAlign32@0=507015 has not fired: no process made that call, so this run does "
        "not show what happens then"
    )
    assert (done.stderr.splitlines()[-1] == silent) is not fires
    assert ("has not fired" in done.stderr) is not fires


@pytest.mark.slow
def test_of_several_faults_the_silent_ones_are_named_and_the_commands_own_code_is_kept():
    code = "import os, torch; torch.ones(4, device='npu'); os._exit(7)"
    faults = ("aclrtSetDevice:99=1", "HcclAllReduce@3=exit", "aclrtGetDeviceCount:50=1")
    done = simulated.python(code, *(f"--fault={fault}" for fault in faults))
    assert done.returncode == 7
    assert sum("has not fired" in line for line in done.stderr.splitlines()) == 3
    assert "HcclAllReduce@3=exit has not fired" in done.stderr
