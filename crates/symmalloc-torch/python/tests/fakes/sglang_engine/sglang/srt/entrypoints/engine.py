"""An engine that generates tokens from the prompt alone, and has the parts of SGLang's that a program replaces.

`FAKE_SGLANG` changes the behavior of servers: `KIND:crash`, `KIND:wrong` or `KIND:without` (the installation), separated by `;`.
KIND is `install` if the job asks for symmalloc, and `/1` with symmetric memory, `/saver` with the memory saver, or `/0`, as in
`install/1`. With the memory saver, `keeps` releases nothing, `leaks` does not give memory back, and `forgets` changes tokens.
"""

import os
import sys

import torch
from sglang.srt.managers.data_parallel_controller import (
    run_data_parallel_controller_process,  # noqa: F401
    run_scheduler_process_with_init_pipe,  # noqa: F401
)


class Engine:
    run_scheduler_process_func = None

    def __init__(self, *, tp_size, enable_symm_mem, enable_memory_saver=False, **_):
        print("a library writes to standard output without a newline", end="")
        kind = "install" if os.environ["SGLANG_SERVE_INSTALL"] else ""
        behavior = dict(one.split(":") for one in os.environ.get("FAKE_SGLANG", "").split(";") if one)
        memory = "saver" if enable_memory_saver else int(enable_symm_mem)
        self._behavior = behavior.get(f"{kind}/{memory}", "")
        self._cycles = 0
        if self._behavior == "crash":
            sys.exit("the engine crashes")
        if kind and self._behavior != "without":
            import symmalloc  # noqa: F401
        self._ranks, self._runs = tp_size, 0
        os.environ["NCCL_NVLS_ENABLE"] = "1"  # as SGLang does with symmetric memory
        self.run_scheduler_process_func("server_args", tp_rank=0)

    def collective_rpc(self, method, **named):
        from sglang.srt.managers.scheduler import Scheduler

        for torch.distributed.rank in range(self._ranks):
            getattr(Scheduler, method)(None, **named)

    def generate(self, *, input_ids, sampling_params):
        self._runs += 1
        shift = self._runs if self._behavior == "wrong" else self._cycles if self._behavior == "forgets" else 0
        return [
            {"output_ids": [(token + shift) % 32000 for token in prompt][: one["max_new_tokens"]]}
            for prompt, one in zip(input_ids, sampling_params, strict=True)
        ]

    def release_memory_occupation(self, tags):
        if self._behavior != "keeps":
            torch.free_bytes[0] += 100 * len(tags)

    def resume_memory_occupation(self, tags):
        self._cycles += 1
        if self._behavior != "keeps":
            torch.free_bytes[0] -= 100 * len(tags) + ((1 << 26) if self._behavior == "leaks" else 0)

    def shutdown(self):
        pass
