"""STAND-IN for tensorrt_llm._tensorrt_engine, which 1.0 to 1.2 have."""

from tensorrt_llm import BaseLLM, __version__, recorded_class

if not "1.0" <= __version__ < "1.3":
    raise ImportError(f"tensorrt_llm {__version__} (stand-in) has no engine flow behind an LLM class")

LLM = recorded_class("LLM", "TrtLLM", BaseLLM)
