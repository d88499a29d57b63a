"""An old torch is refused by name before any operator is imported."""

import subprocess
import sys

import pytest
from pith_ops import check_torch_version


@pytest.mark.parametrize("fine", ["2.11.0", "2.11.0+cu130", "2.15.0a0+git1234", "3.0.0"])
def test_supported_versions_pass(fine):
    check_torch_version(fine)


def test_an_import_under_an_old_torch_says_what_is_needed_in_one_line():
    program = (
        "import importlib.metadata as metadata\n"
        "metadata.version = lambda name: '2.10.1+cpu'\n"
        "import pith_ops.routing\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ValueError: torch 2.10.1+cpu found, 2.11 or newer needed: pip install 'torch>=2.11'"
    )
    assert "grouped_mm" not in done.stderr
