"""An engine that generates tokens from the prompt alone, and calls the worker's extension as vLLM 0.33.0 does.

`FAKE_VLLM` changes the behavior of servers: `KIND:crash`, `KIND:wrong`, `KIND:registers`, `KIND:hangs` or, without symmalloc,
`KIND:without`, separated by `;`. KIND is the value of `SYMMALLOC_VLLM` and that of `VLLM_USE_NCCL_SYMM_MEM`, such as `/0` or `pools/1`.
"""

import importlib
import os
import subprocess
import sys
import time
from types import SimpleNamespace

kind = f"{os.environ['SYMMALLOC_VLLM']}/{os.environ['VLLM_USE_NCCL_SYMM_MEM']}"
behavior = dict(one.split(":") for one in os.environ.get("FAKE_VLLM", "").split(";") if one).get(kind, "")


class SamplingParams(SimpleNamespace):
    pass


def TokensPrompt(prompt_token_ids):
    return prompt_token_ids


class LLM:
    def __init__(self, *, tensor_parallel_size, worker_extension_cls, enable_sleep_mode, **options):
        print("options", {name: options[name] for name in options if "sleep" in name or "custom" in name}, file=sys.stderr)
        print("a library writes to standard output without a newline", end="")
        if behavior == "crash":
            sys.exit("the engine crashes")
        if kind[0] != "/" and behavior != "without":
            import symmalloc  # noqa: F401
        module, name = worker_extension_cls.rsplit(".", 1)
        self._workers = [getattr(importlib.import_module(module), name)() for _ in range(tensor_parallel_size)]
        self._has_sleep, self._runs, self._is_lost, self._asleep = enable_sleep_mode, 0, False, set()

    def collective_rpc(self, method):
        if method == "job_reload":
            assert "weights" not in self._asleep
            self._is_lost = False
        elif method == "job_damage":
            self._is_lost = True
        else:
            return [getattr(worker, method)() for worker in self._workers]

    def generate(self, prompts, parameters, use_tqdm):
        assert not self._asleep, "the engine sleeps"
        assert not use_tqdm and len(prompts) == len(parameters)
        self._runs += 1
        if behavior == "hangs":
            # As a worker does, in another process of the same group.
            hang = "import vllm_worker, os, sys, time; print('worker', os.getpid(), file=sys.stderr, flush=True); time.sleep(60)"
            subprocess.run([sys.executable, "-c", hang], check=False)
            time.sleep(60)
        if behavior == "registers":
            from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

            NCCLLibrary().ncclCommWindowRegister(None, None, 1 << 20, 1)
        shift = self._runs if behavior == "wrong" else 1 if self._is_lost else 0
        outputs = [
            [(token + shift) % 32000 for token in prompt][: one.max_tokens]
            for prompt, one in zip(prompts, parameters, strict=True)
        ]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)]) for tokens in outputs]

    def sleep(self, level):
        assert self._has_sleep
        self._is_lost, self._asleep = level == 2, {"weights", "kv_cache"}

    def wake_up(self, tags=None):
        self._asleep -= self._asleep if tags is None else set(tags)
