"""The text of an error in, a plain answer out; and a look at the machine before the training.

    python py/doctor.py                 # is this machine ready? one line a check, nothing is touched
    python py/doctor.py error.txt       # what does this error mean? (`-` reads what is piped in)
    python py/doctor.py --page          # all answers as a page: docs/errors.md

A failed worker's error comes here by itself, through runtime.launch. Answers are given where the message of a library
is known, word for word; any other error is shown whole and not guessed at.
"""
import argparse
import contextlib
import glob
import io
import os
import re
import shutil
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import runtime as rt
from runtime import UserError


@dataclass(frozen=True)
class Answer:
    """messages: words of the library's own, any one of them is enough; ` ... ` stands for anything on the same line."""
    name: str
    messages: tuple
    happened: str
    cause: str
    do: str

    def fits(self, words: str) -> bool:
        return any(re.search(".*".join(map(re.escape, message.split(" ... "))), words) for message in self.messages)


# The first that fits is given, so the particular stand before the general.
ANSWERS = (
    # -- the launch and the device
    Answer("tpu-not-found", ("TPU initialization failed: No ba16c7433 device found", "No jellyfish device found"),
           "torch_xla was told to use a TPU (PJRT_DEVICE=TPU), and this machine has none that it can open.",
           "The session was started without the TPU, or the variable was set by hand on another machine.",
           "Kaggle: Settings > Accelerator > TPU v5e-8. Colab: Runtime > Change runtime type. To run here without a"
           " TPU set platform='cpu' and remove PJRT_DEVICE."),
    Answer("pjrt-unknown", ("No PjRtPlugin registered for: ",),
           "PJRT_DEVICE names a device that torch_xla does not know.",
           "A misspelt value, or CUDA, which torch_xla no longer serves.",
           "Leave PJRT_DEVICE unset and let patch_environment choose it; on a GPU torch runs without torch_xla."),
    Answer("tpu-metadata", ("Failed to get TPU metadata",),
           "torch_xla asked Google's metadata server which TPU this is, and there is no such server here.",
           "The TPU_* variables of the image are missing: a terminal or an ssh shell does not have them, or a cell"
           " removed them.",
           "Start from the notebook, not from a terminal. Restart the session, and remove no TPU_* variable but those"
           " that patch_environment removes."),
    Answer("tpu-addresses", ("Could not find SliceBuilder port ... in any of the ", " worker addresses, got "),
           "The processes of the TPU could not agree on their addresses.",
           "TPU_PROCESS_ADDRESSES is still set to 'local', as Kaggle's image presets it: torch_xla never overwrites"
           " it.",
           "Run patch_environment before anything imports torch. Remove that variable alone: without TPU_HOST_BOUNDS"
           " and the other TPU_* variables the launch fails in another way."),
    Answer("tpu-task-id", ("KeyError: 'CLOUD_TPU_TASK_ID'",),
           "A cell removes a variable that today's Kaggle does not set.",
           "An older recipe: os.environ.pop('CLOUD_TPU_TASK_ID').",
           "Leave the line out: patch_environment removes what must go. In own code: os.environ.pop(name, None)."),
    Answer("tpu-busy", ("The TPU is already in use by process with pid",
                        "The TPU is already in use by another process"),
           "Another process holds the TPU.",
           "A worker of an interrupted run is still alive, or another notebook of the session uses the chips.",
           "python py/doctor.py names the process. End it, or restart the session."),
    Answer("device-before-launch",
           ("Runtime is already initialized. Do not use the XLA device before calling xmp.spawn",
                                    "the `Accelerator` should only be initialized inside your training function"),
           "A device was already opened in this kernel before the launch, and forked workers cannot share it.",
           "A cell before the launch made an Accelerator, moved something to the device or printed it.",
           "Restart the kernel and run the cells from the top. Build the Accelerator and the model inside the worker."),
    Answer("cuda-before-fork", ("Cannot re-initialize CUDA in forked subprocess",
                                "has been initialized before the `notebook_launcher` could create a forked subprocess"),
           "CUDA was already used in this kernel before the launch, and forked workers cannot use it then.",
           "A cell called torch.cuda or moved something to the GPU, or an import did (bitsandbytes does).",
           "Restart the kernel, run the cells from the top, and keep such imports and calls inside the worker."),
    Answer("state-already-set", ("AcceleratorState has already been initialized and cannot be changed",),
           "Accelerate keeps its first settings for the life of a process, and now other ones were asked for.",
           "An Accelerator with another precision was made in this process before.",
           "Restart the kernel. The launch of this project runs each training in processes of its own."),
    Answer("nprocs", ("Unsupported nprocs (",),
           "The TPU was asked for a number of processes that it cannot have.",
           "PJRT starts a process on every chip, or one in all; numbers between are not possible.",
           "Leave the number out (processes=0). Under notebook_launcher the number is ignored on a TPU."),
    Answer("address-in-use", ("EADDRINUSE", "Address already in use"),
           "The port by which the processes find each other is taken.",
           "An earlier run is still alive, or another program uses the port (29500 is the usual one).",
           "End the earlier run or restart the kernel. This project's launch takes a free port each time; with"
           " torchrun or accelerate launch give another --main_process_port."),
    Answer("fork-autograd", ("device_ready_queues_",),
           "A worker's backward pass failed inside torch's autograd engine.",
           "A backward pass ran in this kernel before the launch; its threads do not survive the fork.",
           "Restart the kernel and run no backward pass before the launch cell."),

    # -- versions
    Answer("libtpu-mismatch", ("Unexpected PJRT_ ... size: expected",),
           "torch_xla and libtpu were built for different interfaces.",
           "Something upgraded libtpu, most often an upgrade of jax. torch_xla 2.8 belongs to libtpu 0.0.17, 2.9 to"
           " 0.0.21.",
           "Restart the session and install nothing that brings jax or libtpu with it (pip install --no-deps)."),
    Answer("symbols", ("undefined symbol: ",),
           "A compiled library does not fit the torch that is installed.",
           "Something upgraded torch or torch_xla: their versions must be equal (2.8 with 2.8, 2.9 with 2.9).",
           "Restart the session and install nothing that replaces torch. On a machine of your own: pip install -r"
           " requirements.txt."),
    Answer("removed-function", ("has no attribute 'xrt_world_size'", "has no attribute 'get_ordinal'"),
           "The code calls a function that torch_xla 2.7 removed.",
           "A recipe from before 2025, or an accelerate older than 1.7.",
           "Use torch_xla.runtime.world_size() and global_ordinal(), or this project's Runtime; update accelerate."),
    Answer("alias", ("name 'torch_xla' is not defined",),
           "`import torch_xla.core.xla_model as xm` does not bind the name torch_xla.",
           "torch_xla.sync() was called without `import torch_xla`.",
           "Add `import torch_xla`, or call runtime.sync()."),
    Answer("kernel-image", ("no kernel image is available for execution on the device",),
           "This torch has no code for this GPU.",
           "The GPU is older than the build supports: Kaggle's P100 with builds for CUDA 12.8.",
           "Choose GPU T4 x2, or a TPU."),
    Answer("kernels-refused", ("Unsupported version: expected <=",),
           "libtpu refused an attention kernel, because jax writes a newer format than it reads.",
           "jax is newer than this libtpu, as on Kaggle's image.",
           "Nothing, if the run goes on: it uses the slower written-out attention. In own code set attention='plain'."),
    Answer("missing-package", ("No module named '",),
           "A Python package, or a file that a %%writefile cell writes, is not there.",
           "The package is not on this image (tiktoken is on neither TPU image), or a module's cell was not run.",
           "Run all cells from the top. For a package: switch Internet on and run the environment cell again; install"
           " with --no-deps, so that torch stays as it is."),

    # -- memory and disk
    Answer("tpu-memory", ("Ran out of memory in memory space hbm", "Exceeded hbm capacity"),
           "The training step needs more memory than a chip has (15.75 GiB on a v5e).",
           "Too many windows at once: activations and logits grow with micro_batch x T.",
           "Halve micro_batch (the batch per optimizer step stays the same), or set recompute=True. make preflight"
           " says what fits, without a TPU."),
    Answer("gpu-memory", ("CUDA out of memory",),
           "The GPU has no memory left for the next tensor.",
           "Too many windows at once, or another process or an earlier run still holds memory of the GPU.",
           "Halve micro_batch (the batch per optimizer step stays the same), or set recompute=True. nvidia-smi shows"
           " who holds memory."),
    Answer("host-memory", ("DefaultCPUAllocator: can't allocate memory", "Cannot allocate memory", "MemoryError"),
           "The machine's own memory (RAM) is not enough.",
           "Every process holds a model and a part of the data: eight processes need eight times as much.",
           "Use token shards, which are mapped and not loaded; lower micro_batch or processes; give launch a model"
           " built before, so that the workers share it."),
    Answer("disk-full", ("No space left on device", "unexpected pos "),
           "The disk is full; the file that was being written is incomplete. (torch.save says only `unexpected pos`.)",
           "Checkpoints: one of GPT-2 124M has 1.5 GB, and at least four are on the disk at a time. Kaggle keeps 20"
           " GB.",
           "Remove old runs or lower keep_checkpoints, then resume: a checkpoint of this project is complete or not"
           " there."),
    Answer("read-only", ("Read-only file system",),
           "A folder that cannot be written was to be written.",
           "Kaggle's inputs (/kaggle/input) are read-only.",
           "Write below /kaggle/working: give run_folder, or a path relative to the notebook."),

    # -- tensors
    Answer("devices-differ", ("Expected all tensors to be on the same device", "Expected XLA tensor. Got: ",
                              "is not on the expected device", "is not an XLA tensor"),
           "One operation was given tensors of two devices.",
           "A batch, a mask or a buffer was made on the CPU while the model is on the device, or the other way round.",
           "Make it with device=x.device, or move it with .to(runtime.device); register buffers in the module."),
    Answer("dtypes-differ", ("to have the same dtype, but got", "must have the same dtype",
                             "expected scalar type ... BFloat16", "expected scalar type ... Half"),
           "One operation was given tensors of two precisions.",
           "The model, or a part of it, was cast with .bfloat16() or .half() while its input stayed fp32.",
           "Keep the weights fp32 and put the forward pass under runtime.autocast(): it casts what may be cast."),
    Answer("token-too-large", ("index out of range in self",),
           "A token id is larger than the embedding table.",
           "The data was made with a tokenizer that has more ids than vocab_size; a TPU would train on without a"
           " word.",
           "Set vocab_size to the tokenizer's size (0 takes it from the shards)."),
    Answer("nan-in-backward", ("returned nan values in its",),
           "A backward pass produced NaN; the operation is named in the error.",
           "A square root or a logarithm of 0, a division by 0, or a learning rate that let the weights grow too far.",
           "Add a small epsilon there. If it comes after some steps: lower learning_rate, raise warmup_steps, clip."),
    Answer("unscale-twice", ("unscale_() has already been called",),
           "fp16 gradients were unscaled twice in one step.",
           "Clipping through the scaler and through Accelerate, or clipping in every micro-step.",
           "Clip once for each optimizer step: runtime.optimizer_step does."),
    Answer("xla-to-numpy", ("can't convert xla", "can't convert cuda"),
           "A tensor on the device was given to NumPy.",
           "A metric or a plot took the loss as it is.",
           "Read it on the host, at log steps only: runtime.host_values(tensor)."),
    Answer("xla-checkpointing", ("XLA currently does not support use_reentrant==False",
                                 "module 'torch' has no attribute 'xla'"),
           "torch's own activation checkpointing does not work on XLA.",
           "torch.utils.checkpoint, or use_reentrant=False, on a TPU.",
           "Use runtime.checkpoint_function(); with Hugging Face models switch gradient_checkpointing off on a TPU."),

    # -- replicas and collectives
    Answer("replicas-differ", ("the replicas hold different weights",),
           "The ranks hold different weights: what they train is not one model.",
           "Different seeds before the model was built, weights loaded after prepare on one rank only, or gradients"
           " that were accumulated, reduced in place and clipped (docs/what_the_guides_get_wrong.md).",
           "Build the model under one seed, load on every rank, and step through runtime.optimizer_step. Resume from"
           " the checkpoint before: this one was not saved."),
    Answer("left-common-path", ("The ranks left the common path at sync",),
           "One rank went another way than the others; on a TPU this run would hang for ever.",
           "A reduction, a save or an evaluation stands under `if rank == 0`, or a loop has another length on each"
           " rank.",
           "Let every rank do it and one rank print. The lines above name the rank and the source line."),
    Answer("worlds-apart", ("processes, but this worker sees a world of",),
           "The processes were started, but they do not know of each other.",
           "On a CPU ACCELERATE_USE_CPU=1 is missing; elsewhere another launcher started them.",
           "Run patch_environment before anything imports Accelerate, and start with this project's launch."),
    Answer("collective-timeout", ("Timed out waiting ", "Timed out after ... waiting for clients",
                                  "Watchdog caught collective operation timeout", "wait timeout after "),
           "A rank waited for the others in a reduction until the time was over.",
           "Another rank failed, is still busy, or never came to that reduction: one that stands under `if rank =="
           " 0`.",
           "Look for an earlier error of another rank. Let every rank enter each reduction; rehearse with"
           " platform='virtual-tpu', which names the line."),
    Answer("other-rank-gone", ("Connection reset by peer", "Connection closed by peer"),
           "Another rank ended, and this one lost its connection to it: the reason is with the other one.",
           "The other rank was ended by the system, most often for lack of memory, or crashed.",
           "Look for the other rank's last words further up in the output."),

    # -- checkpoints
    Answer("weights-only", ("Weights only load failed",),
           "torch.load refused a file that holds more than tensors.",
           "Since torch 2.6 only tensors and plain values are loaded; a NumPy number or a config object is refused.",
           "Save float(best) instead of the NumPy number. For a file that you made yourself, weights_only=False reads"
           " it."),
    Answer("names-differ", ("Error(s) in loading state_dict for ",),
           "The names or shapes in the checkpoint are not those of the model.",
           "It was saved from a wrapped model (names that begin with `module.` or `_orig_mod.`), or the geometry"
           " differs.",
           "Save the inner model (accelerator.unwrap_model), or strip the prefix. Do not use strict=False: it trains"
           " from random weights without a word."),
    Answer("xla-storage", ("Attempted to access the data pointer on an invalid python storage",),
           "A tensor that is on the TPU was to be saved as it is.",
           "XLA tensors have no memory that a file format can read.",
           "Save copies on the CPU: {name: t.detach().cpu() ...}; checkpoint.model_tensors(model) makes them."),
    Answer("shared-tensors", ("Some tensors share memory",),
           "safetensors refused two names for one tensor.",
           "The model's embedding and its output layer are tied.",
           "Save one of the two and tie them again after loading (safetensors.torch.save_model does)."),
    Answer("save-state", ("'MpDeviceLoaderWrapper' object has no attribute 'dataset'",),
           "accelerator.save_state() failed on a prepared DataLoader.",
           "On XLA Accelerate wraps the loader in a class without `dataset` (1.7 to 1.15).",
           "Do not prepare the loader, or save with this project's checkpoint.py."),

    # -- data
    Answer("tokenizer-download", ("openaipublic.blob.core.windows.net",),
           "tiktoken wanted to download its vocabulary, and the network did not answer.",
           "The session's Internet is switched off. A vocabulary file under its own name in the cache folder is"
           " ignored.",
           "Switch Internet on, attach the vocabulary file (data_prep/text_encodings.py lists the names it finds), or"
           " use encoding='bytes'. Training from ready shards needs no tokenizer."),
    Answer("special-token", ("Encountered text corresponding to disallowed special token",),
           "The text contains the separator's name, such as <|endoftext|>, as ordinary text.",
           "tiktoken's plain encode refuses that.",
           "encoding.encode_ordinary(text), and add the separator's id yourself."),
    Answer("dataset-script", ("Dataset scripts are no longer supported",),
           "The datasets library no longer runs a dataset's own loading script.",
           "The dataset on the hub has only a script (OpenWebText and many older ones).",
           "Take a copy of it in Parquet form, or give text files to data_prep/prepare.py."),
    Answer("split-too-short", ("random_ expects 'from' to be less than 'to'", "ValueError: high <= 0"),
           "A random start position was to be drawn from an empty range.",
           "The split has fewer tokens than one window.",
           "Use more data or a smaller T. This project's shards are checked for it before the start."),

    # -- a worker that vanished: general, so last
    Answer("crash-in-fork", ("exit code -11", "SIGSEGV", "Signal 11 "),
           "A worker crashed inside a library (SIGSEGV), without a Python error.",
           "A library that was used before the fork and does not survive it, or versions that do not fit together.",
           "Restart the kernel, run nothing that uses torch before the launch, and run python py/doctor.py, which"
           " compares the versions."),
    Answer("aborted", ("exit code -6", "SIGABRT", "Signal 6 "),
           "A library ended the worker itself (SIGABRT); its reason stands further up in the output, before this box.",
           "On a TPU the runtime does so for a device that another process holds; in a rehearsal XLA does so when a"
           " thread comes late (`Termination timeout`).",
           "Read the last lines before the launcher's words. After `Termination timeout`: run the rehearsal again."),
    Answer("killed", ("exit code -9", "SIGKILL", "Signal 9 "),
           "The system ended a worker (SIGKILL), without a Python error.",
           "The machine ran out of memory (RAM): every process holds a model and a part of the data.",
           "Lower micro_batch or processes; use token shards, which are mapped and not loaded; give launch a model"
           " built before, so that the workers share it."),
    Answer("bus-error", ("exit code -7", "SIGBUS", "Signal 7 "),
           "A worker read memory that has no file behind it any more (SIGBUS).",
           "A shard was cut short or removed while it was mapped, or shared memory (/dev/shm) is full.",
           "Check the data folder, and set num_workers=0 in own DataLoaders."),
    Answer("pool-broken", ("A process in the process pool was terminated abruptly",),
           "A worker vanished without a Python error; the launcher does not know why.",
           "Most often the machine ran out of memory (RAM); a crash of the device library looks the same.",
           "Lower micro_batch; use token shards, which are mapped and not loaded; look at the last lines before this"
           " one."),
)


