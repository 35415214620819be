"""The tests of this folder need the fake mps device of `make test-metal`; without it they are not collected."""

import os
import platform

if os.environ.get("PAGED_ATTN_TEST_DEVICE") != "mps" or platform.system() == "Darwin":
    collect_ignore_glob = ["*"]
