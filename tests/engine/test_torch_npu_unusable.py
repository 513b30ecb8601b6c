"""A torch_npu that is installed and cannot be used: one clear message, no traceback out of an import, no silence."""

from __future__ import annotations

import importlib.metadata

import activation_probe
import npu_double
import pytest

VERSION = importlib.metadata.version("torch_npu")
ON = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}

FAKES = {
    "no CANN": {"body": "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')"},
    "built for another torch": {"body": "raise ImportError('x.so: undefined symbol: _ZN3c1011TensorImplE')"},
    "of another version": {"body": "raise ImportError('x')", "version": "2.9.0", "requires": "torch==2.9.0.*"},
    "not complete": {"body": "import torch; import the_part_that_is_missing"},
    "no ImportError": {"body": "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\nraise OSError('bad')"},
}
SAID = {
    "no CANN": ("libhccl.so was not found; it comes with CANN", "set_env.sh"),
    "built for another torch": ("it was built for another torch", "install torch and torch_npu of the same version"),
    "of another version": ("torch_npu 2.9.0 was built for torch==2.9.0.* and found torch 2.", "pip install"),
    "not complete": ("the_part_that_is_missing", "install it with pip"),
    "no ImportError": ("importing torch_npu ended in OSError: bad", "set_env.sh"),
    "the real one": ("libhccl.so was not found; it comes with CANN", "set_env.sh"),
}
REAL = pytest.param("the real one", marks=pytest.mark.slow)


@pytest.fixture
def case(request, tmp_path):
    """(folder with an unusable torch_npu, what is to be said about it)."""
    name = request.param
    if name == "the real one":
        return importlib.metadata.distribution("torch_npu").locate_file(""), SAID[name]
    folder = npu_double.write_package(tmp_path / "npu", **FAKES[name])
    version = FAKES[name].get("version", VERSION)
    activation_probe.write_entry_points(folder, "torch_npu", "torch_npu = torch_npu:_autoload", version)
    return folder, SAID[name]


def run(code, case, tmp_path, ours_by="startup line", **environ):
    """``code`` where that torch_npu and ds_npu are installed; ds_npu acts by its startup line or comes first."""
    installed = activation_probe.write_ours(tmp_path / "installed")
    if ours_by == "startup line":
        return npu_double.python(
            activation_probe.startup(tmp_path / "site") + code, case[0], installed, **{**ON, **environ}
        )
    return npu_double.python(code, installed, case[0], **{**ON, **environ})


def messages(text):
    return [line for line in text.splitlines() if "torch_npu" in line]


def is_clear(line, case):
    return all(part in line for part in (*case[1], "cannot be imported", "What to do: "))


@pytest.mark.parametrize("ours_by", ["startup line", "entry point before theirs"])
@pytest.mark.parametrize("case", [*FAKES, REAL], indirect=True)
def test_import_torch_works_with_one_warning(case, ours_by, tmp_path):
    code = """import importlib.util, os, torch
print(torch.ones(2).sum().item(), importlib.util.find_spec("torch_npu"), os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"])
try:
    import torch_npu
except ModuleNotFoundError:
    print("torch_npu is not to be had")"""
    done = run(code, case, tmp_path, ours_by)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2.0 None 1", "torch_npu is not to be had"]
    (line,) = done.stderr.splitlines()
    assert line.startswith("[ds_npu] WARNING: ")
    assert is_clear(line, case)


@pytest.mark.parametrize("case", ["no CANN", "no ImportError", REAL], indirect=True)
def test_import_torch_npu_raises_the_same_text_each_time(case, tmp_path):
    code = """
for attempt in range(2):
    try:
        import torch_npu
    except ImportError as error:
        print(error)"""
    done = run(code, case, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first == second
    assert is_clear(first, case)


@pytest.mark.parametrize("code", ["import torch", "import torch_npu", "import deepspeed"])
@pytest.mark.parametrize("case", ["no CANN", REAL], indirect=True)
def test_npus_asked_for_end_the_program_with_one_message(case, code, tmp_path):
    done = run(code, case, tmp_path, DS_ACCELERATOR="npu")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert is_clear(line, case)


def test_npus_asked_for_and_autoloading_off_end_the_program_with_one_message(tmp_path):
    folder = npu_double.write_package(tmp_path / "npu", **FAKES["no CANN"])
    done = npu_double.python("import ds_npu, deepspeed", folder, DS_ACCELERATOR="npu")
    assert done.returncode == 1
    (line,) = messages(done.stderr)
    assert is_clear(line, (folder, SAID["no CANN"]))
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("case", ["no CANN", REAL], indirect=True)
def test_deepspeed_takes_the_cpu_with_one_warning(case, tmp_path):
    code = "import deepspeed\nprint(deepspeed.get_accelerator().device_name())"
    done = run(code, case, tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "cpu"), done.stderr
    (line,) = messages(done.stderr)
    assert is_clear(line, case)
    assert "Traceback" not in done.stderr


def test_deepspeed_that_is_the_first_to_import_torch_npu_does_not_take_the_cpu_in_silence(tmp_path):
    folder = npu_double.write_package(tmp_path / "npu", **FAKES["no CANN"])
    done = npu_double.python("import ds_npu, deepspeed\nprint(deepspeed.get_accelerator().device_name())", folder)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "cpu"), done.stderr
    (line,) = messages(done.stderr)
    assert is_clear(line, (folder, SAID["no CANN"]))


def test_what_is_set_already_is_not_advised(tmp_path):
    folder = npu_double.write_package(tmp_path / "npu", **FAKES["no CANN"])
    code = "import ds_npu, torch\ntry:\n    import torch_npu\nexcept ImportError as error:\n    print(error)"
    done = npu_double.python(code, folder, DS_ACCELERATOR="cpu", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert is_clear(done.stdout, (folder, SAID["no CANN"]))
    assert "set DS_ACCELERATOR" not in done.stdout and "or unset TORCH_DEVICE_BACKEND_AUTOLOAD to" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("case", ["the real one"], indirect=True)
def test_transformers_can_be_imported_and_asked_for_npus(case, tmp_path):
    code = "import transformers; from transformers import Trainer, AutoModelForCausalLM, LlamaForCausalLM\n"
    code += "print(transformers.utils.is_torch_npu_available(), Trainer.__name__)"
    done = run(code, case, tmp_path)
    assert (done.returncode, done.stdout) == (0, "False Trainer\n"), done.stderr
    (line,) = messages(done.stderr)
    assert is_clear(line, case)


@pytest.mark.parametrize("case", ["no CANN", REAL], indirect=True)
def test_ds_report_says_why(case, tmp_path):
    done = run("from deepspeed.env_report import cli_main\nimport sys\nsys.argv[1:] = []\ncli_main()", case, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("ds_npu ...")]
    assert case[1][0] in row
    assert "halted" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("case", ["the real one"], indirect=True)
def test_without_ds_npu_importing_torch_fails_where_this_file_says_it_works(case):
    """The failure that the guard turns into a warning is there: else the tests above show nothing."""
    done = npu_double.python("import torch", case[0], **{**ON, "DS_NPU_AUTOLOAD": "0"})
    assert done.returncode == 1
    assert "Failed to load the backend extension: torch_npu" in done.stderr


@pytest.mark.parametrize("code", ["import torch", "import deepspeed", "import torch, transformers"])
@pytest.mark.parametrize("case", ["no CANN", REAL], indirect=True)
def test_where_another_accelerator_was_asked_for_nothing_is_said(case, code, tmp_path):
    done = run(code, case, tmp_path, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr
    assert "torch_npu" not in done.stderr
