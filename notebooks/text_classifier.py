# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Fine-tune a Hugging Face text classifier
#
# {{badges}}
#
# **What it trains.** On a TPU or GPU: BERT-base, or any other sequence classifier of `transformers`, on your labelled texts. On a
# CPU: a small one, built on the spot, that tells from a sentence of its documentation which Python package it belongs to.
#
# **How long.** A minute or two on a CPU. Nobody has timed it on a TPU yet.
#
# **What you need.** A csv, tsv or jsonl file with the columns `text` and `label`; without one, sentences that ship with Python.
# A model: by name with *Settings > Internet* switched on, or the folder of an attached one.
#
# **What you get.** The accuracy over all held-out texts, each counted once on any number of devices; the confusion matrix;
# the mistakes; a folder that `transformers` loads.
#
# On Kaggle choose *Settings > Accelerator > TPU v5e-8*, then run all cells.

# %% [markdown]
# ## Settings
#
# The only cell you may want to touch. `SETTINGS` takes every field of `ClassifierConfig` (see the training script below).

# %%
SETTINGS = dict(
    data="docstrings",          # a csv, tsv or jsonl file with text and label; docstrings: sentences on this machine
    preset="auto",              # bert-base on TPU and GPU, small (built here, no network) on a CPU
    platform="auto",            # auto, tpu, gpu, cpu; virtual-tpu rehearses eight TPU devices on a CPU
    run_folder="runs/classifier",   # an existing run is never overwritten: the next one goes to runs/classifier-2
    # model="/kaggle/input/...",    # the folder of a model, or a name on the Hub
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
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "py"))

import runtime

platform = runtime.patch_environment(SETTINGS["platform"])
runtime.install_missing("safetensors")      # not on every image; nothing else is installed

# %% [markdown]
# ## Modules
#
# Folded cells, one concept each: open them to read, edit them to change.

# %%
# %%writefile text_data.py

# %%
# %%writefile classification.py

# %%
# %%writefile optimizer.py

# %%
# %%writefile settings.py

# %%
# %%writefile checkpoint.py

# %%
# %%writefile telemetry.py

# %%
# %%writefile compile_guard.py

# %%
# %%writefile doctor.py

# %% [markdown]
# Eight virtual TPU devices, used only with the platform `virtual-tpu`, a rehearsal on a CPU:

# %%
# %%writefile virtual_tpu.py

# %% [markdown]
# ## The training script
#
# What a TPU asks for, and where it stands below:
#
# - **One length.** Every text is filled up or cut to `T` tokens (`Texts`): another length would be another compilation.
# - **One batch.** The evaluation takes batches of the size of training; the last one is filled up, and the filling is not counted.
# - **No branch on data.** `transformers` leaves the mask out of a batch without filling, so one rank would run another program than
#   the others. `attention_with_whole_mask` never does.
# - **Tied weights stay tied.** `runtime.place` moves the model and puts together again what the move takes apart.
# - **bf16 over fp32 weights.** `runtime.autocast`, not Accelerate's `mixed_precision`, which would store the weights as bf16.

# %%
# %%writefile train_classifier.py

# %% [markdown]
# ## The model
#
# Built once, here, and shared by the processes of the launch: eight copies of a model fill a host's memory, one does not.
# Measured on a CPU with BERT-base in four processes: 2.8 GB when each builds it, 1.0 GB shared (`bench/shared_model_memory.py`).

# %%
train_classifier = runtime.load_fresh("train_classifier")       # the file as it is now, not as the kernel remembers it
config = train_classifier.make_config(**SETTINGS)
model = train_classifier.build_model(config)

# %% [markdown]
# ## Launch
#
# On a TPU the first step compiles, a minute or two.

# %%
run_folder = train_classifier.launch(config, platform, model)

# %% [markdown]
# ## Results

# %%
if "get_ipython" in globals():
    from IPython.display import Image, display
    for picture in ("curve.png", "confusion.png"):
        display(Image(run_folder / picture))
print(f"everything lies in {run_folder}; the model: transformers.pipeline('text-classification', '{run_folder}/model')")
