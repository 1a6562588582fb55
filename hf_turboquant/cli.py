"""The command line, ``hf-turboquant``. Nothing heavy is imported before a command needs it.

Exit codes: 0 all is well, 1 a check failed, 2 what was asked for cannot be done.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

CHECK_FAILED = 1
BAD_INPUT = 2
# what typer raises for a command line it cannot read; the class has no public name of its own
_USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[1]


class _Group(TyperGroup):
    """Turns errors into one line on stderr and an exit code."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the options before the command."""
        try:
            return super().make_context(*args, **kwargs)
        except _USAGE_ERROR as error:
            self._report_usage(error)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except _USAGE_ERROR as error:
            self._report_usage(error)
        except (ValueError, OSError, ImportError) as error:
            self._report(ctx, error, BAD_INPUT)
        except RuntimeError as error:
            # ours mean that a request cannot be served here; torch's that it could and went wrong
            ours = any(base.__name__ == "TurboQuantError" for base in type(error).__mro__)
            self._report(ctx, error, BAD_INPUT if ours else CHECK_FAILED)

    def _report_usage(self, error: Any) -> None:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise error
        command = error.ctx.command_path if error.ctx else "hf-turboquant"
        _fail(f"{error.format_message()} (see {command} --help)", BAD_INPUT)

    def _report(self, ctx: Any, error: Exception, code: int) -> None:
        if ctx.params.get("debug"):
            raise error
        _fail(str(error) or type(error).__name__, code)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
codebooks = typer.Typer(no_args_is_help=True, help="The tables of the scalar quantizers.")
app.add_typer(codebooks, name="codebooks")
evals = typer.Typer(no_args_is_help=True, help="Run the evaluations of a checkout.")
app.add_typer(evals, name="eval")

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; the GPU if there is one.")]
PresetOption = Annotated[
    list[str] | None, typer.Option("--preset", help="Preset; may be repeated. All of them without it.")
]


@app.callback()
def main(
    ctx: typer.Context, debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False
) -> None:
    """Compressed key/value caches for Hugging Face Transformers."""


