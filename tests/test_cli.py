"""The command line: quick to answer, one line for an error, an exit code for every end, JSON for every report."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from evals.common import ROOT
from hf_turboquant import PRESETS
from hf_turboquant import doctor as doctor_module
from hf_turboquant.cli import app
from hf_turboquant.doctor import MINIMUM_TRANSFORMERS, SelfCheck, doctor
from tests.helpers import byte_tokenizer

BAD_INPUT = 2


def invoke(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(app, list(arguments), input=stdin)


def report(*arguments: str):
    """Run a command with --json and return what it printed."""
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


# the whole


def test_help_is_quick_and_loads_nothing_heavy():
    code = (
        "import sys\nfrom hf_turboquant.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'scipy', 'triton'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        assert "generate" in done.stdout
        # seconds of CPU: the clock on the wall depends on who else is at work
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    # whoever else is at work still empties the caches of the processor, which only adds: the least counts. It is near
    # 0.4 s on a slow machine
    assert min(seconds) < 0.5


@pytest.mark.parametrize("command", ["generate", "plan", "verify", "doctor", "bench", "presets", "codebooks verify"])
def test_every_command_has_an_example(command):
    result = invoke(*command.split(), "--help")
    assert result.exit_code == 0
    assert f"hf-turboquant {command}" in result.stdout


@pytest.mark.parametrize(("arguments", "message"), [
    (["nonsense"], "No such command 'nonsense'"),
    (["plan", "--nonsense"], "No such option: --nonsense"),
    (["--nonsense"], "No such option: --nonsense"),
    (["plan"], "give a model or --layers"),
    (["plan", "/no/such/model"], "neither a directory with a config.json nor"),
    (["plan", "llama-8b", "--preset", "k9v9"], "unknown preset 'k9v9'; presets are k8v4"),
    (["plan", "llama-8b", "--device", "abacus"], "unknown device 'abacus'; known are thor"),
    (["plan", "llama-8b", "--memory", "lots"], "'lots' must be a size"),
    (["bench", "--preset", "k9v9"], "unknown preset 'k9v9'"),
    (["bench", "--dtype", "int3"], "dtype must be one of float32"),
    (["bench", "--q-heads", "3", "--kv-heads", "2"], "num_q_heads must be a multiple of num_kv_heads"),
    (["bench", "--device", "tpu"], "device must be cpu, cuda or cuda:N, got 'tpu'"),
    (["bench", "--device", "cuda:99"], "device cuda:99 is not here"),
    (["verify", "--bits", "9"], "bits must be among"),
    (["verify", "--backend", "magic"], "backend must be auto, reference or triton"),
    (["doctor", "--device", "cuda:99"], "is not here"),
    (["presets", "--head-dim", "3"], "head_dim must be even"),
    (["generate", "-m", "/no/such/model"], "prompt must be given"),
    (["generate", "-m", "/no/such/model", "hello"], "neither a directory with a config.json nor"),
    (["generate", "-m", "x", "--cache", "k9v9", "hello"], "unknown preset 'k9v9'.*without compression: dense"),
    (["generate", "-m", "x", "--chat", "--raw"], "--chat needs the chat template that --raw leaves out"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_bad_input_is_one_line_and_code_two(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == BAD_INPUT
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert re.search(message, line), line
    assert result.stdout == ""


def test_debug_shows_the_traceback():
    result = invoke("--debug", "plan", "llama-8b", "--memory", "lots")
    assert type(result.exception).__name__ == "ConfigError"


# plan, presets, codebooks


def test_plan_reports_what_the_planner_says():
    found = report("plan", "llama-70b", "--gpus", "32", "--tokens", "1M", "--fixed", "2GB", "--activations", "0.5GB",
                   "--preset", "k4v4")  # fmt: skip
    dense, ours = found["rows"]
    assert (dense["cache"], dense["held_bytes"], dense["users"]) == ("dense", 327_680_000_000, 6)
    assert (ours["cache"], ours["nominal_bytes"]) == ("k4v4", 327_680_000_000 / 4)


def test_plan_prints_a_table():
    result = invoke("plan", "--layers", "32", "--memory", "24GB", "--weights", "16GB", "--tokens", "8k")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ("dense", *PRESETS))


def test_plan_reads_a_model_directory(tiny_model):
    found = report("plan", tiny_model, "--tokens", "1000")
    assert found["rows"][0]["held_bytes"] == 1000 * 2 * 2 * 2 * 32
    assert found["budget"]["weight_bytes"] > 0


def test_presets_are_listed_with_the_bits_they_hold():
    rows = {row["preset"]: row for row in report("presets")["presets"]}
    assert set(rows) == set(PRESETS)
    assert [name for name, row in rows.items() if row["default"]] == ["k4v4"]
    assert rows["k4v4"]["value_bits_held"] == 4.125
    assert invoke("presets").exit_code == 0


def test_codebooks_are_verified():
    found = report("codebooks", "verify")
    assert found["passed"]
    assert {(book["head_dim"], book["bits"]) for book in found["codebooks"]} >= {(128, 4), (64, 2)}


# verify, doctor, bench


def test_verify_passes():
    found = report("verify", "--head-dim", "64", "--bits", "2", "--vectors", "1024")
    assert found["passed"]
    assert len(found["checks"]) > 5


def test_verify_fails_with_code_one(monkeypatch):
    monkeypatch.setattr("hf_turboquant.verify.SIGMAS", -1.0)
    result = invoke("verify", "--head-dim", "64", "--bits", "1", "--vectors", "1024")
    assert result.exit_code == 1
    assert "FAIL" in result.stdout


def test_doctor_checks_the_cpu():
    found = report("doctor", "--device", "cpu")
    (cpu,) = found["devices"]
    assert (cpu["backend"], cpu["check"]["passed"]) == ("reference", True)
    assert found["versions"]["torch"] == torch.__version__
    assert "self-check passed" in invoke("doctor", "--device", "cpu").stdout


def test_doctor_says_what_is_wrong(monkeypatch):
    monkeypatch.setattr(doctor_module, "self_check", lambda device: SelfCheck(False, 0.5, 0.07, 1.0))
    monkeypatch.setattr(doctor_module, "_version", lambda package: "4.57.1" if package == "transformers" else None)
    result = invoke("doctor", "--device", "cpu")
    assert result.exit_code == 1
    assert "problem: transformers is 4.57.1 and must be at least 5.4" in result.stdout
    assert "problem: cpu: the self-check is off: attention by 0.5" in result.stdout


def test_self_check_notices_another_table(monkeypatch):
    original = doctor_module.KVHandle.materialize
    monkeypatch.setattr(doctor_module.KVHandle, "materialize", lambda handle: 1.02 * original(handle))
    assert not doctor(["cpu"]).passed


def test_minimum_of_transformers_is_that_of_the_package():
    wanted = ".".join(map(str, MINIMUM_TRANSFORMERS))
    assert f'"transformers>={wanted}"' in (ROOT / "pyproject.toml").read_text()


def test_bench_times_dense_and_presets():
    found = report("bench", "--tokens", "300", "--q-heads", "2", "--kv-heads", "1", "--head-dim", "32", "--steps", "2",
                   "--preset", "k4v4", "--device", "cpu")  # fmt: skip
    assert [row["cache"] for row in found["rows"]] == ["dense", "k4v4"]
    assert all(row["step_us"] > 0 for row in found["rows"])
    assert found["rows"][1]["bytes_held"] < found["rows"][0]["bytes_held"]


# generate


def test_generate_streams_and_reports(tiny_model):
    arguments = ("generate", "-m", tiny_model, "once upon a time", "--max-new-tokens", "8", "--device", "cpu")
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    assert "[16 prompt tokens, 0 of them from the cache; 8 new" in result.stdout
    assert json.loads(invoke(*arguments, "--json").stdout)["new_tokens"] == 8


def test_generate_reads_stdin_and_compresses(tiny_model):
    arguments = ("generate", "-m", tiny_model, "-", "--max-new-tokens", "4", "--device", "cpu", "--json")
    dense, ours = (
        json.loads(invoke(*arguments, "--cache", name, stdin="word " * 200).stdout) for name in ("dense", "k2v2")
    )
    assert dense["prompt_tokens"] == ours["prompt_tokens"] == 1000
    assert dense["cache_bytes"] == dense["dense_bytes"] > ours["cache_bytes"]


def test_chat_keeps_its_cache(tiny_model, tmp_path):
    model = with_chat_template(tiny_model, tmp_path)
    result = invoke("generate", "-m", model, "--chat", "--max-new-tokens", "4", "--device", "cpu", "--json",
                    stdin="good morning\nand again\n\n")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    first, second = map(json.loads, result.stdout.splitlines())
    assert first["reused_tokens"] == 0
    assert second["reused_tokens"] >= first["prompt_tokens"] - 1
    assert second["prompt_tokens"] > first["prompt_tokens"]


def test_chat_without_template_is_refused(tiny_model):
    result = invoke("generate", "-m", tiny_model, "--chat", "--device", "cpu", stdin="hello\n")
    assert result.exit_code == BAD_INPUT
    assert "has no chat template" in result.stderr


def test_too_large_a_model_is_refused_unless_forced(tiny_model, monkeypatch):
    monkeypatch.setattr("hf_turboquant.loading.available_bytes", lambda device: 1000)
    arguments = ("generate", "-m", tiny_model, "hello", "--max-new-tokens", "2", "--device", "cpu")
    result = invoke(*arguments)
    assert result.exit_code == BAD_INPUT
    assert "must fit in the memory free on cpu" in result.stderr
    assert invoke(*arguments, "--force").exit_code == 0


def with_chat_template(model: str, target) -> str:
    """Return a directory with the same model and a tokenizer that has a chat template."""
    for file in os.listdir(model):
        os.symlink(os.path.join(model, file), target / file)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).unlink(missing_ok=True)
    tokenizer.save_pretrained(target)
    return str(target)


# evaluations


def test_eval_passes_its_arguments_on():
    result = invoke("eval", "longbench", "--data", "mini", "--tasks", "nonsense")
    assert result.exit_code == BAD_INPUT
    assert "unknown task 'nonsense'" in result.stderr


def test_eval_outside_a_checkout_says_where_the_scripts_are(monkeypatch):
    monkeypatch.setattr("hf_turboquant.cli_evals.find_checkout", lambda: None)
    result = invoke("eval", "niah")
    assert result.exit_code == BAD_INPUT
    assert "evals/niah.py is part of the source repository" in result.stderr
