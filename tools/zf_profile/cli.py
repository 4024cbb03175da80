"""Entry point of ``zf-profile``: the parser, and what every command shares.

A command is a module with ``SUMMARY``, ``DESCRIPTION``, ``EXAMPLES``, ``add_arguments(parser)`` and
``run(args) -> int``.  Modules import torch, rich and zf_cute inside ``run``, so that ``--help`` is
quick and ``layout`` works where torch is missing.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from zf_cute.errors import CompileError, LaunchError, ZfError
from zf_profile import bench, console, demo, doctor, environment, layout, output, ratio
from zf_profile import compile as compile_command
from zf_profile.console import Exit, UserError

COMMANDS = {
    "demo": demo,
    "ratio": ratio,
    "layout": layout,
    "compile": compile_command,
    "bench": bench,
    "doctor": doctor,
}

DESCRIPTION = """\
See where the bytes of a losslessly compressed KV cache go.

Results go to stdout, progress and notes to stderr.  Exit codes: 0 done, 1 the answer is no,
2 usage or bad input, 3 no usable GPU, 4 profiler missing, 5 compile or launch failed,
130 interrupted."""

EXAMPLES = """\
examples:
  zf-profile demo                      the whole path on real keys and values, no GPU needed
  zf-profile ratio kv.safetensors      what your own KV cache would save
  zf-profile layout k --lane 5         who holds what
  zf-profile compile                   registers, spills and code of every kernel, without a GPU
  zf-profile bench --list              what can be timed; timing needs an SM90 GPU
  zf-profile doctor                    what can run here, and what is missing"""


class _Parser(argparse.ArgumentParser):
    """Argument parser that names the nearest known word for an unknown one."""

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            hint = console.did_you_mean(str(value), known)
            raise argparse.ArgumentError(
                action, f"invalid choice {value!r}{hint} (choose from {', '.join(known)})"
            )

    def error(self, message: str) -> NoReturn:
        """Print one message and leave with exit code 2; name the nearest option for a typo."""
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            options = [o for action in self._actions for o in action.option_strings]
            word = message[len(prefix) :].split()[0].split("=")[0]
            message += console.did_you_mean(word, options)
        print(console.printable(f"{self.prog}: error: {message}"), file=sys.stderr)
        print(f"try '{self.prog} --help'", file=sys.stderr)
        raise SystemExit(Exit.USAGE)


def parser() -> argparse.ArgumentParser:
    """Build the parser of the whole tool."""
    top = _Parser(
        prog="zf-profile",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="store_true", help="print the version and leave")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, module in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=module.DESCRIPTION,
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(sub)
        sub.add_argument(
            "--no-color",
            dest="color",
            action="store_false",
            help="plain text (also with the environment variable NO_COLOR)",
        )
        sub.set_defaults(parser=sub)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``zf-profile``; returns the exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; those of the process by default.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell (`>&-`)
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (for the whole process)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8
    try:
        try:
            return _main(argv)
        finally:
            sys.stdout.flush()  # here, not at exit: a reader that has left is no error
    except KeyboardInterrupt:
        print("zf-profile: interrupted", file=sys.stderr)
        return Exit.INTERRUPTED
    except OSError as error:
        # Nothing more can be said on stdout, nor flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # its reader has left (`| head`)
            return Exit.DONE
        place = f"{error.filename}: " if error.filename else ""
        message = f"zf-profile: error: {place}{error.strerror or error}"
        print(console.printable(message), file=sys.stderr)
        return Exit.USAGE


def _main(argv: Sequence[str] | None) -> int:
    top = parser()
    args, unknown = top.parse_known_args(argv)
    if args.version:
        installed = environment.version("zf_cute")
        print(f"zf-profile {installed or 'from a checkout that is not installed'}")
        return Exit.DONE
    if unknown:
        getattr(args, "parser", top).error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.command is None:
        top.print_help(sys.stderr)
        return Exit.USAGE
    try:
        output.check_json_target(args)
        return int(COMMANDS[args.command].run(args))
    except (UserError, ZfError) as error:
        _complain(args.command, str(error))
        if isinstance(error, UserError):
            return error.code
        return Exit.FAILED if isinstance(error, (CompileError, LaunchError)) else Exit.USAGE
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        what = f"the package {error.name!r} is missing" if missing else str(error)
        _complain(args.command, f"{what}; 'zf-profile doctor' says how to get it")
        return Exit.USAGE


def _complain(command: str, message: str) -> None:
    print(console.printable(f"zf-profile {command}: error: {message}"), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
