"""The image of the Containerfile, which calls `kielo --version` when it is built."""

import os
import shlex
import shutil
import subprocess

import pytest

from tests.house.checks import ROOT

# More options of the builder, as another base image on a machine that reaches no registry.
OPTIONS = shlex.split(os.environ.get("KIELO_TEST_IMAGE", ""))
BUILDERS = ("podman", "buildah", "docker")
# What a builder says if it has no daemon, or if the registry of the base image cannot be reached.
NO_BASE = (
    "Cannot connect to the Docker daemon",
    "docker daemon is not running",
    "initializing source docker://",
)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_image_is_built() -> None:
    builder = next((name for name in BUILDERS if shutil.which(name)), None)
    if builder is None:
        pytest.skip(f"no builder of images. Fix: install one of {', '.join(BUILDERS)}")
    command = [builder, "build", *OPTIONS, "-t", "kielo-test", "-f", "Containerfile", "."]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode and any(words in ended.stderr for words in NO_BASE):
        pytest.skip(f"{builder} has no base image: {ended.stderr[-200:]}")
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
