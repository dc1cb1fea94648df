"""device.py: the choice of device and dtype, and the random state."""

import os
from types import SimpleNamespace

import pytest
import torch

from groundup.errors import UserError
from groundup.train import device as devices

CPU = torch.device("cpu")


def test_auto_is_a_gpu_or_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)  # only when asked for
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.choose_device("auto") == CPU and devices.choose_device("mps").type == "mps"
    with pytest.raises(UserError, match="device must be .* got 'tpu'"):
        devices.choose_device("tpu")


def test_a_rank_takes_its_own_gpu(monkeypatch):
    chosen, precision = [], torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert str(devices.choose_device("auto", 1)) == "cuda:1" and str(devices.choose_device("cuda:0", 1)) == "cuda:0"
    assert list(map(str, chosen)) == ["cuda:1", "cuda:0"]
    with pytest.raises(UserError, match="torch sees 2 GPUs, none for local rank 2"):
        devices.choose_device("cuda", 2)
    torch.set_float32_matmul_precision(precision)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="no GPU: check nvidia-smi, and that .* is not None; or use device='cpu'"):
        devices.choose_device("cuda")


@pytest.mark.parametrize(("flags", "dtype"), [({}, torch.float32), ({"amx_bf16": True}, torch.bfloat16)])
def test_auto_dtype_is_what_the_processor_multiplies(flags, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags, raising=False)
    assert devices.choose_dtype("auto", CPU) == dtype
    assert devices.choose_dtype("float16", CPU) == torch.float16
    with pytest.raises(UserError, match="dtype must be 'auto' or one of float32, bfloat16, float16, got 'int8'"):
        devices.choose_dtype("int8", CPU)


@pytest.mark.parametrize(("native", "scaled", "dtype"), [
    (True, True, torch.bfloat16), (False, True, torch.float16), (False, False, torch.float32),
])  # fmt: skip
def test_a_gpu_without_bfloat16_trains_in_float16(native, scaled, dtype, monkeypatch):
    """T4, V100, RTX 20xx: float32 is an eighth of the card."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices.choose_dtype("auto", torch.device("cuda"), scaled) == dtype
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a plan for a GPU elsewhere
    assert devices.choose_dtype("auto", torch.device("cuda"), scaled) == torch.bfloat16


@pytest.mark.parametrize(("name", "tflops"), [
    ("NVIDIA A100-SXM4-80GB", 312), ("Tesla T4", 65), ("NVIDIA GeForce RTX 4090", 165), ("NVIDIA H100 PCIe", 756),
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA GH200 480GB", 989),
    ("NVIDIA RTX A1000", 0), ("NVIDIA T400 4GB", 0), ("NVIDIA H1000", 0),
])  # fmt: skip
def test_a_gpu_is_known_by_whole_words(name, tflops, monkeypatch):
    """One that is not known has no mfu."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert devices.peak_flops(torch.device("cuda")) == tflops * 1e12


def test_compile_on_a_cpu_needs_what_it_calls(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    devices.check_compiler(CPU)

    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    devices.check_compiler(torch.device("cuda"))
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler.*install g\+\+ or use compile=False"):
        devices.check_compiler(CPU)
    monkeypatch.setenv("CXX", "/opt/g++-14")
    monkeypatch.setattr(devices.shutil, "which", {"/opt/g++-14": "/opt/g++-14"}.get)
    devices.check_compiler(CPU)

    noexec = SimpleNamespace(f_flag=os.ST_NOEXEC)
    with monkeypatch.context() as patched:
        patched.setattr(devices.os, "statvfs", lambda directory: noexec)
        with pytest.raises(UserError, match="mounted noexec; set TMPDIR to another directory or use compile=False"):
            devices.check_compiler(CPU)
    monkeypatch.setattr(devices.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match="needs .*/Python.h; install python3-dev or use compile=False"):
        devices.check_compiler(CPU)


def test_the_random_state_comes_back():
    torch.manual_seed(4)
    state = devices.rng_state(CPU)
    drawn = torch.rand(3)
    devices.set_rng_state(state, CPU)
    assert torch.equal(torch.rand(3), drawn)
    torch.manual_seed(4)
    assert torch.equal(torch.rand(3), drawn)


def test_the_peak_of_a_cpu_is_not_known():
    assert devices.peak_flops(CPU) == 0


def test_memory_is_measured_on_a_cpu():
    assert 0.01 < devices.peak_memory_gib(CPU) < 1000
