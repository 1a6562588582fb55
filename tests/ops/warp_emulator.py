"""Run a Gluon kernel of one-element-per-thread tensors on the CPU, its inline assembly included.

Triton's interpreter runs neither Gluon nor assembly. Here the modules of the kernel are executed as plain Python with a
stand-in for ``gl``; tensors are numpy arrays, addresses are those of registered torch tensors, and every access outside
them is an error.
"""

from __future__ import annotations

import importlib
import inspect
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

_NUMPY = {
    torch.uint8: np.uint8, torch.int8: np.int8, torch.int32: np.int32, torch.int64: np.int64,
    torch.float16: np.float16, torch.float32: np.float32, torch.bfloat16: np.uint16,
}  # fmt: skip


class Array(np.ndarray):
    """A numpy array with the conversions of a Triton tensor."""

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        if isinstance(dtype, PointerType):
            return Pointer(self, dtype.element_ty)
        if bitcast:
            return np.ascontiguousarray(self).view(_NUMPY[dtype]).view(Array)
        if dtype in (torch.bfloat16, torch.float16):
            rounded = torch.from_numpy(np.asarray(self, dtype=np.float32)).to(dtype).float()
            return rounded.numpy().view(Array)
        return self.astype(_NUMPY[dtype]).view(Array)


class PointerType:
    def __init__(self, element_ty: torch.dtype) -> None:
        self.element_ty = element_ty


class Pointer:
    """Addresses of elements of one type."""

    def __init__(self, address: Any, element_ty: torch.dtype) -> None:
        self.address = np.asarray(address, dtype=np.int64)
        self.dtype = PointerType(element_ty)

    def __add__(self, offset: Any) -> Pointer:
        size = self.dtype.element_ty.itemsize
        return Pointer(self.address + np.asarray(offset, dtype=np.int64) * size, self.dtype.element_ty)

    def to(self, _: Any) -> Array:
        return self.address.view(Array)


