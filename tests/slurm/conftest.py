"""These tests start schedulers and take minutes: `make test-slurm` and `make test-slurm-short` run them."""

import os

collect_ignore_glob = [] if os.environ.get("KIELO_TEST_SLURM") else ["test_*.py"]
