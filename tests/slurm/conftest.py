"""These tests start a scheduler and take minutes: `make test-slurm` runs them, and nothing else does."""

import os

collect_ignore = [] if os.environ.get("KIELO_TEST_SLURM") else ["test_chain.py"]
