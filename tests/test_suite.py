"""That the suite itself can fail: a test that hangs ends the run with its name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
HANGS = {
    "waits": "import time; time.sleep(600)",
    "keeps the lock": "import re; re.match('(a*)*b', 'a' * 40)",  # no other thread of Python runs meanwhile
}


@pytest.mark.parametrize("how", HANGS)
def test_a_hang_ends_the_run(tmp_path, how):
    (tmp_path / "test_hang.py").write_text(f"def test_that_never_ends():\n    {HANGS[how]}\n")
    environment = os.environ | {"PYTHONPATH": str(TESTS), "PAGED_ATTN_TEST_LIMIT": "2"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", tmp_path]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode != 0
    assert "test_that_never_ends" in run.stderr, run.stdout + run.stderr
