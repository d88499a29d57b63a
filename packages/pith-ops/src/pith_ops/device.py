"""Facts about the machine, never asked at import.

A device without a column (older GPUs, consumer Blackwell, MPS) runs plain torch references only.
The trap: vendors print the peak with sparsity, twice what training reaches.
"""

from enum import Enum
from functools import cache

import torch


class DeviceColumn(Enum):
    """In capability tables: CPU, Hopper, data-center Blackwell."""

    CPU = "cpu"
    SM_90 = "sm_90"
    SM_100 = "sm_100"


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums, norms, softmax and losses: fp32, float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@cache
def device_capability(index: int | None = None) -> tuple[int, int] | None:
    """That of a CUDA device, None without CUDA."""
    return torch.cuda.get_device_capability(index) if torch.cuda.is_available() else None


def device_column(device: torch.device) -> DeviceColumn | None:
    """That of `device`, if any."""
    if device.type == "cpu":
        return DeviceColumn.CPU
    match device_capability(device.index) if device.type == "cuda" else None:
        case (9, _):
            return DeviceColumn.SM_90
        case (10, _):
            return DeviceColumn.SM_100
    return None


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of a GPU in FLOP/s by the data sheet, None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    sheet = (
        ("H100 PCIe", 756e12),
        ("H100 NVL", 835e12),
        ("H100", 989e12),
        ("H200 NVL", 835e12),
        ("H200", 989e12),  # GH200 too
        ("GB200", 2500e12),
        ("B200", 2250e12),
        ("A100", 312e12),
    )
    return next((peak for part, peak in sheet if part in name), None)
