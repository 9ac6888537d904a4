"""The command line: `python -m symmalloc.check_symmetric`, or `torchrun --nproc-per-node N -m symmalloc.check_symmetric`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .cases import CASES, CONTROL
from .pools import NAMES, Gpus
from .rank import CannotRun
from .runner import Case, Stack, probe, run
from .verdicts import Outcome, Table, Verdict, exit_code, summary

DESCRIPTION = """Checks that NCCL's symmetric memory is correct on this machine.

Each case runs in separate processes, with a deadline.
The exit code is 0 if at least one case is correct and none is wrong, hangs or crashes; 1 if one does, also if the check was
interrupted; 2 otherwise, or if it was interrupted without a bad case."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if unknown := [name for name in options.case if not any(_is_chosen(case.name, [name]) for case in CASES)]:
        names = ", ".join(case.name for case in CASES)
        print(f"no case is named {', '.join(unknown)}: use {names}, or a number", file=sys.stderr)
        return 2
    cases = [case for case in CASES if _is_chosen(case.name, options.case)]
    if options.list:
        print("\n".join(f"{case.name:<18}  {case.title}" for case in cases))
        return 0
    try:
        ranks = _number_of_ranks(options.ranks)
        stack = Gpus(options.allocator)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if _is_helper_of_torchrun():
        return 0  # the process of local rank 0 starts the ranks of all cases
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # prints what is known, as Ctrl+C does
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        if any(options.folder.iterdir()):
            print(f"{options.folder} is not empty: name another folder for --folder", file=sys.stderr)
            return 2
    return check(stack, cases, ranks, seconds=options.seconds, as_json=options.json, folder=options.folder)


def check(
    stack: Stack,
    cases: Sequence[Case],
    ranks: int | None,
    *,
    control: Case | None = CONTROL,
    seconds: float = 20.0,
    as_json: bool = False,
    folder: Path | None = None,
) -> int:
    """Runs the cases, prints the table or JSON, and returns the exit code.

    ranks    the number of ranks; None: one for each GPU, and at least two
    control  a case that must be wrong, or the results of the other cases prove nothing; None: no control
    """
    began = time.monotonic()
    facts: dict[str, Any] = {"python": platform.python_version()}
    outcomes: list[Outcome] = []
    is_interrupted = False
    table = Table(case.name for case in (*cases, *([control] if control is not None else ())))

    def show(outcome: Outcome) -> None:
        if not as_json:
            table.add(outcome)

    try:
        stack.configure()
        facts |= probe(stack)
        gpus = len(facts.get("devices", ()))
        ranks = gpus if ranks is None else ranks
        shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and gpus > 0
        if ranks < 2 or (ranks > gpus and not shares):
            needed = max(ranks, 2)
            raise CannotRun(
                f"{needed} ranks need {needed} GPUs that can access each other, and PyTorch finds {gpus}; with NCCL 2.30 or later,"
                f" NCCL_MULTI_RANK_GPU_ENABLE=1 and --ranks {needed} let ranks share a GPU"
            )
        everything = [*([control] if control is not None else []), *cases]
        for outcome in run(everything, ranks, stack, seconds=seconds, folder=folder):
            if control is not None and not outcomes:
                _judge_control(outcome)
            elif control is not None and outcomes[0].verdict is not Verdict.CORRECT:
                _distrust(outcome)
            outcomes.append(outcome)
            show(outcome)
            if len(outcomes) == 1 and outcome.details.get("is_start"):
                raise CannotRun(outcome.reason)
    except (CannotRun, KeyboardInterrupt) as error:
        is_interrupted = isinstance(error, KeyboardInterrupt)
        done = {outcome.case for outcome in outcomes}
        reason = str(error) or "the check was interrupted"
        for case in cases:
            if case.name not in done:
                outcomes.append(Outcome(case.name, case.title, Verdict.CANNOT_RUN, reason))
                show(outcomes[-1])
    took = time.monotonic() - began
    code = exit_code([outcome for outcome in outcomes if control is None or outcome.case != control.name])
    if is_interrupted:
        code = code or 2
    if as_json:
        report: dict[str, Any] = {"schema_version": 1, "facts": facts, "ranks": ranks}
        report |= {"seconds": round(took, 1), "exit_code": code}
        print(json.dumps(report | {"cases": [outcome.as_dict() for outcome in outcomes]}, indent=2, default=str))
    else:
        table.end()
        about = [
            f"{name} {facts[name]}" for name in ("allocator", "torch", "cuda", "nccl", "symmalloc") if name in facts
        ]
        if devices := ", ".join(dict.fromkeys(facts.get("devices", ()))):
            about.append(f"{ranks} ranks on {devices}")
        print(f"\n{', '.join([*about, f'{took:.0f} s'])}")
        print(summary(outcomes))
    return code


def _judge_control(outcome: Outcome) -> None:
    """Turns a wrong result, which the control must have, into a correct one."""
    if outcome.verdict is Verdict.WRONG:
        outcome.verdict, outcome.reason = Verdict.CORRECT, f"found {outcome.reason}"
    elif outcome.verdict is Verdict.CORRECT:
        outcome.verdict = Verdict.CANNOT_RUN
        outcome.reason = "NCCL returned the right result although the ranks passed different tensors"


def _distrust(outcome: Outcome) -> None:
    """Revokes a correct verdict: a check that does not find a deliberate error proves nothing."""
    if outcome.verdict is Verdict.CORRECT:
        outcome.verdict, outcome.reason = Verdict.CANNOT_RUN, "the control failed, so a correct result proves nothing"


def _number_of_ranks(chosen: int | None) -> int | None:
    """Returns torchrun's number of ranks, or else the chosen one; None: one for each GPU. Raises `ValueError`."""
    world = int(os.environ["WORLD_SIZE"]) if _is_started_by_torchrun() else None
    if world is not None and int(os.environ.get("LOCAL_WORLD_SIZE", world)) != world:
        raise ValueError("the ranks are on several machines: check each machine separately")
    if any(number is not None and number < 2 for number in (chosen, world)):
        raise ValueError("a check needs at least 2 ranks")
    return chosen if world is None else world


def _is_started_by_torchrun() -> bool:
    return "LOCAL_RANK" in os.environ and "WORLD_SIZE" in os.environ


def _is_helper_of_torchrun() -> bool:
    """Returns `True` in processes of torchrun that must not start ranks: all except local rank 0."""
    return _is_started_by_torchrun() and int(os.environ["LOCAL_RANK"]) != 0


def _is_chosen(name: str, chosen: list[str]) -> bool:
    return not chosen or any(text in (name, name.split("-")[0]) for text in chosen)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m symmalloc.check_symmetric",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--allocator",
        default="native",
        metavar="NAME",
        help=f"{', '.join(NAMES)}, or module:function (default: native)",
    )
    parser.add_argument(
        "--case", action="append", default=[], metavar="NAME", help="run only this case or number; repeatable"
    )
    parser.add_argument("--list", action="store_true", help="list the cases and exit")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks (default: one for each GPU)")
    parser.add_argument("--seconds", type=float, default=20.0, help="deadline of a case (default: 20, and at least 40 for churn)")
    parser.add_argument(
        "--folder", type=Path, metavar="PATH", help="keep the logs and stacks of all ranks in this empty folder"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
