# %% [markdown]
# # Quality against bits
#
# How far does the next-token distribution move when the past is read from a compressed cache? The prompt goes into the
# cache first, and only tokens *behind* it are scored: a single pass over a text attends to its own fresh keys and
# values, and shows no difference even at two bits.
#
# This is a small version of `python -m evals.quality`: one window of 512 + 96 tokens rather than three of 1024 + 512.
# In Colab, install as in `quickstart.ipynb`.

# %%
import sys
from pathlib import Path

import torch
from matplotlib import pyplot as plt

sys.path.insert(0, str(next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "evals" / "common.py").exists())))

from evals.baselines import held, make_cache
from evals.common import cache_argument, excerpt_ids, fill_cache, load_model, prefill

PROMPT, SCORED = 512, 96

model, tokenizer = load_model()
ids = torch.tensor([excerpt_ids(tokenizer, PROMPT + SCORED)], device=model.device)
prompt = prefill(model, ids[:, :PROMPT])

# %% [markdown]
# ## Measure
#
# Every cache gets the same prompt, then the same tokens, 32 at a time. `held` counts all bits of the compressed part:
# codes, norms, means. `paper-mse3` is the configuration of the paper, without exact first and last tokens; `kivi2` and
# `int3` are plain baselines with the exact tokens that the presets have.


# %%
@torch.inference_mode()
def decode(spec):
    """Return the log-probabilities of the scored positions ``(SCORED, vocabulary)``, and what the cache holds."""
    cache = make_cache(model, spec)
    fill_cache(cache, prompt)
    blocks = ids[:, PROMPT:].split(32, dim=1)
    logits = [model(block, **cache_argument(model, cache)).logits[0] for block in blocks]
    return torch.cat(logits).log_softmax(-1), held(cache)


reference, _ = decode("dynamic")
rows = []
for spec in ("k8v4", "k4v4", "k3v3", "k3v2", "k2v2", "paper-mse3", "kivi2", "int3"):
    found, holds = decode(spec)
    kl = (reference.exp() * (reference - found)).sum(-1).mean().item()
    agree = (reference.argmax(-1) == found.argmax(-1)).float().mean().item()
    rows.append((spec, holds.bits, kl, agree))
    print(f"{spec:11} {holds.bits:5.2f} bits   KL {kl:.4f} nats   same word {agree:4.0%}")

# %% [markdown]
# ## Draw
#
# Lower left is better.

# %%
figure, axes = plt.subplots(figsize=(6, 3.6), dpi=70, layout="constrained")
for spec, bits, kl, _ in rows:
    own = spec[0] == "k" and spec != "kivi2"
    axes.scatter(bits, kl, color="#0b6e4f" if own else "#d1495b")
    axes.annotate(spec, (bits, kl), (5, 3), textcoords="offset points", fontsize=8)
axes.set_yscale("log")
axes.set_xlabel("bits of the compressed part, everything counted")
axes.set_ylabel("KL, nats a token")
plt.show()

# %% [markdown]
# More bits are nearer to full precision, and two bits with keys split and centred are nearer than two bits as KIVI
# stores them:

# %%
kl = {spec: value for spec, _, value, _ in rows}
assert kl["k8v4"] < kl["k4v4"] < kl["k3v3"] < kl["k2v2"] < kl["kivi2"]
