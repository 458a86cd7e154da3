"""Tensors over given memory, new at every hand-out, and whether anything still holds them.

Note [Exact liveness]
    Rationale: a slot may be reused exactly when no tensor, view, storage or other export of its last hand-out is left.
    Whoever counts references of Python objects has to know about all of those, and to verify that a cached object is as
    new as it was. A deleter needs neither: torch calls it when the storage itself ends.
    Approach: each tensor is made from a DLPack capsule whose deleter is a C function that runs without Python: libc's
    ``sem_post``. DLPack hands the deleter the address of the managed-tensor record; the record starts with its version,
    ``major`` and ``minor``, two 32-bit integers. Read as a semaphore this is a count of ``major``, 1, without waiters; the
    post makes it 2. So ``major`` says: 1 = handed out and live, anything else = not. Tensors are ended from any thread,
    with or without the GIL, also while the interpreter exits; the post is one atomic addition.
    Facts relied on: glibc keeps the count of a semaphore in its first 32 bits and the number of waiters in the next 32;
    torch reads the version before it makes the tensor, copies shape and strides, and accepts ``dltensor_versioned``
    capsules (torch 2.9 and newer); CPython keeps a capsule's name as a plain pointer (``_name_word``). All of it is tried
    out once for each device type before it is used (``_posts``).
    Where it does not hold, ``OwnerHandout`` serves by public means: an owner object that torch keeps, and a weak
    reference to it. It costs several times as much.
    Limits: whoever keeps only the number that ``data_ptr()`` gave is not seen.

This module is the place of a native fast path: a compiled ``Handout`` with the same methods.
"""

from __future__ import annotations

import abc
import ctypes
import sys
import weakref
from functools import cache
from typing import Any

import torch

from . import host_memory
from .errors import BufpoolError
from .spec import OutputSpec
from .torch_state import from_dlpack, normal_mode, to_dlpack

__all__ = ["Handout", "OwnerHandout", "PostHandout", "TripleHandout", "make_handout"]


class Handout(abc.ABC):
    """What a slot needs: tensors over its memory, and whether the last ones live."""

    __slots__ = ("capacity", "high_water_rows", "rows")

    kind: str
    """How ends are seen, for ``stats()``."""

    def __init__(self) -> None:
        self.capacity = 0
        """Rows that fit in mapped memory; the slot keeps it."""
        self.rows = 0
        """Rows of the last hand-out."""
        self.high_water_rows = 0
        """Most rows handed out since memory was last given back."""

    @abc.abstractmethod
    def take(self, rows: int) -> Any:
        """New outputs ``[rows, *row_shape]``, rows >= 1; None if the last ones live or ``rows`` is above the capacity."""

    @abc.abstractmethod
    def is_live(self) -> bool:
        """Whether anything holds memory of the last outputs."""

    def lower_high_water(self, rows: int) -> None:
        """Memory above ``rows`` rows was given back: the high-water mark is no higher."""
        self.high_water_rows = min(self.high_water_rows, rows)

    @abc.abstractmethod
    def move(self, addresses: tuple[int, ...]) -> None:
        """Use other base addresses from now on. The last outputs must not live."""

    @abc.abstractmethod
    def release(self) -> None:
        """End the bookkeeping. The last outputs must not live."""


class _Record(ctypes.Structure):
    """DLPack's DLManagedTensorVersioned, its DLTensor spread out."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint32),  # code, bits: 8 bits each; lanes: 16 bits
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _UnversionedRecord(ctypes.Structure):
    """The head of DLPack's DLManagedTensor, as ``torch.utils.dlpack.to_dlpack`` makes it."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint32),
    ]


_LIVE = 1
_IDLE = 2
_RECORD_BYTES = ctypes.sizeof(_Record)
_WORDS = _RECORD_BYTES // 4  # 32-bit words from one record's state to the next

_new_tuple = tuple.__new__
_capsule_name = ctypes.create_string_buffer(b"dltensor_versioned")
_NAME = ctypes.addressof(_capsule_name)
_new_capsule = ctypes.pythonapi["PyCapsule_New"]
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
_capsule_pointer = ctypes.pythonapi["PyCapsule_GetPointer"]
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


@cache
def _describe(device: torch.device, dtype: torch.dtype) -> tuple[int, int, int]:
    """DLPack's device type, device id and dtype word, as torch itself writes them."""
    # No elements: nothing is allocated, so this is legal inside a graph capture too.
    capsule = to_dlpack(torch.empty(0, dtype=dtype, device=device))
    record = _UnversionedRecord.from_address(_capsule_pointer(capsule, b"dltensor"))
    return record.device_type, record.device_id, record.dtype


