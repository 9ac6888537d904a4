"""The parts of vLLM that symmalloc's plug-in replaces, with the names and the order of calls of vLLM 0.22.0."""