# ---- an error's text -> its answer ------------------------------------------------------------------------------

def own_words(text: str) -> list[str]:
    """The words of the errors in a traceback, the last error first, then what caused it.

    Without the source lines, which may quote any message, and without errors that were handled on the way.
    """
    last = re.split(r"During handling of the above exception, another exception occurred:", text)[-1]
    chain = re.split(r"The above exception was the direct cause of the following exception:", last)
    return [re.sub(r'(?s)^.*\n  File "[^\n]*\n(?:    [^\n]*\n)*', "", "\n" + part).strip() for part in reversed(chain)]


def diagnose(text: str, launcher: str = "") -> Answer | None:
    """The answer to an error's text; None when it is not known.

    launcher: what the launcher says. It counts where a worker said nothing, or only that another one is gone.
    """
    found = next((answer for words in own_words(text) for answer in ANSWERS if answer.fits(words)), None)
    if launcher and (not text or found and found.name == "other-rank-gone"):
        return diagnose(launcher) or found
    return found


def box(answer: Answer | None, log: str | Path | None = None, width: int = 100) -> str:
    """An answer as a frame of text lines; for an unknown error only where its text is kept."""
    parts = [("Not known here", "The error above is shown whole, as it came.")]
    if answer:
        parts = [("What happened", answer.happened), ("Most likely cause", answer.cause), ("What to do", answer.do)]
    parts += [("Full log", str(log))] if log else []
    lines = [""]
    for title, text in parts:
        wrapped = textwrap.wrap(text, width - 24, break_long_words=False, break_on_hyphens=False) or [""]
        lines += [f"{title:<18} {wrapped[0]}", *(" " * 19 + line for line in wrapped[1:]), ""]
    inner = max(width - 4, *map(len, lines))
    frame = "─" * (inner + 2)
    return "\n".join([f"┌{frame}┐", *(f"│ {line:<{inner}} │" for line in lines), f"└{frame}┘"])


