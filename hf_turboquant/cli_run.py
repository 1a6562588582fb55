"""What the commands do: call the library, and show what it reports as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hf_turboquant.bench import Geometry, bench
from hf_turboquant.doctor import doctor, verify_codebooks
from hf_turboquant.errors import ConfigError
from hf_turboquant.loading import check_device, check_dtype, check_presets, default_device, read_config, weight_bytes
from hf_turboquant.planner import SHAPES, SPEEDS, Budget, ModelShape, PlanRow, find_device, parse_count, parse_size
from hf_turboquant.planner import plan as make_plan
from hf_turboquant.presets import PRESETS, resolve_config
from hf_turboquant.shapes import bits_per_value
from hf_turboquant.verify import BITS, HEAD_DIMS
from hf_turboquant.verify import verify as run_checks

MIB = 2**20


def run_plan(
    console: Console,
    *,
    model: str | None,
    layers: int | None,
    kv_heads: int,
    head_dim: int,
    device: str,
    memory: str | None,
    gpus: int,
    tokens: str,
    weights: str | None,
    fixed: str,
    activations: str,
    presets: Sequence[str] | None,
    as_json: bool,
) -> None:
    """Plan memory and print the table."""
    check_presets(presets or [])
    shape = _model_shape(model, layers, kv_heads, head_dim)
    size = parse_size(weights) if weights else shape.weight_bytes or 0
    each = parse_size(memory) if memory else find_device(device).memory_bytes
    budget = Budget(each, gpus, size, parse_size(fixed), parse_size(activations))
    count = parse_count(tokens)
    rows = make_plan(shape, budget, count, presets or list(PRESETS), None if memory else SPEEDS.get(device.lower()))
    timed = any(row.attention_seconds is not None for row in rows)
    if as_json:
        facts = {"model": shape.name, "tokens": count, "budget": asdict(budget)}
        _print_json(console, {**facts, "rows": [asdict(row) for row in rows]})
        return
    where = f"{gpus} x {memory or find_device(device).name}"
    table = Table(
        title=f"{shape.name}, {count:,} tokens a request, {where}, weights {size / 1e9:.1f} GB",
        caption="a / b: codes alone / all that is held: norms, means, exact tokens, unused room"
        + ("\nms a token: attention of one token in all layers, predicted, not measured" if timed else ""),
    )
    columns = ("cache", "bits", "B/token", "GB a request", "longest", "requests", "GPUs")
    for name in (*columns, "ms a token") if timed else columns:
        table.add_column(name, justify="left" if name == "cache" else "right")
    for row in rows:
        table.add_row(*_plan_cells(row), *([_milliseconds(row.attention_seconds)] if timed else []))
    console.print(table)


def _plan_cells(row: PlanRow) -> tuple[str, ...]:
    return (
        row.cache,
        f"{row.bits:.2f}",
        f"{row.bytes_per_token:,.0f}",
        f"{row.nominal_bytes / 1e9:.2f} / {row.held_bytes / 1e9:.2f}",
        f"{_count(row.nominal_longest)} / {_count(row.longest)}",
        f"{row.nominal_users} / {row.users}",
        "none" if row.gpus is None else str(row.gpus),
    )


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def _count(value: int | None) -> str:
    if value is None:
        return "any"
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= 10 * size or (value >= size and unit != "k"):
            return f"{value / size:.2f}{unit}"
    return str(value)


def _model_shape(model: str | None, layers: int | None, kv_heads: int, head_dim: int) -> ModelShape:
    if (model is None) == (layers is None):
        raise ConfigError(f"give a model or --layers, one of them; named shapes are {', '.join(SHAPES)}")
    if layers is not None:
        return ModelShape.uniform(f"{layers} layers of {kv_heads} heads of {head_dim}", layers, kv_heads, head_dim)
    assert model is not None
    if model in SHAPES:
        return SHAPES[model]
    try:
        config = read_config(model)
    except ConfigError as error:
        raise ConfigError(f"{error} Named shapes are {', '.join(SHAPES)}") from error
    return ModelShape.from_config(config, name=model, weight_bytes=weight_bytes(config, torch.bfloat16))


def run_verify(
    console: Console,
    head_dims: Sequence[int] | None,
    bits: Sequence[int] | None,
    vectors: int,
    seed: int,
    device: str,
    backend: str,
    *,
    as_json: bool,
) -> bool:
    """Check the codecs against theory and return whether all checks passed."""
    if backend not in ("auto", "reference", "triton"):
        raise ConfigError(f"backend must be auto, reference or triton, got {backend!r}")
    report = run_checks(
        head_dims or HEAD_DIMS,
        bits or BITS,
        vectors=vectors,
        seed=seed,
        device=check_device(device) or "cpu",
        backend=backend,
    )
    if as_json:
        checks = [{**asdict(check), "passed": check.passed} for check in report.checks]
        _print_json(console, {"passed": report.passed, "checks": checks})
    else:
        _print_plain(console, str(report))
    return report.passed


def run_doctor(console: Console, device: str | None, *, as_json: bool) -> bool:
    """Examine this machine and return whether nothing must be mended."""
    report = doctor([device] if device else None)
    if as_json:
        _print_json(console, report.to_dict())
        return report.passed
    for name, version in report.versions.items():
        _print_plain(console, f"{name:14} {version or 'not installed'}")
    _print_plain(console, f"{'interpreter':14} {'on (TRITON_INTERPRET=1)' if report.interpreter else 'off'}")
    for item in report.devices:
        memory = "" if item.memory_bytes is None else f", {item.memory_bytes / 2**30:.1f} GiB"
        _print_plain(console, f"{item.device}: {item.name} {item.capability}{memory}")
        _print_plain(console, f"  backend {item.backend}: {item.reason}")
        check = item.check
        if check.error:
            _print_plain(console, f"  self-check failed: {check.error}")
        else:
            verdict = "passed" if check.passed else "FAILED"
            _print_plain(
                console,
                f"  self-check {verdict} in {check.seconds:.1f} s: attention off by {check.attention_error:.1e}, keys "
                f"by {check.quantization_error:.3f} (relative)",
            )
    for problem in report.problems:
        _print_plain(console, f"problem: {problem}")
    return report.passed


def run_bench(
    console: Console,
    tokens: str,
    heads: tuple[int, int, int],
    steps: int,
    presets: Sequence[str] | None,
    device: str | None,
    dtype: str | None,
    *,
    as_json: bool,
) -> None:
    """Time one layer and print the table."""
    check_presets(presets or [])
    place = torch.device(check_device(device) or default_device())
    kind = check_dtype(dtype) or (torch.bfloat16 if place.type == "cuda" else torch.float32)
    geometry = Geometry(*heads, parse_count(tokens))
    rows = bench(geometry, presets or list(PRESETS), device=place, dtype=kind, steps=steps)
    if as_json:
        facts = {"device": str(place), "dtype": str(kind).removeprefix("torch."), "geometry": asdict(geometry)}
        _print_json(console, {**facts, "rows": [asdict(row) for row in rows]})
        return
    table = Table(title=f"one decode step of one layer, {geometry.tokens:,} tokens, {kind} on {place}, medians")
    for name in ("cache", "backend", "step, us", "attention, us", "speed-up", "MiB held"):
        table.add_column(name, justify="left" if name in ("cache", "backend") else "right")
    for row in rows:
        numbers = (f"{row.step_us:,.0f}", f"{row.attention_us:,.0f}", f"{row.speedup:.2f}x")
        table.add_row(row.cache, row.backend, *numbers, f"{row.bytes_held / MIB:.2f}")
    console.print(table)


def run_presets(console: Console, head_dim: int, *, as_json: bool) -> None:
    """List the presets."""
    rows = []
    for name, config in PRESETS.items():
        keys, values = bits_per_value(config, head_dim)
        rows.append(
            {
                "preset": name,
                "default": config == resolve_config(None),
                "key_bits_held": keys,
                "value_bits_held": values,
                "ratio": 32 / (keys + values),
                **config.to_dict(),
            }
        )
    if as_json:
        _print_json(console, {"head_dim": head_dim, "presets": rows})
        return
    table = Table(
        title=f"presets; bits held per coordinate at head_dim {head_dim}",
        caption="exact: first + last tokens kept as they are; * the default",
    )
    for heading in ("preset", "key", "value", "ratio", "keys", "values", "exact"):
        table.add_column(heading, no_wrap=True)
    for row in rows:
        extras = [
            "" if row["key_split"] == "none" else row["key_split"],
            "centred" if row["key_centering"] != "none" else "",
        ]
        exact = f"{row['sink_tokens']} + {row['residual_window']}"
        table.add_row(
            f"{row['preset']}{' *' if row['default'] else ''}",
            f"{row['key_bits_held']:.3f}",
            f"{row['value_bits_held']:.3f}",
            f"{row['ratio']:.2f}x",
            " ".join([row["key_codec"], *filter(None, extras)]),
            row["value_codec"],
            exact,
        )
    console.print(table)


def run_codebooks(console: Console, *, as_json: bool) -> bool:
    """Check the packaged codebooks and return whether all are well."""
    checks = verify_codebooks()
    failed = [check for check in checks if not check.passed]
    if as_json:
        _print_json(console, {"passed": not failed, "codebooks": [asdict(check) for check in checks]})
    else:
        for check in failed:
            _print_plain(console, f"FAIL  {check.error}")
        _print_plain(console, f"{len(checks)} codebooks, {len(failed)} failed")
    return not failed


def _print_json(console: Console, content: Any) -> None:
    _print_plain(console, json.dumps(content, indent=2, ensure_ascii=False))


def _print_plain(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
