"""A scheduler that runs in the engine's process."""

calls = []


class Scheduler:
    pass


def run_scheduler_process(*arguments, **named):
    calls.append((arguments, named))
