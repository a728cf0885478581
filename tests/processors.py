"""The golden and checkpoint tests as other processors compute.

``make test-processors`` runs them with libraries that leave out newer instructions: they add the
terms of a matrix product in another order, and take exponentials and logarithms by other formulas.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent
# NumPy since 2.4 | before; a name that it does not know is ignored.
AVX512 = "X86_V4 AVX512_ICL AVX512_SPR AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL"
SETTINGS = {
    "this processor": {},
    # Intel before Skylake-SP, AMD before Zen 4, and today's desktops: no AVX-512.
    "AVX2": {
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
        "NPY_DISABLE_CPU_FEATURES": AVX512,
    },
    # Any x86-64: MKL's path for processors it does not know, the other libraries before AVX.
    "SSE": {
        "MKL_CBWR": "COMPATIBLE",
        "OPENBLAS_CORETYPE": "Nehalem",
        "NPY_DISABLE_CPU_FEATURES": f"{AVX512} X86_V3 AVX2 FMA3",
    },
    # PyTorch's own loops, such as tanh and softmax, in plain C++, as on a processor without AVX2.
    "PyTorch without AVX2": {"ATEN_CPU_CAPABILITY": "default"},
}


def main() -> int:
    """Run the tests in every setting; further arguments are pytest's."""
    failed = []
    for name, settings in SETTINGS.items():
        print(f"== {name}: {settings}", flush=True)
        command = [sys.executable, "-m", "pytest", "-c", TESTS.parent / "setup.cfg", "-q"]
        command += [f"--rootdir={TESTS.parent}", "-m", "not slow", *sys.argv[1:]]
        command += [TESTS / "test_golden.py", TESTS / "agents" / "test_shipped.py"]
        with tempfile.TemporaryDirectory() as away:  # no package but the installed one is there
            failed += [name] * bool(subprocess.call(command, cwd=away, env=os.environ | settings))
    print(f"failed: {', '.join(failed)}" if failed else "alike in every setting")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
