"""ONNX Runtime's CUDA provider on the process's allocator."""

from __future__ import annotations

from .library import address, call


def provider_options(device: int = 0, stream: int | None = None) -> dict[str, str]:
    """Options for `CUDAExecutionProvider`, by which a session takes its device memory from here.

    device  the device's number
    stream  the handle of the stream to compute on; it must live as long as the process

    With a stream, memory is ordered by it. Without one, every free waits for the device: ONNX Runtime does not say which
    of its streams used the memory. So give one, and leave `do_copy_in_default_stream` at 1.

        options = symmalloc.onnxruntime.provider_options(stream=torch.cuda.current_stream().cuda_stream)
        session = onnxruntime.InferenceSession("model.onnx", providers=[("CUDAExecutionProvider", options)])

    Raises `CudaError` when there is no such device.
    """
    options = {
        "device_id": str(device),
        "gpu_external_alloc": str(address("symmalloc_ort_alloc")),
        "gpu_external_free": str(address("symmalloc_ort_free")),
        "gpu_external_empty_cache": str(address("symmalloc_ort_empty_cache")),
    }
    if stream is not None:
        call("ort_use_stream", device, stream)
        options |= {"has_user_compute_stream": "1", "user_compute_stream": str(stream)}
    return options
