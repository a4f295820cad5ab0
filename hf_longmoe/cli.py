"""`hf-longmoe`: one command line, a module of `hf_longmoe.commands` for each command."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

import hf_longmoe
from hf_longmoe.commands import UsageError
from hf_longmoe.names import nearest_hint

__all__ = ["COMMANDS", "main"]

# A command's module has `add_arguments(parser)` and `run(arguments) -> exit code`. Only the one asked for is imported.
COMMANDS = {
    "plan": (
        "hf_longmoe.commands.plan",
        "the peaks of a training step, and the caps that fit a device, from a config",
    ),
    "report": ("hf_longmoe.commands.report", "the peaks of a finished run, or of two side by side"),
    "doctor": ("hf_longmoe.commands.doctor", "versions, devices, host memory, limits, and what would go wrong"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (`{self.prog} --help` shows what can be given)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """
    Arguments:
        argv (`Sequence[str]`, *optional*): the words after `hf-longmoe`; those of this process by default.

    Returns:
        The exit code. 0: done; 1: what the command itself calls a failure (`doctor`: something would go wrong);
        2: it cannot do what was asked, for the reason that the one line on standard error gives.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(prog="hf-longmoe", description=hf_longmoe.__doc__)
    parser.add_argument("--version", action="version", version=f"hf-longmoe {hf_longmoe.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = argv[0] if argv else ""
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == asked:
            importlib.import_module(module).add_arguments(command)
    if asked and not asked.startswith("-") and asked not in COMMANDS:
        hint = nearest_hint(asked, COMMANDS)
        parser.error(f"unknown command {asked!r}; known are {', '.join(COMMANDS)}.{hint}")
    arguments = parser.parse_args(argv)
    try:
        return importlib.import_module(COMMANDS[arguments.command][0]).run(arguments)
    except UsageError as error:
        print(f"hf-longmoe {arguments.command}: {error}", file=sys.stderr)
        return 2
