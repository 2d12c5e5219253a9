# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Resume a GPT run, exactly
#
# {{badges}}
#
# **What it trains.** It continues a run of [gpt_pretrain](gpt_pretrain.ipynb) from its newest good checkpoint: the same
# weights, optimizer state, learning rate and order of data as if it had never stopped, bit for bit on the same kind of device.
#
# **How long.** Until the run's last step, or until the session's time is over; then run it again.
#
# **What you need.** On Kaggle: *Add Input > Notebook Output > your pretraining notebook*, the token shards too if you used a
# dataset, *TPU v5e-8*, run all cells. In a session that still has the run folder, just run all cells.
#
# **What you get.** The same run folder, further on: checkpoints, the curve from the first step, samples, a log and a report.

# %% [markdown]
# ## Settings

# %%
SOURCE = None               # None: the unfinished run that got furthest, in runs/ or in a Kaggle input; or a folder
DATA = None                 # None: the shards the run was trained on, where they were; or their folder today
CHANGES = dict(
    # platform="virtual-tpu",   # rehearse on eight virtual TPU devices
    # save_every=100,       # what leaves the course of the training alone may change; anything else is refused
)

# %% [markdown]
# ## Environment

# %%
# %%writefile runtime.py

# %%
import sys
from pathlib import Path

if "__file__" in globals():     # run as a script from the repository; in a notebook the modules lie beside it
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("py", "data_prep")]

import runtime

platform = runtime.patch_environment(CHANGES.get("platform", "auto"))
runtime.install_missing("tiktoken", "regex", "safetensors")     # not on the TPU images; nothing else is installed

# %% [markdown]
# ## Modules

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

# %%
# %%writefile vocabulary_files.py

# %%
# %%writefile text_encodings.py

# %%
# %%writefile train_gpt.py

# %% [markdown]
# Eight virtual TPU devices, used only with the platform `virtual-tpu`, a rehearsal on a CPU:

# %%
# %%writefile virtual_tpu.py

# %% [markdown]
# ## The resume script
#
# Finds the runs, verifies sizes and hashes of their checkpoints, takes the newest good one, and continues with the settings
# stored in it.

# %%
# %%writefile resume_gpt.py

# %% [markdown]
# ## Launch

# %%
resume_gpt = runtime.load_fresh("resume_gpt")   # the file as it is now, not as the kernel remembers it
if DATA is not None:
    CHANGES["data_folder"] = DATA
run_folder = resume_gpt.resume(SOURCE, platform, **CHANGES)

# %% [markdown]
# ## The loss curve, from the first step on

# %%
if "get_ipython" in globals():
    from IPython.display import Image, display
    display(Image(run_folder / "curve.png"))
print(f"everything lies in {run_folder}")
