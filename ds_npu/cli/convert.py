"""``ds_npu convert``: a checkpoint of any layout as a plain Hugging Face model, without ranks."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ds_npu.checkpoint.files import CheckpointError
from ds_npu.checkpoint.wholeness import checkpoints_in
from ds_npu.cli.command import Command, cli_module, one_line, refused
from ds_npu.config.problems import printable


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a checkpoint, or a folder: its newest whole one")
    parser.add_argument("--to", choices=("hf",), required=True, help="hf: the weights, as save_pretrained writes them")
    parser.add_argument("--model", type=Path, required=True, help="a folder with the model's config.json")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    what = "a class that the files may hold, as package.module.Class"
    parser.add_argument("--allow", action="append", default=[], metavar="CLASS", help=what)


def _run(arguments: Namespace) -> int:
    folder: Path = arguments.folder
    if not folder.is_dir():
        return refused("convert", f"{printable(str(folder))}: there is no such folder")
    whole = next((each for each in checkpoints_in(folder) if each.manifests and not each.problems), None)
    if whole is None:
        what = "there is no whole checkpoint with manifests in it (ds_npu inspect says what is there)"
        return refused("convert", f"{printable(str(folder))}: {what}")
    try:
        weights = cli_module("converted_weights")
        model = weights.empty_model(arguments.model)
        count = weights.write_weights(whole.folder, model, arguments.out, arguments.allow)
    except (CheckpointError, ValueError, OSError) as error:
        return refused("convert", one_line(str(error)), 1)
    print(one_line(f"{arguments.out}: {count} weights of {whole.folder} ({whole.kind})"))
    return 0


PURPOSE = "write a checkpoint of any layout as a plain Hugging Face model, in one process"
COMMAND = Command("convert", PURPOSE, _add_arguments, _run)
