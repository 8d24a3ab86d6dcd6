"""Interpreted tests need TRITON_INTERPRET=1 before triton is imported, so they live in a process of their own.

A plain run does not collect them; `test_interpreter.py` starts that process.
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted/*"]
