# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Fine-tune a Llama with LoRA, its weights divided over all chips
#
# {{badges}}
#
# **What it does.** One process drives all eight chips of a **Kaggle TPU v5e-8** (torch_xla's SPMD, the way of FSDPv2): the frozen
# weights of a Llama-class model lie divided over them, each chip works on its own examples, and small adapters are trained
# by `peft`. The same notebook runs on a Colab TPU, on GPUs and on a plain CPU.
#
# **What you need.** A model in `transformers`' format, such as Llama 3.2 1B among Kaggle's models (*Add Input > Models*), and
# examples: a `.jsonl` file, one `{"prompt": "...", "response": "..."}` a line. With neither, it builds a small Llama in seconds
# and teaches it what the functions of Python's standard library do: everything works, the answers are not good.
#
# **What you get.** A run folder with the adapter (for `peft`), the merged model (for `transformers`), checkpoints of a few MB, the
# loss curve and a log.
#
# On Kaggle choose *Settings > Accelerator > TPU v5e-8*, switch *Internet* on once (for `peft`), then run all cells.

# %% [markdown]
# ## Settings
#
# The only cell you may want to touch. `SETTINGS` takes every field of `LoraRun` (see the training script below).

# %%
SETTINGS = dict(
    model="",               # a folder, such as /kaggle/input/llama-3.2/transformers/1b-instruct/1; "": a small Llama, built here
    examples="stdlib",      # your .jsonl file; stdlib: what Python's functions do
    preset="auto",          # llama with a model given, demo without
    platform="auto",        # auto, tpu, gpu, cpu; virtual-tpu rehearses eight TPU devices on a CPU
    run_folder="runs/lora", # an existing run is never overwritten: the next one goes to runs/lora-2
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
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "py")]

import runtime

platform = runtime.patch_environment(SETTINGS["platform"])
runtime.install_missing("peft", "safetensors")      # not on the TPU images; nothing else is installed

# %% [markdown]
# ## Modules
#
# Folded cells, one concept each: open them to read, edit them to change.

# %%
# %%writefile settings.py

# %%
# %%writefile optimizer.py

# %%
# %%writefile foreign_shards.py

# %%
# %%writefile token_data.py

# %%
# %%writefile checkpoint.py

# %%
# %%writefile telemetry.py

# %%
# %%writefile doctor.py

# %% [markdown]
# Prompts and answers, as rows of one fixed length:

# %%
# %%writefile instruction_data.py

# %% [markdown]
# ## The training script
#
# `LoraRun` has every setting with a comment. `set_up` divides the frozen weights over the chips, with one line for each tensor;
# `train_worker` is the loop.

# %%
# %%writefile train_lora.py

# %% [markdown]
# ## Launch
#
# On a TPU the first step compiles, minutes for a large model; then a line every five steps.

# %%
train_lora = runtime.load_fresh("train_lora")       # the file as it is now, not as the kernel remembers it
config = train_lora.make_config(**SETTINGS)
run_folder = train_lora.launch(config, platform)

# %% [markdown]
# ## The loss curve

# %%
if "get_ipython" in globals():
    from IPython.display import Image, display
    display(Image(run_folder / "curve.png"))
print(f"everything lies in {run_folder}")

# %% [markdown]
# ## Next
#
# `AutoModelForCausalLM.from_pretrained("runs/lora/merged")` is a plain Llama; `runs/lora/adapter` is the adapter alone, for
# `peft.PeftModel.from_pretrained`. A run that was cut off goes on with `resume_from="runs/lora"` in the settings, all else unchanged.
