"""The parts of vLLM that symmalloc's plug-in replaces, with the names and the order of calls of vLLM 0.33.0."""

__version__ = "0.33.0"