def explain(text: str) -> None:
    """Print what an error means; for an unknown one, say so."""
    print(box(diagnose(text)))


# ---- is this machine ready? -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Check:
    name: str
    verdict: str        # ok, note, BAD
    finding: str


LIBTPU_OF = {"2.8": "0.0.17", "2.9": "0.0.21"}      # what each torch_xla names in its own [tpu] extra
SESSION_MINUTES = 540                               # Kaggle's limit for a TPU session
GPT2_CHECKPOINTS_GB, SMALL_CHECKPOINTS_GB = 6.0, 0.1        # four checkpoints of GPT-2 124M; of the demo


def check_machine(folder: str | Path = ".", environ=os.environ) -> list[Check]:
    """Every check of this machine. Opens no device, imports no torch, leaves the environment as it is."""
    try:
        platform = rt.detect_platform("auto", environ)
        device = Check("device", "ok", f"{platform.name}: {platform.why}")
    except UserError as error:      # a TPU's image without its TPU: the rest is looked at as for a TPU
        platform, device = rt.Platform("tpu", 8, "claimed"), Check("device", "BAD", str(error))
    return [device, check_python(), check_packages(platform), check_libtpu(platform),
            check_variables(platform, environ), check_holders(platform), check_memory(platform),
            check_disk(platform, folder), check_time(), check_tokenizer()]


