"""DLPack exchange read field by field, as ``dlpack.h`` lays it out (DLPack 1.1), by ctypes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

READ_ONLY = 1
_CODES = {(2, 16): "float16", (2, 32): "float32", (4, 16): "bfloat16"}


class _DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _ManagedUnversioned(ctypes.Structure):
    _fields_ = [
        ("tensor", _DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


def _pointer_of(capsule: Any, name: bytes) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(get(capsule, name))


def name_of(capsule: Any) -> str:
    """The capsule's name, which tells its layout."""
    get = ctypes.pythonapi.PyCapsule_GetName
    get.restype, get.argtypes = ctypes.c_char_p, [ctypes.py_object]
    return bytes(get(capsule)).decode()


@dataclass
class Fields:
    """A tensor as its capsule describes it; strides count elements."""

    capsule: Any  # keeps the memory
    version: tuple[int, int] | None
    flags: int
    data: int
    device: tuple[int, int]
    dtype: tuple[int, int, int]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    byte_offset: int

    @property
    def dtype_name(self) -> str:
        return _CODES[self.dtype[:2]]


def read(capsule: Any) -> Fields:
    """The fields of an unconsumed DLPack capsule, of either layout."""
    name = name_of(capsule)
    is_versioned = name == "dltensor_versioned"
    assert is_versioned or name == "dltensor"
    layout = _ManagedVersioned if is_versioned else _ManagedUnversioned
    managed = layout.from_address(_pointer_of(capsule, name.encode()))
    tensor = managed.tensor
    return Fields(
        capsule=capsule,
        version=(managed.major, managed.minor) if is_versioned else None,
        flags=managed.flags if is_versioned else 0,
        data=tensor.data or 0,
        device=(tensor.device.device_type, tensor.device.device_id),
        dtype=(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes),
        shape=tuple(tensor.shape[: tensor.ndim]),
        strides=tuple(tensor.strides[: tensor.ndim]),
        byte_offset=tensor.byte_offset,
    )


class _HostMemory:
    def __init__(self, fields: Fields) -> None:
        item_bytes = fields.dtype[1] // 8
        self.owner = fields
        self.__array_interface__ = {
            "version": 3,
            "data": (fields.data + fields.byte_offset, False),
            "typestr": {"float32": "<f4", "float16": "<f2", "bfloat16": "<i2"}[fields.dtype_name],
            "shape": fields.shape,
            "strides": tuple(stride * item_bytes for stride in fields.strides),
        }


def host_array(exported: Any) -> Any:
    """A numpy array of what DLPack calls device memory: right only for the stand-in driver, whose
    device pointers are addresses of this process. bfloat16 as int16: numpy has none."""
    return np.asarray(_HostMemory(read(exported.__dlpack__(max_version=(1, 0)))))
