"""The functions of PyTorch that the plug-in calls. `streams` has the current stream of each thread, and whether it captures."""

import threading
from types import SimpleNamespace

streams = threading.local()


class Stream:
    def __init__(self, number):
        self.cuda_stream = number


def _current_stream(device=None):
    return Stream(getattr(streams, "number", 0))


class _OnDevice:
    def __init__(self, device):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


cuda = SimpleNamespace(
    current_stream=_current_stream,
    is_current_stream_capturing=lambda: getattr(streams, "is_capturing", False),
    empty_cache=lambda: None,
    current_device=lambda: 0,
    is_initialized=lambda: False,
    device=_OnDevice,
)
