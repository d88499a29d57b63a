"""Device facts: the columns and peaks, without asking for a GPU."""

import subprocess
import sys

import pytest
import torch
from pith_ops.device import (
    DeviceColumn,
    accumulation_dtype,
    device_capability,
    device_column,
    peak_flops,
)

CUDA = torch.device("cuda", 0)


def test_accumulation_dtype():
    narrow = (torch.bfloat16, torch.float16, torch.float32)
    assert {accumulation_dtype(dtype) for dtype in narrow} == {torch.float32}
    assert accumulation_dtype(torch.float64) == torch.float64


@pytest.mark.parametrize(
    ("capability", "column"),
    [
        ((9, 0), DeviceColumn.SM_90),
        ((10, 0), DeviceColumn.SM_100),
        ((10, 3), DeviceColumn.SM_100),
        ((12, 0), None),
        ((8, 0), None),
        (None, None),
    ],
)
def test_columns(monkeypatch, capability, column):
    monkeypatch.setattr("pith_ops.device.device_capability", lambda index: capability)
    assert device_column(CUDA) is column


def test_devices_that_are_no_gpu():
    assert device_column(torch.device("cpu")) is DeviceColumn.CPU
    assert device_column(torch.device("meta")) is None
    assert peak_flops(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peaks_are_dense_bf16(monkeypatch, name, peak):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
    assert peak_flops(CUDA) == peak


def test_capability_is_none_without_cuda(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    device_capability.cache_clear()
    assert device_capability() is None
    device_capability.cache_clear()


def test_importing_every_operator_asks_nothing_of_the_device():
    program = """
import pkgutil, importlib, torch, pith_ops
def refuse(*args, **kwargs):
    raise RuntimeError("asked for a device at import")
for name in ("is_available", "device_count", "get_device_capability", "get_device_properties"):
    setattr(torch.cuda, name, refuse)
for module in pkgutil.iter_modules(pith_ops.__path__):
    importlib.import_module(f"pith_ops.{module.name}")
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_this_gpu_has_a_column():
    assert device_column(CUDA) is not None
    assert peak_flops(CUDA) is not None