def check_python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", "ok" if sys.version_info >= (3, 10) else "BAD", f"{version}, 3.10 or newer is needed")


def check_packages(platform: rt.Platform) -> Check:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            rt.check_versions(platform)
    except UserError as error:
        return Check("packages", "BAD", str(error))
    return Check("packages", "ok", said.getvalue().strip().splitlines()[0])


def check_libtpu(platform: rt.Platform) -> Check:
    torch_xla, libtpu = rt.installed_version("torch_xla"), rt.installed_version("libtpu")
    if platform.name != "tpu":
        return Check("libtpu", "ok", "not needed here")
    if libtpu is None:
        return Check("libtpu", "BAD", "not installed: choose a TPU session, whose image brings it")
    wanted = LIBTPU_OF.get(".".join((torch_xla or "").split(".")[:2]))
    fits = wanted is None or libtpu.split(".")[:3] == wanted.split(".")
    finding = f"{libtpu}; torch_xla {torch_xla} was built for {wanted or 'an unknown one'}"
    return Check("libtpu", "ok", finding) if fits else \
        Check("libtpu", "note", f"{finding}: if the launch fails, something upgraded it; restart the session")


def check_variables(platform: rt.Platform, environ) -> Check:
    stale = [name for name in rt.STALE_TPU_VARIABLES if environ.get(name)] if platform.uses_xla else []
    changes = rt.environment_changes(platform, environ)
    if stale:
        return Check("variables", "note", f"{', '.join(stale)} would spoil the run; patch_environment removes it")
    return Check("variables", "ok", f"patch_environment will set {len(changes)}" if changes else "as they should be")


