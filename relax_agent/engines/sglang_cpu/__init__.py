"""What real SGLang needs to run on a CPU without CUDA: two shims and a list of requirements.

Nothing here is imported by Relax Agent. ``shims/`` is put on the ``PYTHONPATH`` of an SGLang
process by :mod:`relax_agent.engines.launch`; ``README.md`` says what each shim is for, and
``requirements.txt`` is what ``make venv-sglang`` installs.
"""
