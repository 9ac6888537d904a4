"""The engine of `symmalloc.sglang`."""

from sglang.srt.entrypoints.engine import Engine  # noqa: F401


def run_scheduler_process(*arguments, **named):
    from sglang.srt.managers import scheduler

    scheduler.run_scheduler_process(*arguments, **named)
