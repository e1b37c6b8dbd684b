"""TensorRT-LLM without TensorRT-LLM: what it can do, which commands and calls do it, and how they are run.

    support.py      releases, flows and methods: who can what, and the refusal that names it
    contract.py     the recorded facts of its command lines and classes, and the checks against them
    commands.py     one function per command line            calls.py    one function per API class
    plan.py         an experiment as a list of steps          steps.py    running them: logs, resuming, disk, memory
    engine_flow.py  engines run by the release's run.py       worker.py   run.py kept alive, its calls timed
    outputs.py      what the library returns as Generations   shared.py   what both adapters share
    probe.py        is the library here, does it import       dataset.py  prompts for trtllm-bench and run.py
    experiment.py   the posts' experiments, and one's own, from start to record

Nothing in here imports the library; `backends/tensorrt_llm.py` alone does.
"""
