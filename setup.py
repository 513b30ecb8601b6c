"""What pyproject.toml cannot say: the three linked folders, and the start-up line that goes beside the package."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
LINKS = ("accelerator", "ops", "zero_ext")
STARTUP_LINE = "ds_npu.pth"

for name in LINKS:
    if not (ROOT / "ds_npu" / name).is_dir():
        raise SystemExit(
            f"ds_npu/{name} is not a folder: this checkout lost its symbolic links (a zip download, or git with "
            f"core.symlinks=false). Clone again with 'git clone -c core.symlinks=true', or replace ds_npu/{name} by "
            f"a link to ../{name}."
        )


class BuildWithStartupLine(build_py):
    """Puts ds_npu.pth at the top of site-packages, in a wheel as in an editable install."""

    def run(self) -> None:
        super().run()
        target = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        Path(target).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / "ds_npu" / STARTUP_LINE, Path(target) / STARTUP_LINE)


setup(cmdclass={"build_py": BuildWithStartupLine})
