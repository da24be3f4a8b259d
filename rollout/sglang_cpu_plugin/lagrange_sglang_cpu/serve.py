"""`python -m lagrange_sglang_cpu.serve ARGUMENTS` is `python -m sglang.launch_server ARGUMENTS` with the import hooks.

Invariant: the hooks are there in every process of the server. SGLang starts its scheduler and the others with
multiprocessing's "spawn", which runs the main module again under another name; that main module is this one, so
`install()` runs first in each of them. That is why it is at module level, and why `alter_sys` is left off below.
"""

from __future__ import annotations

import runpy

from .imports import install

install()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