def check_holders(platform: rt.Platform) -> Check:
    """Who has a TPU's device file open, by /proc: nothing is opened here."""
    holders = set()
    for link in glob.glob("/proc/[0-9]*/fd/*") if platform.name == "tpu" else ():
        with contextlib.suppress(OSError):
            if re.match(r"/dev/(accel|vfio/)\d", os.readlink(link)):
                holders.add(link.split("/")[2])
    holders.discard(str(os.getpid()))
    if holders:
        return Check("device free", "BAD", f"the TPU is held by process {', '.join(sorted(holders))}: end it (kill"
                     f" {sorted(holders)[0]}), or restart the session")
    return Check("device free", "ok", "nobody holds the TPU" if platform.name == "tpu" else "no TPU to hold")


def check_memory(platform: rt.Platform) -> Check:
    """Free memory of the host against a rough need: 3 GiB a process for GPT-2, 1 GiB for the small models of a CPU."""
    free = available_memory_gib()
    needed = platform.processes * (3 if platform.name in ("tpu", "gpu") else 1)
    if free is None:
        return Check("memory", "note", "cannot be read on this system")
    return Check("memory", "ok" if free >= needed else "note", f"{free:.1f} GiB free, about {needed} GiB are wanted for"
                 f" {platform.processes} process{'es' if platform.processes > 1 else ''}")


