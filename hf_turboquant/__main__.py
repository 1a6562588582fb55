"""``python -m hf_turboquant``: the command line."""

from hf_turboquant.cli import app

app(prog_name="hf-turboquant")
