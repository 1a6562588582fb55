"""Launches noted once and repeated past Triton's binder, which costs more time than a decode step has.

Triton looks at every argument of every launch to find the binary that fits. Between two flushes of a layer nothing
changes but the addresses of a few fresh tensors and one or two numbers that no binary depends on: such a launch goes to
the binary found the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel

ALIGNMENT = 16
"""Bytes; whether an address is a multiple is part of what a binary is compiled for."""

LARGEST_NUMBER = 2**31 - 1
"""What fits the integers that binaries are compiled for; Triton compiles another for a larger one."""

FIRST_TRITON, LAST_TRITON = (3, 6), (3, 9)
"""Tritons whose binaries are known to start as :meth:`Replay.run` starts them; others bind every launch."""

Launcher = Callable[[Any], Any]
"""What a kernel goes through before ``[grid](...)``."""


def as_is(kernel: Any) -> Any:
    """Return the kernel: its launches are not noted."""
    return kernel


@dataclass(frozen=True)
class _Launch:
    """One launch.

    Attributes:
        start: Starts the binary, given the stream and the arguments.
        arguments: What Triton passes first, then the kernel's arguments of the first time, tensors as addresses.
        pointers: Position, index of the fresh tensor, and offset in bytes of each argument that lies in one.
        numbers: Position, and index among the numbers, of each argument that changes.
    """

    start: Callable[..., None]
    arguments: list[Any]
    pointers: tuple[tuple[int, int, int], ...]
    numbers: tuple[tuple[int, int], ...]


class Recorder:
    """Launches kernels as they would be without it, and notes how.

    Args:
        fresh: Tensors that others of the same shape, strides and dtype take the place of when launches are repeated.
        numbers: Names of the parameters that change. They must not be specialized on.
    """

    def __init__(self, fresh: Sequence[torch.Tensor], numbers: Sequence[str]) -> None:
        self._fresh = list(fresh)
        self._numbers = {name: index for index, name in enumerate(numbers)}
        self._launches: list[_Launch] = []
        self._kept: list[torch.Tensor] = []
        self._aligned: set[int] = set()
        # of two at one address it could not be told which of them an argument is
        self._repeatable = _known_triton() and len({tensor.data_ptr() for tensor in fresh}) == len(fresh)

    def __call__(self, kernel: Any) -> _Noted:
        """Return what stands for a kernel."""
        return _Noted(self, kernel)

    def replay(self) -> Replay | None:
        """Return the launches so far; None when one cannot be repeated: interpreted, or on addresses not aligned."""
        aligned = all(self._fresh[index].data_ptr() % ALIGNMENT == 0 for index in self._aligned)
        if not (self._repeatable and self._launches and aligned):
            return None
        return Replay(self._launches, self._kept, self._fresh[0].device.index, tuple(self._aligned))

    def note(self, kernel: Any, compiled: Any, grid: tuple[int, ...], args: tuple[Any, ...], kwargs: Any) -> None:
        """Note one launch. Called by the stand-in of the kernel."""
        self._repeatable = self._repeatable and isinstance(compiled, CompiledKernel)
        if not self._repeatable:
            return
        # no hooks: Replay.run does nothing while there are some
        first = [compiled.function, compiled.packed_metadata, None, None, None]
        arguments = [*first, *args, *(kwargs[name] for name in kernel.arg_names[len(args) :])]
        pointers = []
        for position, argument in enumerate(arguments):
            if isinstance(argument, torch.Tensor):
                arguments[position] = argument.data_ptr()
                index = self._find(argument)
                if index is None:
                    self._kept.append(argument)
                    continue
                pointers.append((position, index, argument.data_ptr() - self._fresh[index].data_ptr()))
                if not kernel.params[position - len(first)].do_not_specialize_on_alignment:
                    self._aligned.add(index)
        numbers = tuple(
            (position, self._numbers[name])
            for position, name in enumerate(kernel.arg_names, start=len(first))
            if name in self._numbers
        )
        start = partial(compiled.run, *(*grid, 1, 1)[:3])
        self._launches.append(_Launch(start, arguments, tuple(pointers), numbers))

    def _find(self, argument: torch.Tensor) -> int | None:
        """Return which fresh tensor an argument is or lies in."""
        storage, address = argument.untyped_storage().data_ptr(), argument.data_ptr()
        inside = [i for i, tensor in enumerate(self._fresh) if tensor.untyped_storage().data_ptr() == storage]
        # keys and values may lie in one storage this time, and apart the next; a mask is seen as bytes
        same = (i for i in inside if self._fresh[i].data_ptr() == address)
        return next(same, inside[0] if inside else None)


@dataclass(frozen=True)
class _Noted:
    """Stands for a kernel whose launches are noted."""

    recorder: Recorder
    kernel: Any

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.recorder.note(self.kernel, self.kernel[grid](*args, **kwargs), grid, args, kwargs)

        return launch


class Replay:
    """Launches to repeat.

    Args:
        launches: In order.
        kept: Tensors whose addresses are among the arguments; they live as long as this.
        device: Index of the device.
        aligned: Indices of the fresh tensors whose addresses must be aligned.
    """

    def __init__(
        self, launches: list[_Launch], kept: list[torch.Tensor], device: int | None, aligned: tuple[int, ...]
    ) -> None:
        self._launches = launches
        self._kept = kept
        self._device = device
        self._aligned = aligned

    def run(self, fresh: Sequence[torch.Tensor], numbers: Sequence[int]) -> bool:
        """Repeat the launches on other tensors.

        Args:
            fresh: In the place of the recorder's, with the same shapes, strides, dtypes and device.
            numbers: In the place of the recorder's.

        Returns:
            Whether it was done: not when an address is not aligned or a number not as small as the binaries need it,
            nor while a profiler listens to Triton's launches.
        """
        if _hooked():
            return False
        addresses = [tensor.data_ptr() for tensor in fresh]
        for index in self._aligned:
            if addresses[index] % ALIGNMENT:
                return False
        if max(numbers, default=0) > LARGEST_NUMBER:
            return False
        driver = triton.runtime.driver.active
        if driver.get_current_device() != self._device:
            with torch.cuda.device(self._device):
                self._launch(addresses, numbers, driver.get_current_stream(self._device))
        else:
            self._launch(addresses, numbers, driver.get_current_stream(self._device))
        return True

    def _launch(self, addresses: list[int], numbers: Sequence[int], stream: int) -> None:
        for launch in self._launches:
            arguments = launch.arguments.copy()
            for position, index, offset in launch.pointers:
                arguments[position] = addresses[index] + offset
            for position, index in launch.numbers:
                arguments[position] = numbers[index]
            launch.start(stream, *arguments)


@lru_cache(maxsize=1)
def _known_triton() -> bool:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return FIRST_TRITON <= version <= LAST_TRITON and torch.version.hip is None


def _hooked() -> bool:
    """Whether somebody wants to hear of launches."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