@app.command()
def generate(
    model: Annotated[str, typer.Option("--model", "-m", help="Hub id, directory, or a .gguf file.")],
    prompt: Annotated[str | None, typer.Argument(help="What to say; - reads stdin.")] = None,
    cache: Annotated[str | None, typer.Option(help="Preset, or dense.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file in the model directory.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Go on talking; an empty line ends it.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    device: DeviceOption = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Load even what should not fit.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Generate text, or chat, with a compressed cache.

    * `hf-turboquant generate -m Qwen/Qwen2.5-7B-Instruct "Why is the sky blue?"`
    * `hf-turboquant generate -m ./model --cache k3v2 --chat`
    * `cat book.txt | hf-turboquant generate -m ./model --raw -`
    """
    from hf_turboquant.cli_generate import run_generate

    run_generate(
        _console(),
        model=model,
        prompt=prompt,
        cache=cache,
        gguf_file=gguf_file,
        chat=chat,
        raw=raw,
        system=system,
        max_new_tokens=max_new_tokens,
        sampling={"temperature": temperature, "top_p": top_p} if temperature else {},
        seed=seed,
        device=device,
        dtype=dtype,
        force=force,
        as_json=as_json,
    )


@app.command()
def plan(
    model: Annotated[str | None, typer.Argument(help="Named shape, hub id or directory.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers, instead of a model.")] = None,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads of a layer.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Channels of a head.")] = 128,
    device: Annotated[str, typer.Option(help="Named machine.")] = "h100-80gb",
    memory: Annotated[str | None, typer.Option(help="Memory of one GPU instead, such as 24GB.")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that share weights and caches.")] = 1,
    tokens: Annotated[str, typer.Option(help="Context of a request: 32768, 128k, 1M.")] = "128k",
    weights: Annotated[str | None, typer.Option(help="Weights in all, such as 140GB.")] = None,
    fixed: Annotated[str, typer.Option(help="Anything else that is fixed, per GPU.")] = "0",
    activations: Annotated[str, typer.Option(help="Activations of a request, per GPU.")] = "0",
    preset: PresetOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Say how many tokens, users and GPUs: nominal bits beside what the store really holds.

    * `hf-turboquant plan llama-70b --gpus 32 --tokens 1M --fixed 2GB --activations 0.5GB`
    * `hf-turboquant plan ./model --device thor --tokens 128k`
    * `hf-turboquant plan --layers 32 --kv-heads 8 --head-dim 128 --memory 24GB --weights 16GB`
    """
    from hf_turboquant.cli_run import run_plan

    run_plan(
        _console(),
        model=model,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        device=device,
        memory=memory,
        gpus=gpus,
        tokens=tokens,
        weights=weights,
        fixed=fixed,
        activations=activations,
        presets=preset,
        as_json=as_json,
    )


@app.command()
def verify(
    head_dim: Annotated[list[int] | None, typer.Option(help="Channels; may be repeated.")] = None,
    bits: Annotated[list[int] | None, typer.Option(help="Bits; may be repeated.")] = None,
    vectors: Annotated[int, typer.Option(help="Vectors per setting.")] = 8192,
    seed: int = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    backend: Annotated[str, typer.Option(help="auto, reference or triton.")] = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Hold the codecs against the theorems of their papers, by experiment.

    * `hf-turboquant verify --head-dim 128 --bits 4`
    * `hf-turboquant verify --device cuda --backend triton`
    """
    from hf_turboquant.cli_run import run_verify

    passed = run_verify(_console(), head_dim, bits, vectors, seed, device, backend, as_json=as_json)
    raise typer.Exit(0 if passed else CHECK_FAILED)


@app.command()
def doctor(device: DeviceOption = None, as_json: JsonFlag = False) -> None:
    """Say which backend would run on each device and why, and try it.

    * `hf-turboquant doctor`
    * `hf-turboquant doctor --device cuda:0 --json`
    """
    from hf_turboquant.cli_run import run_doctor

    raise typer.Exit(0 if run_doctor(_console(), device, as_json=as_json) else CHECK_FAILED)


@app.command()
def bench(
    tokens: Annotated[str, typer.Option(help="Tokens in the cache: 32768, 128k.")] = "4096",
    q_heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Channels of a head.")] = 128,
    steps: Annotated[int, typer.Option(help="Steps timed.")] = 20,
    preset: PresetOption = None,
    device: DeviceOption = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Time the decode step of one layer here: dense sdpa against presets.

    * `hf-turboquant bench --tokens 128k --preset k4v4 --preset k3v2`
    """
    from hf_turboquant.cli_run import run_bench

    run_bench(_console(), tokens, (q_heads, kv_heads, head_dim), steps, preset, device, dtype, as_json=as_json)


@app.command()
def presets(
    head_dim: Annotated[int, typer.Option(help="Channels for which to count the bits.")] = 128,
    as_json: JsonFlag = False,
) -> None:
    """List the presets with what they store.

    * `hf-turboquant presets --head-dim 64`
    """
    from hf_turboquant.cli_run import run_presets

    run_presets(_console(), head_dim, as_json=as_json)


@codebooks.command("verify")
def verify_codebooks(as_json: JsonFlag = False) -> None:
    """Check that every packaged codebook is optimal for its density, by quadrature.

    * `hf-turboquant codebooks verify`
    """
    from hf_turboquant.cli_run import run_codebooks

    raise typer.Exit(0 if run_codebooks(_console(), as_json=as_json) else CHECK_FAILED)


_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@evals.command("niah", context_settings=_PASS_ON)
def eval_niah(ctx: typer.Context) -> None:
    """Find needles: `hf-turboquant eval niah --help` lists its options."""
    _evaluate("niah", ctx.args)


@evals.command("longbench", context_settings=_PASS_ON)
def eval_longbench(ctx: typer.Context) -> None:
    """Run LongBench: `hf-turboquant eval longbench --data mini --cache k4v4`."""
    _evaluate("longbench", ctx.args)


@evals.command("quality", context_settings=_PASS_ON)
def eval_quality(ctx: typer.Context) -> None:
    """Measure KL to full precision: `hf-turboquant eval quality --cache k4v4`."""
    _evaluate("quality", ctx.args)


def _evaluate(name: str, arguments: list[str]) -> None:
    from hf_turboquant.cli_evals import run_script

    run_script(name, arguments)


def _console() -> Console:
    return Console()


def _fail(message: str, code: int) -> None:
    line = " ".join(message.split())
    Console(stderr=True).print(f"error: {line}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)
