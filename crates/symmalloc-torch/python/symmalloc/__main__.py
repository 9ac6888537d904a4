"""`python -m symmalloc doctor` checks the installation: it lists what works, and why the rest does not."""

from __future__ import annotations

import argparse
import json
import sys

from . import doctor


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m symmalloc", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor_parser = commands.add_parser("doctor", help=doctor.__doc__)
    doctor_parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    options = parser.parse_args()
    findings = doctor.examine()
    print(json.dumps([finding.as_dict() for finding in findings], indent=2) if options.json else doctor.table(findings))
    return 0 if all(finding.works for finding in findings if finding.is_needed) else 1


if __name__ == "__main__":
    sys.exit(main())
