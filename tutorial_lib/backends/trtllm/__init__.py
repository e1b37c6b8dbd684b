"""TensorRT-LLM without TensorRT-LLM: what it can do, which commands and calls do it, and how they are run.

    support.py    versions, flows and methods: who can what, and the refusal that names it
    contract.py   the recorded facts of its command lines and classes, and the checks against them
    commands.py   one function per command line          calls.py   one function per API class
    plan.py       an experiment as a list of steps        steps.py   running them: logs, resuming, disk and GPU memory
    probe.py      is the library here, and does it import dataset.py  prompts in the form that trtllm-bench reads
    experiment.py the posts' experiments from start to record

Nothing in here imports the library; `backends/tensorrt_llm.py` alone does.
"""
