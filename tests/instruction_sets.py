"""The instruction sets that the tests of the kernels run on, as parameters."""

import pytest

from clearhead.engines.native import bindings

AVAILABLE = bindings.kernels().available()
MISSING = "no kernels for {}: this CPU does not have it, or CLEARHEAD_INSTRUCTION_SETS=all was not set for the build"
SETS = [
    pytest.param(name, marks=() if name in AVAILABLE else pytest.mark.skip(reason=MISSING.format(name)))
    for name in ("avx512_bf16", "avx512", "avx2", "baseline")
]
