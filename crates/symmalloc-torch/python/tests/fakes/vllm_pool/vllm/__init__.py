"""vLLM's pool without PyTorch: `FAKE_VLLM_COMPILES=0` makes its compilation fail."""
