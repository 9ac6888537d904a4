"""Trains GPT-2 for some steps under debugging options: counts alarms, and measures a step. See `run` in this folder.

    SYMMALLOC_CONF='debug:[poison,canary]' python3 no_alarm.py [STEPS]

A correct program raises no alarm, so the only accepted result is 0 alarms and the same loss as without options. Prints one line.
"""

import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "jobs"))
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import symmalloc  # noqa: E402
import torch  # noqa: E402

symmalloc.install()

from gpt2_train import training  # noqa: E402
from job import Job  # noqa: E402

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
torch.manual_seed(0)
# Attention of cuDNN is not deterministic, and losses must be equal.
torch.backends.cuda.enable_cudnn_sdp(False)
torch.use_deterministic_algorithms(True)
job = Job("no_alarm", "symmalloc", "cuda", None, False, 1)
step = training(job, 16, 1024, lambda number: 256 + 64 * (number % 10))
alarms, guards, times, loss = [], 0, [], None
for number in range(steps + 10):
    torch.cuda.synchronize()
    begun = time.perf_counter()
    loss = step(number)
    torch.cuda.synchronize()
    # The first period warms up.
    if number >= 10:
        times.append(time.perf_counter() - begun)
    try:
        guards += symmalloc.check_memory()
    except symmalloc.InvalidState as damage:
        alarms.append(str(damage))
milliseconds = statistics.median(times) * 1000
print(f"{milliseconds:.2f} ms per step, loss {float(loss):.6f}, {guards} guards, {len(alarms)} alarms", *alarms[:1], flush=True)
os._exit(bool(alarms))
