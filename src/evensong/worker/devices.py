"""Which device runs a model here. Devices are loaded by name, so that torch comes only where it computes."""

from __future__ import annotations

import importlib
from typing import Any

from evensong.kernels.cpu import native
from evensong.utils.machine import may_have_cuda
from evensong.worker.device import Device, DeviceSettings

NATIVE = "evensong.worker.native_device:NativeDevice"
TORCH = "evensong.worker.torch_device:TorchDevice"


def make_device(settings: DeviceSettings) -> Device:
    """The device for `auto`, `cpu` or `cuda`. Raises ConfigError when there is none."""
    if settings.device == "cuda" or (settings.device == "auto" and may_have_cuda()):
        device = _load(TORCH, settings)
        if device.kind != "cpu":
            return device
    return _load(NATIVE if native.available() else TORCH, settings)


def _load(place: str, settings: DeviceSettings) -> Device:
    module, _, name = place.partition(":")
    made: Any = getattr(importlib.import_module(module), name)
    device: Device = made(settings)
    return device
