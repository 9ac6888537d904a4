"""`python -m symmalloc doctor` checks the installation: it lists what works, and why the rest does not.

All other commands are those of the program `symmalloc`, which is installed with this package. `python -m symmalloc replay gpt2` is
`symmalloc replay gpt2`, without the need to find the program on the PATH. `python -m symmalloc help` lists them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from . import doctor, program
from .errors import ProgramNotFound


def main() -> int:
    arguments = sys.argv[1:]
    if arguments and arguments[0] not in ("doctor", "-h", "--help"):
        return pass_on(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m symmalloc", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    doctor_parser = commands.add_parser("doctor", help=doctor.__doc__)
    doctor_parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    options = parser.parse_args()
    findings = doctor.examine()
    print(json.dumps([finding.as_dict() for finding in findings], indent=2) if options.json else doctor.table(findings))
    return 0 if all(finding.works for finding in findings if finding.is_needed) else 1


def pass_on(arguments: list[str]) -> int:
    """Replaces this process with the program. Returns only if there is no program."""
    try:
        path = program.program_path()
    except ProgramNotFound as error:
        print(f"python -m symmalloc {arguments[0]}: {error}", file=sys.stderr)
        return 2
    os.execv(path, [str(path), *arguments])


if __name__ == "__main__":
    sys.exit(main())
