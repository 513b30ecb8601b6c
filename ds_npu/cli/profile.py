"""``ds_npu profile``: the report of a folder that ``ds_npu.profile`` wrote, of several ranks together."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ds_npu.cli.command import Command, refused
from ds_npu.step_time.profile_folder import traces_in
from ds_npu.step_time.step_report import report_json, report_svg, report_text, step_report
from ds_npu.step_time.trace import TraceError


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a folder that ds_npu.profile wrote")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the window there")


def _run(arguments: Namespace) -> int:
    try:
        report = step_report(traces_in(arguments.folder))
    except TraceError as error:
        return refused("profile", _shown(str(error)), 1)
    for line in report_text(report):
        print(_shown(line))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report_json(report), indent=1) + "\n", encoding="utf-8")
    if arguments.svg is not None:
        arguments.svg.write_text(report_svg(report), encoding="utf-8")
    return 0


def _shown(line: str) -> str:
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)


COMMAND = Command("profile", "report where the time of profiled steps goes", _add_arguments, _run)
