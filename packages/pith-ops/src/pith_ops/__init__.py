"""Single-device operators: a PyTorch reference each and, where it pays, a library's kernel.

torch 2.11 is asked for here, before an import fails without saying why.
"""

from importlib.metadata import version
from re import findall


def check_torch_version(found: str) -> None:
    """Raise a ValueError when torch is older than 2.11."""
    if tuple(int(part) for part in findall(r"\d+", found)[:2]) < (2, 11):
        raise ValueError(f"torch {found} found, 2.11 or newer needed: pip install 'torch>=2.11'")


check_torch_version(version("torch"))
