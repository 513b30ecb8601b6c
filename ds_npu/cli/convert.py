"""``ds_npu convert``: a checkpoint of any layout as a Hugging Face model or a universal checkpoint, without ranks."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ds_npu.checkpoint.files import CheckpointError
from ds_npu.checkpoint.wholeness import checkpoints_in, name_in
from ds_npu.cli.command import Command, argument, cli_module, one_line, refused
from ds_npu.config.problems import printable

FORMS = ("hf", "fp32", "universal")
METADATA, LATEST = ".metadata", "latest_checkpointed_iteration.txt"
"""Files of Megatron-Core: one in each checkpoint, and the one that names the newest of several checkpoints."""
LAYOUT = re.compile(r"\w+=\d+(,\w+=\d+)*")


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="a checkpoint, or a folder: its newest whole one; for hf also one of Megatron-Core",
    )
    what = (
        "hf: the weights, as save_pretrained writes them; fp32: in float32, as zero_to_fp32.py makes them; universal: "
        "DeepSpeed's, with the state of the optimizer"
    )
    parser.add_argument("--to", type=argument(_form), required=True, metavar="FORM", help=what)
    parser.add_argument("--model", type=Path, help="for hf: a folder with the model's config.json")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    what = "a class that the files may hold, as package.module.Class"
    parser.add_argument("--allow", action="append", default=[], metavar="CLASS", help=what)


def _form(text: str) -> str:
    if text in FORMS:
        return text
    if LAYOUT.fullmatch(text):
        raise ValueError(
            f"{text}: nothing is to be converted, every layout loads every other one (docs/checkpoints.md)"
        )
    raise ValueError(f"found {printable(text)}; one of {', '.join(FORMS)}")


def _run(arguments: Namespace) -> int:
    folder: Path = arguments.folder
    if arguments.to == "hf" and arguments.model is None:
        return refused("convert", "--to hf needs --model, a folder with the model's config.json")
    if not folder.is_dir():
        return refused("convert", f"{printable(str(folder))}: there is no such folder")
    if arguments.to == "hf" and (megatrons := _megatron_folder(folder)) is not None:
        return _convert_megatron(megatrons, arguments)
    found = list(checkpoints_in(folder))
    whole = next((each for each in found if each.manifests and not each.problems), None)
    if whole is None:
        problem = next((f": {each.folder.name}: {each.problems[0]}" for each in found if each.problems), "")
        what = f"there is no whole checkpoint with manifests in it{problem} (ds_npu inspect says what is there)"
        return refused("convert", one_line(f"{printable(str(folder))}: {what}"))
    try:
        if arguments.to == "universal":
            count = cli_module("universal_weights").write_universal(whole.folder, arguments.out, arguments.allow)
        elif arguments.to == "fp32":
            count = cli_module("converted_weights").write_float32(whole.folder, arguments.out, arguments.allow)
        else:
            weights = cli_module("converted_weights")
            model = weights.empty_model(arguments.model)
            count = weights.write_weights(whole.folder, model, arguments.out, arguments.allow)
    except (CheckpointError, ValueError, OSError) as error:
        return refused("convert", one_line(str(error)), 1)
    print(one_line(f"{arguments.out}: {count} weights of {whole.folder} ({whole.kind})"))
    return 0


def _megatron_folder(folder: Path) -> Path | None:
    """The folder of Megatron-Core's distributed checkpoint in ``folder``, found without torch."""
    if (folder / METADATA).is_file():
        return folder
    text = name_in(folder / LATEST)
    if text is None:
        return None
    inside = folder / (f"iter_{int(text):07d}" if text.isdecimal() else "release")
    return inside if (inside / METADATA).is_file() else None


def _convert_megatron(folder: Path, arguments: Namespace) -> int:
    weights = cli_module("converted_weights")
    try:
        model = weights.empty_model(arguments.model)
        count, is_checked = weights.write_megatron_weights(folder, model, arguments.out)
    except (CheckpointError, ValueError, OSError) as error:
        return refused("convert", one_line(str(error)), 1)
    what = "" if is_checked else "; common.pt has no arguments of the run: compare norms and positions with the config"
    print(one_line(f"{arguments.out}: {count} weights of {folder} (Megatron-Core){what}"))
    return 0


PURPOSE = "write a checkpoint of any layout as a Hugging Face model or DeepSpeed's universal one, in one process"
COMMAND = Command("convert", PURPOSE, _add_arguments, _run)
