"""These tests run kernels in Triton's interpreter, which is chosen before Triton is imported.

So they have processes of their own, which tests/test_triton.py starts: other tests, and PyTorch's compiler in them,
find Triton as it comes. Without TRITON_INTERPRET=1 nothing is collected here.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from interpreted import strict

    strict.install()
else:
    collect_ignore_glob = ["*.py"]
