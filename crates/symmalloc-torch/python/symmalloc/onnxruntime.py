"""Support for ONNX Runtime's CUDA provider on the process's allocator."""

from __future__ import annotations

from .library import address, call


def provider_options(device: int = 0, stream: int | None = None) -> dict[str, str]:
    """Returns options for `CUDAExecutionProvider` that make a session use the process's allocator.

    device  the device's number
    stream  the handle of the stream to compute on; it must stay alive until the process exits

    With a stream, memory is stream-ordered. Without a stream, every free waits for the device, because ONNX Runtime does not
    report which of its streams used the memory. Therefore pass a stream, and leave `do_copy_in_default_stream` at 1.

        options = symmalloc.onnxruntime.provider_options(stream=torch.cuda.current_stream().cuda_stream)
        session = onnxruntime.InferenceSession("model.onnx", providers=[("CUDAExecutionProvider", options)])

    Raises `CudaError` if the device does not exist.
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
