"""Shared by all tests: the flat modules on the path, and workers run in processes of their own.

torch and Accelerate read the environment once, at import. A test that needs another platform therefore runs a script in
a fresh Python; this process itself stays on the plain cpu platform.
"""
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "py"), str(ROOT / "data_prep")]

os.environ.setdefault("HF_HUB_OFFLINE", "1")      # read once, at import: nothing here asks the network

import runtime  # noqa: E402

runtime.patch_environment("cpu")


def clean_environment(**extra) -> dict:
    """This process's environment without what patch_environment set, so that a script starts like a user's shell."""
    ours = ("OMP_NUM_THREADS", "USE_TORCH_XLA", "ACCELERATE_USE_CPU", "PJRT_DEVICE", "CPU_NUM_DEVICES")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {**kept, "PYTHONPATH": f"{ROOT / 'py'}{os.pathsep}{ROOT / 'data_prep'}", "PYTHONDONTWRITEBYTECODE": "1", **extra}


def run_script(code: str, folder, *, timeout: float = 300, check: bool = True, **environment) -> subprocess.CompletedProcess:
    """Run Python code as a script in `folder`; the output, stdout and stderr together, is in `.stdout`."""
    script = Path(folder) / "script_under_test.py"
    script.write_text(textwrap.dedent(code))
    done = subprocess.run([sys.executable, str(script)], cwd=folder, env=clean_environment(**environment), text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout)
    assert not check or done.returncode == 0, done.stdout
    return done


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """A small folder of byte shards from real text: a part of the standard library's source."""
    from prepare import prepare
    folder = tmp_path_factory.mktemp("shards") / "stdlib"
    prepare(["stdlib"], folder, encoding="bytes", max_bytes=300_000, val_fraction=0.2)
    return folder
