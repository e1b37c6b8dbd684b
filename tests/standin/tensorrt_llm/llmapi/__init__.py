"""STAND-IN for tensorrt_llm.llmapi: the recorded configuration classes."""

from tensorrt_llm import recorded_class


def __getattr__(name: str):
    if name.startswith("_"):
        raise AttributeError(name)
    return recorded_class(name)
