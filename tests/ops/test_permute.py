"""The lookup by byte permutation: its assembly, run instruction by instruction here, against the folded codes."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hf_turboquant.packing import fold_codes, plane_widths

pytest.importorskip("triton")
from hf_turboquant.ops.triton.permute import _assembly, _shift_assembly, _word_assembly

# the functions behind triton's constexpr_function
ASSEMBLE = getattr(_assembly, "__wrapped__", _assembly)
ASSEMBLE_SHIFT = getattr(_shift_assembly, "__wrapped__", _shift_assembly)
ASSEMBLE_WORD = getattr(_word_assembly, "__wrapped__", _word_assembly)


def _permute(low: int, high: int, selector: int) -> int:
    assert not selector & 0x8888, "a nibble of 8 or more spreads a sign"
    source = low | high << 32
    taken = [(source >> 8 * ((selector >> 4 * i) & 7)) & 255 for i in range(4)]
    return sum(byte << 8 * i for i, byte in enumerate(taken))


def _add_halves(left: int, right: int) -> int:
    halves = np.array([left, right], np.uint32).view(np.float16).reshape(2, 2)
    return int((halves[0] + halves[1]).view(np.uint32)[0])


OPERATIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "prmt.b32": _permute,
    "add.rn.f16x2": _add_halves,
}


def _run(assembly: str, inputs: dict[str, int]) -> dict[str, int]:
    """Return the registers that the instructions leave."""
    registers = dict(inputs)

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for statement in re.split(r"[;{}]", assembly):
        words = statement.replace(",", " ").split()
        if words and words[0] != ".reg":
            name, target, *operands = words
            registers[target] = OPERATIONS[name](*map(value, operands)) & 0xFFFFFFFF
    return registers


def _word(values: np.ndarray) -> int:
    return int(np.asarray(values, np.uint8).view(np.uint32)[0])


def _tables(bits: int, magnitudes: np.ndarray) -> dict[str, int]:
    """Return the table operands as ``prepare_table`` lays them out."""
    if bits <= 2:
        halves = [np.concatenate([-magnitudes, magnitudes])]
    else:
        halves = [-magnitudes[:4], -magnitudes[4:]] if bits == 4 else [-magnitudes]
    operands: dict[str, int] = {}
    for index, part in enumerate(halves):
        words = np.zeros(4, np.uint16)
        words[: len(part)] = part.astype(np.float16).view(np.uint16)
        operands[f"T{2 * index}"] = _word(words >> 8)
        operands[f"T{2 * index + 1}"] = _word(words & 255)
    return operands


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_every_byte(bits: int) -> None:
    """Every code at every place of a byte becomes its centroid, beside any neighbours."""
    half = 1 << (bits - 1)
    magnitudes = np.linspace(0.01, 0.3, half, dtype=np.float32)
    centroids = np.concatenate([-magnitudes[::-1], magnitudes]).astype(np.float16)
    if bits == 8:
        centroids = ((np.arange(256) - 127.5) / 128).astype(np.float16)
    width = plane_widths(bits)[0]
    rng = np.random.default_rng(0)
    for part in range(8 // width):
        for first in range(0, 256, 4):
            packed, signs = np.arange(first, first + 4), rng.integers(0, 256, 4)
            folded = (packed >> part * width) & ((1 << width) - 1)
            sign_shift = part * 2
            if bits == 3:
                folded = folded | ((signs >> sign_shift) & 1) << 2
            operands = {"W": _word(packed)} | (_tables(bits, magnitudes) if bits < 8 else {})
            if bits == 3:
                operands["V"] = _word(signs)
            left = _run(ASSEMBLE(bits, part * width, sign_shift), operands)
            got = np.array([left["X"], left["Y"]], np.uint32).view(np.float16)
            codes = fold_codes(torch.tensor(folded, dtype=torch.uint8), bits).numpy()
            np.testing.assert_array_equal(got, centroids[codes])


@pytest.mark.parametrize("names", ["$4", "$4 - $5 $6", "$4 $5 $6 $7", "$4 - $5 $6 $7 $8"], ids=["8", "2", "3", "4"])
def test_words_name_every_operand(names: str, request: pytest.FixtureRequest) -> None:
    """A call on words has four results and no operand without a register."""
    bits = int(request.node.callspec.id)
    found = set(re.findall(r"\$\d", ASSEMBLE_WORD(bits, 0, names)))
    assert found == {"$0", "$1", "$2", "$3"} | (set(names.split()) - {"-"})
    assert not re.search(r"\b(X|Y|W|V|T\d)\b", ASSEMBLE_WORD(bits, 0, names))


def test_shift_moves_each_byte_by_its_own_half() -> None:
    rng = np.random.default_rng(1)
    for _ in range(100):
        signs, halves = rng.integers(0, 256, 4), rng.integers(0, 2, 4)
        left = _run(ASSEMBLE_SHIFT(), {"$1": _word(signs), "$2": _word(halves)})
        got = np.array([left["$0"]], np.uint32).view(np.uint8)
        kept = np.where(halves == 1, 0x7F, 0xFF)
        np.testing.assert_array_equal(got & kept, (signs >> halves) & kept)
