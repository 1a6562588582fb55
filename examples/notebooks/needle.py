# %% [markdown]
# # A needle in a haystack
#
# A number is hidden in a novel and asked for behind it. The text is in the cache before the question is read, as it is
# when a user asks. The answer is teacher-forced: a hit means that every digit is the most likely token; the likelihood
# moves long before a digit is lost.
#
# This is a small version of `python -m evals.niah`. In Colab, install as in `quickstart.ipynb`.

# %%
import sys
import tempfile
from pathlib import Path

from IPython.display import Image

sys.path.insert(0, str(next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "evals" / "common.py").exists())))

from evals import niah_report
from evals.common import load_model
from evals.needles import Cell, haystack_ids, make_sample
from evals.niah import Asker

model, tokenizer = load_model()
haystack = haystack_ids(tokenizer, "austen")

# %% [markdown]
# ## One sample

# %%
sample = make_sample(tokenizer, haystack, Cell(length=600, depth=50, seed=0))
text = tokenizer.decode(sample.context)
place = text.index(sample.key)
print(f"...{text[place - 110 : place + 60]}...")
print(tokenizer.decode(sample.question).strip())

# %% [markdown]
# ## A grid
#
# Two lengths, three depths, three caches on the same prompts: full precision, the default preset, and, as the control
# that must be seen to suffer, plain integers of two bits.

# %%
SPECS = ("dynamic", "k4v4", "int2")

asker = Asker(model, tokenizer, "number", "split")
records = []
for length in (512, 1024):
    for depth in (0.0, 50.0, 100.0):
        sample = make_sample(tokenizer, haystack, Cell(length, depth, seed=0))
        for spec, answer, _ in asker.answers(sample, SPECS):
            cell = {"cache": spec, "length": length, "depth": depth}
            records.append({**cell, "hit": answer.hit, "nll": answer.nll})
for spec in SPECS:
    mine = [r for r in records if r["cache"] == spec]
    found, nll = sum(r["hit"] for r in mine), sum(r["nll"] for r in mine) / len(mine)
    print(f"{spec:8} {found} of {len(mine)} found, NLL {nll:.3f}")

# %% [markdown]
# ## Heat maps
#
# Red is lost, green is found. At depth 100 the needle lies in the exact window of the caches.

# %%
with tempfile.TemporaryDirectory() as folder:
    niah_report.plot(records, SPECS, Path(folder) / "niah.png", "a seven-digit number in a novel")
    picture = Image(Path(folder) / "niah.png", width=640)
picture

# %%
nll = {spec: sum(r["nll"] for r in records if r["cache"] == spec) for spec in SPECS}
assert nll["k4v4"] < 1.2 * nll["dynamic"] < nll["int2"]
