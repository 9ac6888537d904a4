"""The first functions of processes with data parallelism."""

from sglang.srt.managers import scheduler


def run_scheduler_process_with_init_pipe(run_scheduler_process_func, pipe):
    run_scheduler_process_func(pipe)


def run_data_parallel_controller_process(*, run_scheduler_process_func):
    scheduler.calls.append("controller")
    run_scheduler_process_func()
