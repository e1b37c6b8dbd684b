"""STAND-IN for this example of TensorRT-LLM: the recorded flags, and a folder with a config.json."""

import standin_tools

standin_tools.convert("examples/models/core/llama/convert_checkpoint.py")
