# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Pretrain a GPT from raw text
#
# {{badges}}
#
# **What it trains.** On a TPU or GPU: GPT-2 124M (12 layers, T=1024, 524,288 tokens a step). On a CPU: a small GPT over bytes,
# in a few minutes. The same code, the same notebook.
#
# **How long.** GPT-2 124M on 10 billion tokens: about 3.1 hours on a Kaggle TPU by the TPU compiler's estimate, not timed
# yet, one session. The small GPT: about four minutes on two CPU cores.
#
# **What you need.** Nothing. Without a dataset it reads Python's own standard library. With one, attach token shards
# (or give text files or folders) and name them below.
#
# **What you get.** A run folder with checkpoints, the loss curve, samples, a log and a report; `gpt_resume` continues it bit for
# bit in the next session.
#
# On Kaggle choose *Settings > Accelerator > TPU v5e-8*, then *Save Version > Save & Run All* and close the browser.

# %% [markdown]
# ## Settings
#
# The only cell you may want to touch. `SETTINGS` takes every field of `TrainConfig` (see the training script below).

# %%
DATA = "auto"               # a folder of token shards (also nanoGPT's, llm.c's, build-nanogpt's), or a file or folder of text,
                            # .jsonl, .csv, .parquet, or the name of a Kaggle input, or "stdlib";
                            # auto: shards among the Kaggle inputs, else the standard library
COLUMN = "text"             # of a table that holds the text
ENCODING = "auto"           # for text: gpt2, bytes, or auto (bytes on a CPU or where GPT-2's vocabulary is not at hand)
SETTINGS = dict(
    preset="auto",          # gpt2-124m on TPU and GPU, demo on a CPU; gpt2-124m-tpu has 6 heads of 128
    platform="auto",        # auto, tpu, gpu, cpu; virtual-tpu rehearses eight TPU devices on a CPU
    run_folder="runs/gpt",  # an existing run is never overwritten: the next one goes to runs/gpt-2
    # max_steps=2000,       # shorter; 19073 steps are 10 billion tokens
)

# %% [markdown]
# ## Environment
#
# `runtime.py` knows the machines. It must look at this one **before torch is imported**, and says what it changed.

# %%
# %%writefile runtime.py

# %%
import sys
from pathlib import Path

if "__file__" in globals():     # run as a script from the repository; in a notebook the modules lie beside it
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("py", "data_prep")]

import runtime

platform = runtime.patch_environment(SETTINGS["platform"])
runtime.install_missing("tiktoken", "regex", "safetensors")     # not on the TPU images; nothing else is installed

# %% [markdown]
# ## Modules
#
# Folded cells, one concept each: open them to read, edit them to change.

# %%
# %%writefile gpt.py

# %%
# %%writefile tpu_attention.py

# %%
# %%writefile foreign_shards.py

# %%
# %%writefile token_data.py

# %%
# %%writefile checkpoint.py

# %%
# %%writefile export_gpt2.py

# %%
# %%writefile telemetry.py

# %%
# %%writefile settings.py

# %%
# %%writefile optimizer.py

# %%
# %%writefile micro_steps.py

# %%
# %%writefile report.py

# %%
# %%writefile compile_guard.py

# %%
# %%writefile doctor.py

# %% [markdown]
# Eight virtual TPU devices, used only with the platform `virtual-tpu`, a rehearsal on a CPU:

# %%
# %%writefile virtual_tpu.py

# %% [markdown]
# Text to token shards, needed only where there are none yet:

# %%
# %%writefile vocabulary_files.py

# %%
# %%writefile text_encodings.py

# %%
# %%writefile text_records.py

# %%
# %%writefile text_documents.py

# %%
# %%writefile text_sources.py

# %%
# %%writefile byte_models.py

# %%
# %%writefile shard_writer.py

# %%
# %%writefile preparation.py

# %%
# %%writefile prepare.py

# %% [markdown]
# ## What to expect of a TPU
#
# What the TPU's own compiler says about the presets on a v5e-8, asked beforehand and without a TPU: estimates, not measurements.

# %%
# %%writefile estimates.py

# %%
print(runtime.load_fresh("estimates").text())

# %% [markdown]
# ## The training script
#
# `TrainConfig` has every setting with a comment; `train_worker` is the loop that each device runs.

# %%
# %%writefile train_gpt.py

# %% [markdown]
# ## Data

# %%
prepare = runtime.load_fresh("prepare")
shards = prepare.find_or_prepare(DATA, ENCODING, small_model=platform.name not in ("tpu", "gpu"), column=COLUMN)

# %% [markdown]
# ## Launch
#
# On a TPU the first step compiles, one to three minutes; then one line follows the training, every ten steps anew.

# %%
train_gpt = runtime.load_fresh("train_gpt")     # the file as it is now, not as the kernel remembers it
config = train_gpt.make_config(data_folder=shards, **SETTINGS)
run_folder = train_gpt.launch(config, platform)

# %% [markdown]
# ## The loss curve

# %%
if "get_ipython" in globals():
    from IPython.display import Image, display
    display(Image(run_folder / "curve.png"))
print(f"everything lies in {run_folder}")

# %% [markdown]
# ## Next session
#
# Open [gpt_resume](gpt_resume.ipynb), attach this notebook's output as an input, run all cells: the run goes on as if it
# had never stopped.
