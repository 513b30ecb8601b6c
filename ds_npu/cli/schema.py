"""``ds_npu schema``: the keys of the section, for editors and for readers."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from ds_npu.cli.command import Command
from ds_npu.config.schema import DIALECT, file_schema, reference, section_schema


def _add_arguments(parser: ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--section", action="store_true", help="the section alone, not a whole ds_config.json")
    form.add_argument("--markdown", action="store_true", help="a table of the keys in place of a JSON schema")


def _run(arguments: Namespace) -> int:
    if arguments.markdown:
        print(reference(), end="")
    else:
        schema = {"$schema": DIALECT} | section_schema() if arguments.section else file_schema()
        print(json.dumps(schema, indent=2, ensure_ascii=False))
    return 0


COMMAND = Command("schema", "print the JSON schema of a ds_config.json with its ds_npu section", _add_arguments, _run)