def available_memory_gib() -> float | None:
    with contextlib.suppress(OSError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        return int(found[1]) / 2 ** 20 if found else None


def check_disk(platform: rt.Platform, folder: str | Path) -> Check:
    needed = GPT2_CHECKPOINTS_GB if platform.name in ("tpu", "gpu") else SMALL_CHECKPOINTS_GB
    free = shutil.disk_usage(folder).free / 1e9
    if not os.access(folder, os.W_OK):
        return Check("disk", "BAD", f"{Path(folder).resolve()} cannot be written: run from another folder")
    return Check("disk", "ok" if free >= needed else "BAD", f"{free:.1f} GB free in {Path(folder).resolve()}, a run of"
                 f" the default preset keeps {needed:g} GB")


def check_time(kaggle: Path = Path("/kaggle/working")) -> Check:
    if not kaggle.is_dir():
        return Check("time left", "ok", "no limit known here")
    left = SESSION_MINUTES - rt.seconds_since_session_start() / 60
    return Check("time left", "ok" if left > 60 else "note", f"about {left:.0f} of {SESSION_MINUTES} minutes; a version"
                 " that is cut off keeps nothing, the run ends 30 minutes before")


def check_tokenizer() -> Check:
    """GPT-2's vocabulary file, where data_prep would find it."""
    beside = Path(__file__).resolve().parent
    sys.path += [str(folder) for folder in (beside, beside.parent / "data_prep") if str(folder) not in sys.path]
    try:
        from text_encodings import find_gpt2_vocabulary
    except ImportError:
        return Check("tokenizer", "ok", "not needed by this notebook")
    if rt.installed_version("tiktoken") is None:
        return Check("tokenizer", "note", "tiktoken is not installed: text becomes bytes; ready shards need none")
    found, _ = find_gpt2_vocabulary()
    return Check("tokenizer", "ok" if found else "note", "GPT-2's vocabulary is here" if found else
                 "GPT-2's vocabulary file is not here: text becomes bytes, or --allow-download; ready shards need none")


def table(checks: list[Check]) -> str:
    lines = []
    for check in checks:
        wrapped = textwrap.wrap(check.finding, 96, break_long_words=False) or [""]
        lines += [f"  {check.verdict:<4}  {check.name:<12} {wrapped[0]}", *(" " * 21 + line for line in wrapped[1:])]
    bad = sum(check.verdict == "BAD" for check in checks)
    return "\n".join([*lines, f"{bad} of {len(checks)} checks must be put right first" if bad else "ready to train"])


# ---- the page of answers ----------------------------------------------------------------------------------------

PAGE_TOP = """# From error to answer

What libraries say, what it means, what to do. A failed worker's answer is shown by itself, under its traceback. For an
error from elsewhere, save its text and ask: `.venv/bin/python py/doctor.py error.txt`; in a notebook `import doctor;
doctor.explain('''the text''')`. An error that is not in this list is shown whole, and not guessed at.

Before a run: `.venv/bin/python py/doctor.py` looks at versions, variables, devices, memory, disk, time and tokenizer.

*This page is written by `.venv/bin/python py/doctor.py --page`.*
"""

# What is seen where no library says anything.
SYMPTOMS = (
    ("nothing happens for minutes at the first step",
     "a TPU compiles the training step, 1 to 3 minutes; the line `... is compiled` says so every 20 s"),
    ("nothing happens later",
     "after 5 minutes the line says where the main rank stands: in a reduction means that another rank is not there."
     " Rehearse with `platform='virtual-tpu'`, which names rank and line"),
    ("the loss is NaN or inf",
     "the run ends with a sentence, checkpoints untouched: lower `learning_rate`, raise `warmup_steps`, resume"),
    ("the loss jumps after a resume",
     "`THE LOSS JUMPED` at the first logged step: the data, the weights or the optimizer state are not those that were"
     " saved"),
    ("every step takes seconds",
     "`RECOMPILED` says which input changed its shape; without it, something reads the loss in every step"),
    ("attention is slow on a TPU",
     "the line `attention: written out instead of the TPU's kernels` says why the kernels were refused"),
    ("eight processes learn like one",
     "`device:` at the start must say `8 x`; the replicas are compared before step 1 and at every save"))


def page() -> str:
    """All answers as Markdown; docs/errors.md is this text, a test compares them."""
    entries = [f"### {answer.name}\n\n" + "".join(f"    {message.strip()}\n" for message in answer.messages)
               + f"\n{answer.happened}\n\n- **Cause:** {answer.cause}\n- **Do:** {answer.do}\n" for answer in ANSWERS]
    symptoms = "".join(f"| {seen} | {meaning} |\n" for seen, meaning in SYMPTOMS)
    return (f"{PAGE_TOP}\n## Symptoms without a message\n\n| what you see | what it is, and what to do |\n|---|---|\n"
            f"{symptoms}\n## Messages\n\n" + "\n".join(entries))


def main(arguments: list | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("error", nargs="?", help="a file with the text of an error, or - to read it from a pipe")
    parser.add_argument("--page", action="store_true", help="print docs/errors.md")
    options = parser.parse_args(arguments)
    if options.page:
        return print(page(), end="")
    if options.error:
        try:
            text = sys.stdin.read() if options.error == "-" else Path(options.error).read_text(errors="replace")
        except OSError as error:
            raise UserError(f"{options.error} cannot be read ({error.strerror}): give a file with an error's text.") \
                from None
        return explain(text)
    checks = check_machine()
    print(table(checks))
    if any(check.verdict == "BAD" for check in checks):
        sys.exit(1)


if __name__ == "__main__":
    rt.run_main(main)