class Memory:
    """The bytes of some torch tensors, by address."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.runs = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                whole = torch.tensor([], dtype=torch.uint8).set_(storage)
                self.runs.append((storage.data_ptr(), whole.numpy()))

    def access(self, address: np.ndarray, size: int, values: np.ndarray | None = None) -> np.ndarray:
        """Read, or write ``values`` ``(n, size)`` to, ``size`` bytes at each of ``n`` addresses."""
        result = np.zeros((address.size, size), np.uint8)
        done = np.zeros(address.size, bool)
        for base, content in self.runs:
            inside = ~done & (address >= base) & (address + size <= base + content.size)
            index = (address[inside] - base)[:, None] + np.arange(size)
            if values is None:
                result[inside] = content[index]
            else:
                content[index] = values[inside]
            done |= inside
        assert done.all(), "access outside every tensor"
        assert not (address % size).any(), "access that is not aligned to its size"
        return result


def _array(values: Any, dtype: Any = None) -> Array:
    return np.asarray(values, dtype=dtype).view(Array)


class Machine:
    """What ``triton.experimental.gluon.language`` offers, for one program at a time."""

    int32, int64, float16, float32, bfloat16 = (
        torch.int32, torch.int64, torch.float16, torch.float32, torch.bfloat16,
    )  # fmt: skip
    constexpr = staticmethod(lambda value: value)
    static_range = range
    pointer_type = PointerType
    BlockedLayout = SliceLayout = NVMMADistributedLayout = DotOperandLayout = staticmethod(lambda *_, **__: None)
    maximum, minimum = (staticmethod(lambda a, b, op=op: _array(op(a, b))) for op in (np.maximum, np.minimum))
    join = staticmethod(lambda a, b: _array(np.stack([a, b], axis=-1)))
    permute = staticmethod(lambda values, order: values.transpose(order))
    reshape = staticmethod(lambda values, shape: values.reshape(shape))
    max = staticmethod(lambda values, axis: _array(np.max(values, axis=axis)))
    sum = staticmethod(lambda values, axis: _array(np.sum(values, axis=axis)))
    exp2 = staticmethod(lambda values: _array(np.exp2(values)))
    convert_layout = staticmethod(lambda values, _: values)

    def __init__(self, memory: Memory, grid: tuple[int, ...]) -> None:
        self.memory = memory
        self.grid = grid
        self.program = (0, 0, 0)

    def program_id(self, axis: int) -> Array:
        return _array(self.program[axis], np.int32)

    def num_programs(self, axis: int) -> Array:
        return _array(self.grid[axis], np.int32)

    @staticmethod
    def arange(start: int, end: int, layout: Any = None) -> Array:
        return _array(np.arange(start, end), np.int32)

    @staticmethod
    def full(shape: list[int], value: Any, dtype: torch.dtype, layout: Any = None) -> Array:
        return _array(np.full(shape, value), _NUMPY[dtype])

    def zeros(self, shape: list[int], dtype: torch.dtype, layout: Any = None) -> Array:
        return self.full(shape, 0, dtype)

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Array:
        # a Python number takes the type of the other side
        kind = next((x.dtype for x in (a, b) if isinstance(x, np.ndarray)), None)
        if kind is None:
            kind = np.float32 if isinstance(a, float) else np.int32
        return _array(np.where(condition, np.asarray(a, kind), np.asarray(b, kind)))

    def load(self, pointer: Pointer, mask: Any = None, other: Any = 0) -> Array:
        dtype = pointer.dtype.element_ty
        address = pointer.address
        kept = np.broadcast_to(True if mask is None else mask, address.shape).ravel()
        raw = self.memory.access(address.ravel()[kept], dtype.itemsize)
        values = np.full(address.size, other, np.float32 if dtype.is_floating_point else _NUMPY[dtype])
        found = raw.view(_NUMPY[dtype]).ravel()
        values[kept] = (found.astype(np.uint32) << 16).view(np.float32) if dtype is torch.bfloat16 else found
        return _array(values.reshape(address.shape))

    def store(self, pointer: Pointer, values: Any, mask: Any = None) -> None:
        dtype = pointer.dtype.element_ty
        shape = np.broadcast_shapes(pointer.address.shape, np.shape(values))
        kept = np.broadcast_to(True if mask is None else mask, shape).ravel()
        address = np.broadcast_to(pointer.address, shape).ravel()[kept]
        chosen = np.ascontiguousarray(np.broadcast_to(values, shape).ravel()[kept].astype(_NUMPY[dtype]))
        self.memory.access(address, dtype.itemsize, chosen.view(np.uint8).reshape(-1, dtype.itemsize))

    def inline_asm_elementwise(
        self, asm: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int
    ) -> Any:
        assert pack == 1
        dtypes = dtype if isinstance(dtype, (tuple, list)) else (dtype,)
        assert constraints.count("=") == len(dtypes)
        assert constraints.count(",") + 1 == len(dtypes) + len(args)
        shape = np.broadcast_shapes(*(np.shape(arg) for arg in args))
        inputs = [np.broadcast_to(arg, shape) for arg in args]
        results = [_array(out.view(_NUMPY[t])) for out, t in zip(self._execute(asm, inputs, len(dtypes)), dtypes)]
        return results[0] if dtype is dtypes[0] else tuple(results)

    def _execute(self, asm: str, inputs: list[np.ndarray], num_outputs: int) -> list[np.ndarray]:
        registers: dict[str, np.ndarray] = {}
        for index, value in enumerate(inputs):
            wide = np.uint64 if value.dtype.itemsize == 8 else np.uint32
            registers[f"${num_outputs + index}"] = np.ascontiguousarray(value).view(wide)
        # braces around vectors stay, braces around the block go
        body = re.sub(r"^\s*\{\s(.*)\}\s*$", r"\1", asm.strip(), flags=re.DOTALL)
        for statement in filter(None, (part.strip() for part in body.split(";"))):
            if statement.startswith(".reg"):
                continue
            opcode, operands = statement.split(None, 1)
            names = [re.sub(r"[{}\[\]]", "", name).strip() for name in operands.split(",")]
            width = next((run for run in (4, 2) if opcode.startswith("ld.") and f".v{run}." in opcode), 1)
            outputs = _outputs(opcode, width)
            values = [self._read(name, registers, inputs[0].shape) for name in names[outputs:]]
            found = self._operation(opcode, width, values)
            registers.update(zip(names[:outputs], found, strict=True))
        return [registers[f"${index}"] for index in range(num_outputs)]

    @staticmethod
    def _read(name: str, registers: dict[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        if name in registers:
            return registers[name]
        return np.full(shape, int(name, 0) & 0xFFFFFFFF, np.uint32)

    def _operation(self, opcode: str, width: int, values: list[np.ndarray]) -> list[np.ndarray]:
        if opcode.startswith("ld.global"):
            address = values[0].view(np.int64).ravel()
            raw = self.memory.access(address, 4 * width).reshape(-1, width, 4)
            return [
                np.ascontiguousarray(raw[:, word]).view(np.uint32).reshape(values[0].shape) for word in range(width)
            ]
        name = next(name for name in _OPERATIONS if opcode.startswith(name))
        found = _OPERATIONS[name](opcode, *values)
        return list(found) if isinstance(found, tuple) else [found]


def _outputs(opcode: str, width: int) -> int:
    if opcode.startswith("mma."):
        return 4
    return 2 if opcode == "mov.b32" else width


def _float(x: np.ndarray) -> np.ndarray:
    return x.view(np.float32)


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)


def _permute(_: str, a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    pool = np.stack([(word >> (8 * byte)) & 0xFF for word in (a, b) for byte in range(4)])
    result = np.zeros_like(a)
    for position in range(4):
        nibble = (selector >> (4 * position)) & 0xF
        byte = np.take_along_axis(pool, (nibble & 7)[None].astype(np.int64), 0)[0]
        byte = np.where(nibble & 8, np.where(byte & 0x80, 0xFF, 0), byte).astype(np.uint32)
        result |= byte << (8 * position)
    return result


def _lanes(x: np.ndarray, source: np.ndarray) -> np.ndarray:
    return np.take_along_axis(x, (source % 32).astype(np.int64), axis=-1)


def _shuffle(opcode: str, x: np.ndarray, operand: np.ndarray, _clamp: np.ndarray, _members: np.ndarray) -> np.ndarray:
    lane = np.broadcast_to(np.arange(32), x.shape)
    return _lanes(x, lane ^ operand if ".bfly." in opcode else operand)


def _ballot(x: np.ndarray) -> np.ndarray:
    bits = x << np.arange(32, dtype=np.uint32)
    return np.broadcast_to(bits.sum(axis=-1, keepdims=True, dtype=np.uint32), x.shape)


def _transpose(_: str, x: np.ndarray) -> np.ndarray:
    halves = x.view(np.uint16).reshape(-1, 8, 8)
    return np.ascontiguousarray(halves.transpose(0, 2, 1)).view(np.uint32).reshape(x.shape)


def _matrix_product(opcode: str, *values: np.ndarray) -> tuple[np.ndarray, ...]:
    """16 x 8 tiles of a warp; the layouts are those of the PTX manual."""
    warps = values[0].shape[0]
    types = opcode.split(".")[-3:-1]
    lanes = np.stack(values[:6]).reshape(6, warps, 8, 4)

    def elements(part: np.ndarray, kind: str) -> np.ndarray:
        part = np.ascontiguousarray(part)[..., None]
        if kind == "bf16":
            return (part.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return part.view(np.int8 if kind == "s8" else np.uint8).astype(np.int64)

    a = elements(lanes[:4], types[0])  # [register, warp, row, t, summand]
    b = elements(lanes[4:], types[1])
    rows = [np.concatenate([a[side], a[2 + side]], axis=-1) for side in (0, 1)]
    columns = np.concatenate([b[0], b[1]], axis=-1)
    products = [np.einsum("wrts,wcts->wrc", part, columns) for part in rows]
    out = []
    for register in range(4):
        part = products[register // 2].reshape(warps, 8, 4, 2)[..., register % 2].reshape(warps, 32)
        start = values[6 + register]
        if types[0] == "bf16":
            out.append(_bits(part + _float(start)))
        else:
            total = part + start.view(np.int32)
            assert np.abs(total).max() < 2**31, "a sum overflows"
            out.append(total.astype(np.int32).view(np.uint32))
    return tuple(out)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "and.b32": lambda _, a, b: a & b,
    "xor.b32": lambda _, a, b: a ^ b,
    "shr.u32": lambda _, a, b: a >> b,
    "shl.b32": lambda _, a, b: a << b,
    "lop3.b32": lambda _, a, b, c, table: np.where(table == 0xEA, (a & b) | c, np.uint32(0xDEADBEEF)).astype(np.uint32),
    "prmt.b32": _permute,
    "mad.lo.s32": lambda _, a, b, c: a * b + c,
    "cvt.rn.f32.s32": lambda _, a: _bits(a.view(np.int32).astype(np.float32)),
    "setp.ne.b32": lambda _, a, b: (a != b).astype(np.uint32),
    "vote.sync.ballot": lambda _, a, _members: _ballot(a),
    "mov.b32": lambda _, a: (a & 0xFFFF, a >> 16),
    "cvt.f32.f16": lambda _, a: _bits(a.astype(np.uint16).view(np.float16).astype(np.float32)),
    "fma.rn.f32": lambda _, a, b, c: _bits(
        _float(a).astype(np.float64) * _float(b).astype(np.float64) + _float(c).astype(np.float64)
    ),
    "add.f32": lambda _, a, b: _bits(_float(a) + _float(b)),
    "max.f32": lambda _, a, b: _bits(np.maximum(_float(a), _float(b))),
    "ex2.approx.ftz.f32": lambda _, a: _bits(np.exp2(np.maximum(_float(a), -1000.0).astype(np.float64))),
    "rcp.approx.ftz.f32": lambda _, a: _bits(1.0 / _float(a)),
    "shfl.sync": _shuffle,
    "movmatrix": _transpose,
    "mma.sync": _matrix_product,
}


class EmulatedKernel:
    """A kernel called as Triton's are: ``kernel[grid](arguments, num_warps=...)``.

    Args:
        name: The kernel.
        modules: Names of the modules it is made of, each after those it imports.

    ``reachable`` are tensors it may access besides its arguments.
    """

    def __init__(self, name: str, modules: Sequence[str]) -> None:
        self.name, self.modules = name, modules
        self.reachable: tuple[torch.Tensor, ...] = ()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self._run(grid, args, kwargs)

    def _run(self, grid: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [*self.reachable, *(arg for arg in args if isinstance(arg, torch.Tensor))]
        machine = Machine(Memory(tensors), grid)
        kernel = self._load(machine)
        names = set(inspect.signature(kernel).parameters)
        constants = {key: value for key, value in kwargs.items() if key in names}
        values = [
            Pointer(arg.data_ptr(), arg.dtype) if isinstance(arg, torch.Tensor)
            else _array(arg, np.int64 if abs(arg) >= 2**31 else np.int32) if isinstance(arg, int)
            else np.float32(arg)
            for arg in args
        ]  # fmt: skip
        with np.errstate(over="ignore", under="ignore"):
            for x in range(grid[0]):
                for y in range(grid[1]):
                    for z in range(grid[2]):
                        machine.program = (x, y, z)
                        kernel(*values, **constants)

    def _load(self, machine: Machine) -> Callable[..., None]:
        gluon = types.SimpleNamespace(jit=_identity, constexpr_function=_identity)
        names = {"gl": machine, "gluon": gluon, "mma_v2": lambda a, b, c: _array(a @ b + c)}
        for module in self.modules:
            names = _execute_module(module, names)
        kernel: Callable[..., None] = names[self.name]
        return kernel


def _identity(function: Any = None, **_: Any) -> Any:
    return _identity if function is None else function


def _execute_module(name: str, names: dict[str, Any]) -> dict[str, Any]:
    source = inspect.getsource(importlib.import_module(name))
    kept = re.sub(r"^from (triton|hf_turboquant)[^\n(]*(\([^)]*\)|[^\n]*)$", "", source, flags=re.MULTILINE)
    namespace = {**names, "__name__": name}
    exec(compile(kept, name, "exec", dont_inherit=True), namespace)
    return namespace
