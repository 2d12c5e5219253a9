# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Image classification: a GPU script moved to the TPU, step by step
#
# {{badges}}
#
# **What it trains.** On a TPU or GPU: ResNet-18 on CIFAR-10, 30 epochs. On a CPU: a small ResNet on scikit-learn's handwritten
# digits. The same code, the same notebook.
#
# **How long.** About a minute on a CPU. Nobody has timed it on a TPU yet: a minute or two for the compilation, then minutes.
#
# **What you need.** CIFAR-10's official archive as an input: on Kaggle *Add Input*, a dataset that holds
# `cifar-10-python.tar.gz` or its folder `cifar-10-batches-py`. Without it the digits take its place.
#
# **What you get.** The accuracy over all test images, each counted once on any number of devices; the confusion matrix; the
# images that the model gets most wrong; the model as safetensors.
#
# On Kaggle choose *Settings > Accelerator > TPU v5e-8*, then run all cells.

# %% [markdown]
# ## Settings
#
# The only cell you may want to touch. `SETTINGS` takes every field of `ImageConfig` (see the training script below).

# %%
SETTINGS = dict(
    data="auto",                # CIFAR-10's archive or folder, or "digits"; auto: among the Kaggle inputs, else the digits
    preset="auto",              # resnet18 on TPU and GPU, small on a CPU
    platform="auto",            # auto, tpu, gpu, cpu; virtual-tpu rehearses eight TPU devices on a CPU
    run_folder="runs/images",   # an existing run is never overwritten: the next one goes to runs/images-2
    # epochs=10,                # shorter
)

# %% [markdown]
# ## From one GPU to eight TPU chips
#
# The few lines that change. The numbers stand beside the lines in the training script below.
#
# | | on one GPU | here, on a TPU, GPUs or a CPU | why |
# |---|---|---|---|
# | 1 | `device = torch.device("cuda")` | `runtime = rt.Runtime(config.precision, config.processes)` | Eight chips are eight processes. Each asks for its own device and its rank. |
# | 2 | `model = ResNet(...)` | `torch.manual_seed(rt.mix_seed(config.seed))` before it | Nothing sends the first weights around on XLA: the same seed makes them equal, and a check says so. |
# | 3 | `torch.optim.SGD(...)` and a scheduler | `set_learning_rate(optimizer, rate, runtime.device)` | XLA compiles the step. A learning rate that is a number would be part of the program, and each new one a compilation of a minute. As a tensor it is an input. |
# | 4 | `DataLoader(data, 1024, shuffle=True)` and `batch.to(device)` | `train_loader(train_images, config.batch, runtime, config.seed)` | A DataLoader prepared by Accelerate: each rank gets its share, uploaded in the background. Every batch has one shape (`drop_last`), because a smaller last one would be compiled anew. The order follows from the seed and the epoch. |
# | 5 | `torch.autocast("cuda", torch.bfloat16)` | `with runtime.autocast():` | bf16 convolutions over fp32 weights. Accelerate's `mixed_precision="bf16"` would store the weights themselves as bf16 on a TPU. |
# | 6 | `clip_grad_norm_(...)`, `optimizer.step()`, `zero_grad()` | `runtime.optimizer_step(optimizer, config.clip_norm)` | One reduction of all gradients over the ranks, before they are clipped. |
# | 7 | nothing | `runtime.sync()` | So far everything was only noted. This hands the noted step to the device as one program. |
# | 8 | `print(loss.item())` in every step | `mean_loss, mean_norm = runtime.host_values(values)` | Reading a value makes the host wait for the chip. Every 20 steps is enough, and all ranks read, or the others would wait for ever. |
# | 9 | `model.eval()` | `share_statistics(model, runtime)` | BatchNorm saw another share of the data on each rank. Averaged, all ranks evaluate the same model. |
# | 10 | `correct += (logits.argmax(1) == labels).sum().item()` | `evaluate(model, lambda batch: model(batch["images"]), test_batches, runtime, len(test_set))` | The test set is filled up to equal batches. Each row carries its number, the filling is left out, and each image is checked to count once. |
#
# Everything else is the script that you know.

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
# %%writefile image_data.py

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
# `ImageConfig` has every setting with a comment; `train_worker` is the loop that each device runs.

# %%
# %%writefile train_images.py

# %% [markdown]
# ## Launch
#
# On a TPU the first step compiles, a minute or two.

# %%
train_images = runtime.load_fresh("train_images")       # the file as it is now, not as the kernel remembers it
run_folder = train_images.launch(train_images.make_config(**SETTINGS), platform)

# %% [markdown]
# ## Results
#
# The losses, the confusion matrix, and the test images that the model was most sure about and got wrong.

# %%
if "get_ipython" in globals():
    from IPython.display import Image, display
    for picture in ("curve.png", "confusion.png", "mistakes.png"):
        display(Image(run_folder / picture))
print(f"everything lies in {run_folder}")

# %% [markdown]
# The model is `model.safetensors` in the run folder; `ResNet` in the training script loads it. A run takes minutes, so it keeps
# no checkpoints on the way; [GPT pretraining](gpt_pretrain.ipynb) does.
