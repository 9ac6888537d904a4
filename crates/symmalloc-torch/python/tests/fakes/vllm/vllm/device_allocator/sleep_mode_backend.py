from abc import ABC, abstractmethod


class SleepModeBackend(ABC):
    def __init__(self):
        self._state = "RUNNING"

    @abstractmethod
    def suspend(self, level=1): ...

    @abstractmethod
    def resume(self, tags=None): ...

    def state(self):
        return self._state

    def discard(self, tags):
        raise RuntimeError("not supported")

    @classmethod
    def is_supported(cls):
        return True

    @classmethod
    def preserves_communicators(cls):
        return False

    @classmethod
    def preserves_compiled_artifacts(cls):
        return False

    @classmethod
    def preserves_graphs_with_communicators(cls):
        return False

    @classmethod
    def supports_durable_storage(cls):
        return False


def allocator():
    from vllm.device_allocator import get_mem_allocator_instance

    return get_mem_allocator_instance()


class CuMemBackend(SleepModeBackend):
    def suspend(self, level=1):
        self._state = "SUSPENDED"
        allocator().sleep(offload_tags=("weights",) * (level == 1) + ("runtime", "cudagraph"))

    def resume(self, tags=None):
        self._state = "RESUMING"
        allocator().wake_up(tags)
        self._state = "RUNNING"

    def discard(self, tags):
        allocator().discard(tags)
        self._state = "SUSPENDED"


class SleepModeBackendFactory:
    _registry = {}

    @classmethod
    def register_backend(cls, name, module_path, class_name):
        if name in cls._registry:
            raise ValueError(f"{name} is registered already")
        cls._registry[name] = (module_path, class_name)
