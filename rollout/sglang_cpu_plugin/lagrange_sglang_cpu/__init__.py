"""Lets the unmodified `sglang==0.5.23` wheel serve on a CPU: `python -m lagrange_sglang_cpu.serve` instead of
`python -m sglang.launch_server`, with the same arguments.

Invariant: nothing here acts unless SGLANG_USE_CPU_ENGINE=1, and no file of another package is changed.

Three things keep the wheel from starting on a machine without a GPU; each has its patch and reason in one place:
  sgl_kernel is missing     imports.py   a stand-in module
  torchvision cannot load   imports.py   two operator schemas, declared before the import
  host buffers need CUDA    plugin.py    SGLang's own plugin entry point
"""
