# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # A minimal MLP on every device
#
# {{badges}}
#
# **What it trains.** A network of two hidden layers that learns the function sin(3a) cos(3b) from samples: the smallest
# complete training that runs unchanged on a free Kaggle TPU v5e-8 (8 chips), a Colab TPU, one or two GPUs and a plain CPU.
#
# **How long.** Seconds on a CPU; on a TPU add the first step's compilation.
#
# **What you need.** Nothing. On Kaggle choose *Settings > Accelerator > TPU v5e-8*, then run all cells.
#
# **What you get.** The certainty that this session works, and the skeleton of your own model.

# %% [markdown]
# ## Settings

# %%
STEPS = 200             # optimizer steps
BATCH = 512             # samples per optimizer step, over all devices
PLATFORM = "auto"       # auto, tpu, gpu, cpu; virtual-tpu rehearses eight TPU devices on a CPU
PROCESSES = 0           # 0: all devices. On a CPU, 2 shows two processes training as one

# %% [markdown]
# ## Environment
#
# The next cell writes the module that knows the machines, the one after it looks at this machine and sets the variables it
# needs. That must happen **before torch is imported**; on Kaggle the image presets an address that would stop the launch.

# %%
# %%writefile runtime.py

# %%
import sys
from pathlib import Path

if "__file__" in globals():     # run as a script from the repository; in a notebook the modules lie beside it
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "py"))

import runtime

platform = runtime.patch_environment(PLATFORM)

# %% [markdown]
# What errors mean, in plain words; a failed launch asks it:

# %%
# %%writefile doctor.py

# %% [markdown]
# Eight virtual TPU devices, used only with the platform `virtual-tpu`, a rehearsal on a CPU:

# %%
# %%writefile virtual_tpu.py

# %% [markdown]
# ## The training script
#
# Every device runs `train_worker`. The five numbered lines are all that differs from a script for a single GPU.
# Change anything, run the cell, run the launch cell: the new code is what trains, no restart needed.

# %%
# %%writefile train_mlp.py

# %% [markdown]
# ## Launch

# %%
train_mlp = runtime.load_fresh("train_mlp")     # the file as it is now, not as the kernel remembers it
train_mlp.launch(train_mlp.MLPConfig(steps=STEPS, batch=BATCH), platform, PROCESSES)

# %% [markdown]
# The losses above are the same for any number of devices, because the batch is stated over all of them and every rank
# takes its share. Next: [GPT pretraining](gpt_pretrain.ipynb).