@cache
def _travels(dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype comes back from DLPack as it went in."""
    tensor = torch.empty(1, dtype=dtype, device="cpu")
    try:
        back = from_dlpack(to_dlpack(tensor))
    except (BufferError, RuntimeError, ValueError):
        return False
    return back.dtype is dtype and back.shape == tensor.shape


def _name_word(capsule: Any, record: int) -> memoryview:
    """The word of a capsule in which CPython keeps the address of its name.

    torch writes another name into it when it uses the capsule up; writing ``_NAME`` back makes the capsule fit for use
    again, which saves making a new one.

    Raises:
        LookupError: the word was not found.
    """
    size = object.__sizeof__(capsule) // 8
    words = memoryview((ctypes.c_uint64 * size).from_address(id(capsule))).cast("B").cast("Q")
    for at in range(1, size):
        if words[at] == _NAME and words[at - 1] == record:
            return words[at : at + 1]
    raise LookupError("capsule: expected its name beside its pointer, got neither")


class PostHandout(Handout):
    """New tensors from DLPack capsules; the deleter posts into the record (Note [Exact liveness])."""

    __slots__ = (
        "_block",
        "_dims",
        "_dims_rows",
        "_others",
        "_outputs_type",
        "_places",
        "_records",
        "_row_places",
        "_states",
    )

    kind = "post"

    def __init__(self, spec: OutputSpec, device: torch.device, addresses: tuple[int, ...]) -> None:
        super().__init__()
        count = len(spec)
        words = [_describe(device, dtype) for dtype in spec.dtypes]
        dims_bytes = sum(16 * (1 + len(shape)) for shape in spec.row_shapes)
        self._block = host_memory.allocate(count * _RECORD_BYTES + dims_bytes)
        dims_start = self._block + count * _RECORD_BYTES
        dims = (ctypes.c_int64 * (dims_bytes // 8)).from_address(dims_start)
        self._records = (_Record * count).from_address(self._block)
        row_places: list[int] = []  # of each tensor, where its row count stands in dims
        at = 0
        for i, shape in enumerate(spec.row_shapes):
            ndim = 1 + len(shape)
            stride = 1
            for axis in range(ndim - 1, 0, -1):
                dims[at + axis] = shape[axis - 1]
                dims[at + ndim + axis] = stride
                stride *= shape[axis - 1]
            dims[at + ndim] = stride
            record = self._records[i]
            record.major = _IDLE
            record.deleter = host_memory.post_address()
            record.data = addresses[i]
            record.device_type, record.device_id, record.dtype = words[i]
            record.ndim = ndim
            record.shape = dims_start + 8 * at
            record.strides = dims_start + 8 * (at + ndim)
            row_places.append(at)
            at += 2 * ndim
        self._row_places = tuple(row_places)
        self._dims_rows = -1  # rows that all shapes say now
        # Of each tensor: its capsule, the capsule's name, and where its state stands in states.
        places: list[tuple[Any, memoryview, int]] = []
        for i in range(count):
            record_address = self._block + i * _RECORD_BYTES
            capsule = _new_capsule(record_address, _NAME, None)
            places.append((capsule, _name_word(capsule, record_address), i * _WORDS))
        self._places = tuple(places)
        self._others = tuple(state for _, _, state in places[1:])
        # Views of memory that outlives them: a word is read and written without a call.
        self._states = memoryview((ctypes.c_uint32 * (count * _WORDS)).from_address(self._block)).cast("B").cast("I")
        self._dims = memoryview(dims).cast("B").cast("q")
        self._outputs_type = spec.outputs_type

    def take(self, rows: int) -> Any:
        states = self._states
        # Claim with the first state. No call and no jump stands between asking and claiming, so that no finalizer of a
        # garbage collection comes in between; whoever asks from here on finds the slot live, with as many rows as the
        # former outputs and these may need.
        if rows > self.capacity or states[0] == _LIVE:
            return None
        states[0] = _LIVE
        former = self.rows
        if rows > former:
            self.rows = rows
        # An exception of a signal handler may come at every call and jump from here on: the claim is taken back, and no
        # tensor stays in this frame, which the exception's traceback keeps. A handler may have kept one all the same.
        tensors: list[torch.Tensor] = []
        is_making = False
        try:
            for state in self._others:
                if states[state] == _LIVE:
                    self.rows = former
                    states[0] = _IDLE
                    return None
            self._places[0][1][0] = _NAME  # the first is marked live already; the others get name and mark together
            is_making = True
            self.rows = rows
            if rows != self._dims_rows:
                self._write_dims(rows)
            for capsule, name, state in self._places:
                name[0] = _NAME
                states[state] = _LIVE
                tensors.append(from_dlpack(capsule))
            return _new_tuple(self._outputs_type, tensors)
        except BaseException:
            del tensors
            self._take_back(former, is_making)
            raise

    def _write_dims(self, rows: int) -> None:
        self._dims_rows = -1  # an exception of a signal handler may leave them half written
        if rows > self.high_water_rows:
            self.high_water_rows = rows
        dims = self._dims
        for at in self._row_places:
            dims[at] = rows
        self._dims_rows = rows

    def _take_back(self, former: int, is_making: bool) -> None:
        """After an exception: end the claim. ``former`` are the rows of the last outputs, if making had not begun.

        A capsule that still has its name was not used up: its tensor was never made, and nothing will post its end. The
        others are idle, or will post when whoever took hold of their tensor lets it go.
        """
        states = self._states
        if not is_making:
            self.rows = former
            states[0] = _IDLE
            return
        for _, name, state in self._places:
            if name[0] == _NAME:
                states[state] = _IDLE

    def is_live(self) -> bool:
        states = self._states
        for _, _, state in self._places:  # noqa: SIM110 (any() with a generator costs three times as much)
            if states[state] == _LIVE:
                return True
        return False

    def lower_high_water(self, rows: int) -> None:
        super().lower_high_water(rows)
        self._dims_rows = -1  # the next take looks at the mark

    def move(self, addresses: tuple[int, ...]) -> None:
        for record, address in zip(self._records, addresses, strict=True):
            record.data = address

    def release(self) -> None:
        if self._block:
            assert not self.is_live(), "a tensor would post into freed memory"
            self.capacity = 0
            self._states.release()
            self._dims.release()
            host_memory.free(self._block)
            self._block = 0


class TripleHandout(PostHandout):
    """Three tensors, as attention kernels write: ``take`` without its loops, which saves a tenth of a hit."""

    __slots__ = ("_triple",)

    def __init__(self, spec: OutputSpec, device: torch.device, addresses: tuple[int, ...]) -> None:
        super().__init__(spec, device, addresses)
        (capsule_0, name_0, _), (capsule_1, name_1, state_1), (capsule_2, name_2, state_2) = self._places
        self._triple = (capsule_0, name_0, capsule_1, name_1, state_1, capsule_2, name_2, state_2)

    def take(self, rows: int) -> Any:
        states = self._states
        if rows > self.capacity or states[0] == _LIVE:  # the claim of PostHandout.take
            return None
        states[0] = _LIVE
        former = self.rows
        if rows > former:
            self.rows = rows
        first = second = third = None
        is_making = False
        try:
            capsule_0, name_0, capsule_1, name_1, state_1, capsule_2, name_2, state_2 = self._triple
            if states[state_1] == _LIVE or states[state_2] == _LIVE:
                self.rows = former
                states[0] = _IDLE
                return None
            name_0[0] = name_1[0] = name_2[0] = _NAME
            is_making = True
            self.rows = rows
            if rows != self._dims_rows:
                self._write_dims(rows)
            first = from_dlpack(capsule_0)
            states[state_1] = _LIVE
            second = from_dlpack(capsule_1)
            states[state_2] = _LIVE
            third = from_dlpack(capsule_2)
            return _new_tuple(self._outputs_type, (first, second, third))
        except BaseException:
            del first, second, third
            self._take_back(former, is_making)
            raise


class _HostOwner:
    """Bytes of the host that torch.frombuffer keeps alive."""

    @staticmethod
    def storage(address: int, nbytes: int, device: torch.device) -> tuple[Any, torch.UntypedStorage]:
        owner = (ctypes.c_uint8 * nbytes).from_address(address)
        return owner, torch.frombuffer(owner, dtype=torch.uint8).untyped_storage()


class _CudaOwner:
    """Bytes of a CUDA device that torch.as_tensor keeps alive."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }

    @staticmethod
    def storage(address: int, nbytes: int, device: torch.device) -> tuple[Any, torch.UntypedStorage]:
        owner = _CudaOwner(address, nbytes)
        return owner, torch.as_tensor(owner, device=device).untyped_storage()


_OWNERS: dict[str, Any] = {"cpu": _HostOwner, "cuda": _CudaOwner}


class OwnerHandout(Handout):
    """New tensors whose storage keeps an owner object; they live as long as it does."""

    __slots__ = ("_addresses", "_device", "_is_taking", "_owner", "_owners", "_spec")

    kind = "owner"

    def __init__(self, spec: OutputSpec, device: torch.device, addresses: tuple[int, ...]) -> None:
        super().__init__()
        self._spec = spec
        self._device = device
        self._addresses = addresses
        self._owners: list[weakref.ref[Any]] = []
        self._is_taking = False
        self._owner: Any = _OWNERS.get(device.type)
        if self._owner is None:
            raise BufpoolError(
                f"{device}: expected a device whose tensors torch can make over given memory, got none;"
                " use FreshAllocator there"
            )

    def take(self, rows: int) -> Any:
        if rows > self.capacity or self._is_taking:
            return None
        # Claim, and only then look: the look makes calls, in which a collection may run a finalizer. It finds the slot
        # live, with as many rows as the former outputs and these may need.
        self._is_taking = True
        former = self.rows
        if rows > former:
            self.rows = rows
        is_making = False
        try:
            if any(owner() is not None for owner in self._owners):
                self.rows = former
                return None
            is_making = True
            self.rows = rows
            outputs = self._make(rows)
            self.high_water_rows = max(self.high_water_rows, rows)
            return outputs
        except BaseException:
            if not is_making:
                self.rows = former
            raise
        finally:
            self._is_taking = False

    def _make(self, rows: int) -> Any:
        """The outputs. Their owners are watched from the first on, for whoever takes hold of one before an exception."""
        spec = self._spec
        tensors: list[torch.Tensor] = []
        self._owners = owners = []
        owner = storage = None
        try:
            for address, shape, dtype, row_bytes in zip(
                self._addresses, spec.row_shapes, spec.dtypes, spec.row_bytes, strict=True
            ):
                owner, storage = self._owner.storage(address, rows * row_bytes, self._device)
                owners.append(weakref.ref(owner))
                owner = None
                tensor = torch.empty(0, dtype=dtype, device=self._device)
                tensors.append(tensor.set_(storage, 0, (rows, *shape)))  # type: ignore[call-overload]
                storage = None
            return spec.outputs_type(*tensors)
        except BaseException:
            owner = storage = None  # this frame, which the exception's traceback keeps, holds nothing
            tensor = None
            tensors.clear()
            raise

    def is_live(self) -> bool:
        return self._is_taking or any(owner() is not None for owner in self._owners)

    def move(self, addresses: tuple[int, ...]) -> None:
        self._addresses = addresses

    def release(self) -> None:
        assert not self.is_live(), "a tensor would be left over freed memory"
        self._owners = []
        self.capacity = 0


def _try_posts(device: torch.device, address: int) -> bool:
    """Make, view and drop tensors at ``address`` (64 bytes); whether their ends, and nothing before, were seen."""
    if sys.implementation.name != "cpython" or host_memory.post_address() is None:
        return False
    try:
        handout = PostHandout(OutputSpec(probe=((4,), torch.float32)), device, (address,))
    except (BufferError, LookupError, RuntimeError):
        return False
    handout.capacity = 4
    for rows in (4, 3):
        try:
            with normal_mode(False):
                outputs = handout.take(rows)
        except (BufferError, RuntimeError, TypeError, ValueError):
            return False
        tensor = outputs[0]
        is_exact = tensor.data_ptr() == address and tensor.shape == (rows, 4) and tensor.device == device
        is_exact = is_exact and tensor.untyped_storage().nbytes() == 16 * rows and tensor.dtype is torch.float32
        view = tensor[1:]
        del outputs, tensor
        is_seen = handout.is_live()
        del view
        if not is_exact or not is_seen or handout.is_live():
            return False
    handout.release()
    return True


_posts: dict[str, bool] = {}


def make_handout(spec: OutputSpec, device: torch.device, addresses: tuple[int, ...], probe_address: int) -> Handout:
    """The quickest exact hand-out that works here.

    Args:
        spec: what is handed out.
        device: where the memory is; with an index, except for the CPU.
        addresses: base of each tensor.
        probe_address: 64 bytes of the device that the first call for a device type may make a tensor over. They are not
            read or written.

    Raises:
        BufpoolError: torch cannot make tensors over given memory on this device.
    """
    if device.type not in _posts:
        _posts[device.type] = _try_posts(device, probe_address)
    if _posts[device.type] and all(map(_travels, spec.dtypes)):
        return (TripleHandout if len(spec) == 3 else PostHandout)(spec, device, addresses)
    return OwnerHandout(spec, device, addresses)
