"""One machine, whichever it is: detect it, patch the environment, launch, and give the worker device, sync and reductions.

This is the only module that knows torch_xla. Nothing heavy is imported before a function needs it, so a notebook may
import this module first and patch the environment before torch is loaded:

    platform = patch_environment("auto")                        # parent, before torch
    launch(worker, (config,), platform)                         # parent
    runtime = Runtime(precision="auto", processes=8)            # worker

Platforms:  tpu (Kaggle v5e-8: a process a chip; Colab v5e-1, v6e-1: in process), gpu, cpu,
            xla-cpu (XLA's CPU backend, one device: the TPU's programs on a laptop),
            virtual-tpu (eight such devices in one process, see virtual_tpu.py: a rehearsal, never a speed).
"""
import contextlib
import gc
import glob
import hashlib
import importlib
import importlib.metadata
import importlib.util
import logging
import multiprocessing
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path


class UserError(Exception):
    """A user's mistake, told in one sentence: what, where, what to do. Shown without a traceback."""

    def _render_traceback_(self):       # IPython asks an exception for this before it draws its own traceback
        return [f"{type(self).__name__}: {self}"]


class WorkerFailed(UserError):
    """A worker process failed; the text carries the first failing rank's own traceback, not the launcher's."""


# ---- which machine is this? ------------------------------------------------------------------------------------------

GOOGLE_PCI_VENDOR = "0x1ae0"
TPU_PCI_DEVICES = {"0x005e": "v4", "0x0063": "v5e", "0x006f": "v6e"}     # as in torch_xla's own list of chips


@dataclass(frozen=True)
class Platform:
    """Where the training runs. `processes` is the number of workers that `launch` starts."""
    name: str           # tpu, gpu, cpu, xla-cpu, virtual-tpu
    processes: int
    why: str            # the evidence, for the reader

    @property
    def uses_xla(self) -> bool:
        return self.name in ("tpu", "xla-cpu", "virtual-tpu")

    @property
    def in_process(self) -> bool:
        """A single XLA chip is driven from this very process: spawning there asks for a topology of four chips."""
        return self.uses_xla and self.processes == 1


def count_tpu_chips(root: str = "/") -> int:
    """TPU chips on the PCI bus. Reads files only: touching the device here would spoil the launch."""
    vendors = glob.glob(os.path.join(root, "sys/bus/pci/devices/*/vendor"))
    google = [Path(v).parent for v in vendors if Path(v).read_text().strip() == GOOGLE_PCI_VENDOR]
    return sum((folder / "device").read_text().strip() in TPU_PCI_DEVICES for folder in google)


def count_gpus(environ=os.environ) -> int:
    """NVIDIA GPUs that a process would see. Does not initialise CUDA, which would spoil a fork."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    found = sum(line.startswith("GPU ") for line in listing.stdout.splitlines()) if listing.returncode == 0 else 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return found if visible is None else min(found, len([d for d in visible.split(",") if d.strip() not in ("", "-1")]))


def outer_launch(environ=os.environ) -> tuple[int, int]:
    """(processes, rank) where torchrun, `accelerate launch` or torch_xla's spawn started this process; (0, 0) elsewhere."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return int(environ["WORLD_SIZE"]), int(environ["RANK"])
    if "PJRT_LOCAL_PROCESS_RANK" in environ:
        return int(environ.get("PJRT_LOCAL_PROCESS_COUNT", 1)), int(environ["PJRT_LOCAL_PROCESS_RANK"])
    return 0, 0


def detect_platform(wanted: str = "auto", environ=os.environ, tpu_chips: int | None = None,
                    gpus: int | None = None) -> Platform:
    """Decide where to train, from device files and the image's own variables; no device is touched.

    Raises UserError where the machine claims a TPU and has none: training on its CPU instead would take weeks.
    """
    chips = count_tpu_chips() if tpu_chips is None else tpu_chips
    gpus = count_gpus(environ) if gpus is None else gpus
    host = ("Kaggle" if any(key.startswith("KAGGLE") for key in environ) or "ISTPUVM" in environ
            else "Colab" if "COLAB_RELEASE_TAG" in environ or "COLAB_TPU_1VM" in environ else "this machine")
    claims_tpu = environ.get("ISTPUVM") == "1" or environ.get("COLAB_TPU_1VM") == "1"
    if wanted == "auto":
        wanted = "tpu" if chips or claims_tpu else "gpu" if gpus else "cpu"
    if wanted == "tpu":
        if not chips:
            raise UserError(f"{host} has a TPU image but no TPU chip is attached to it: restart the session with the"
                            " accelerator 'TPU v5e-8' (Kaggle) or a TPU runtime (Colab), or set platform='cpu'."
                            if claims_tpu else f"platform='tpu' was asked for, but {host} has no TPU chip:"
                            " choose a TPU session, or set platform='auto'.")
        return Platform("tpu", chips, f"{host}, {chips} TPU chip{'s' if chips > 1 else ''} on the PCI bus")
    started, _ = outer_launch(environ)
    if wanted == "gpu":
        if not gpus:
            raise UserError(f"platform='gpu' was asked for, but nvidia-smi shows no GPU on {host}: set platform='auto'.")
        return Platform("gpu", started or gpus, f"{host}, {gpus} NVIDIA GPU{'s' if gpus > 1 else ''}")
    if wanted in ("cpu", "xla-cpu"):
        return Platform(wanted, started or 1, f"{host}, no accelerator used")
    if wanted == "virtual-tpu":
        return Platform(wanted, int(environ.get("VIRTUAL_TPU_DEVICES", 8)), f"{host}, virtual devices: a rehearsal")
    raise UserError(f"platform={wanted!r} is not known: use 'auto', 'tpu', 'gpu', 'cpu', 'xla-cpu' or 'virtual-tpu'.")


# ---- the environment, before torch ---------------------------------------------------------------------------------

STALE_TPU_VARIABLES = {
    "TPU_PROCESS_ADDRESSES": "Kaggle presets 'local', and torch_xla never overwrites it: 8 processes, 1 address",
    "TPU_PROCESS_BOUNDS": "left by an earlier run, it would limit the launch to its own number of processes",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "left by an earlier run",
    "TPU_VISIBLE_CHIPS": "left by an earlier run, it would give every process the same chip",
    "TPU_PROCESS_PORT": "left by an earlier run",
    "CLOUD_TPU_TASK_ID": "would give every process the same number",
    "XRT_TPU_CONFIG": "belongs to a torch_xla of 2022",
    "XLA_USE_BF16": "stores every float32 as bfloat16, master weights and optimizer state included",
    "XLA_DOWNCAST_BF16": "stores every float32 as bfloat16, master weights and optimizer state included",
}


THREAD_VARIABLES = {
    "OMP_NUM_THREADS": "1",         # libgomp's thread pool does not survive a fork; workers raise the number again
    "OMP_WAIT_POLICY": "PASSIVE",   # threads that spin while another program has their core make a step ten times slower
}


def set_thread_variables() -> None:
    """What torch reads when it is imported. A script calls this above its `import torch`; patch_environment does it too."""
    os.environ.update(THREAD_VARIABLES)


def environment_changes(platform: Platform, environ) -> dict:
    """What must differ from `environ` for this platform: {name: value, or None to remove}. Topology stays untouched."""
    wanted = {
        **THREAD_VARIABLES,
        "USE_TORCH_XLA": "1" if platform.uses_xla else "0",     # read by Accelerate when it is imported
        "ACCELERATE_USE_CPU": "1" if platform.name == "cpu" else None,      # without it, N processes never meet
        "TOKENIZERS_PARALLELISM": "false",
        "USE_TF": "0", "USE_FLAX": "0",         # keeps transformers from loading a framework that takes the TPU
    }
    if platform.uses_xla:
        wanted |= {name: None for name in STALE_TPU_VARIABLES}
        wanted["PJRT_DEVICE"] = "TPU" if platform.name == "tpu" else "CPU"
    if platform.name in ("xla-cpu", "virtual-tpu"):
        wanted["CPU_NUM_DEVICES"] = str(platform.processes)
    if platform.name == "virtual-tpu":
        wanted |= {"TPU_NAME": "local", "KAGGLE_KERNEL_RUN_TYPE": "Interactive",    # the launcher's own TPU branch
                   "XLA_THREAD_POOL_SIZE": "64", "NPROC": "64"}     # collectives wait for threads a laptop lacks
    return {name: value for name, value in wanted.items() if environ.get(name) != value}


def patch_environment(platform: str = "auto", environ=os.environ) -> Platform:
    """Detect the platform and set the variables it needs; call it before torch is imported. Safe to call twice.

    Prints what was found and every variable that was changed. Raises UserError when torch or Accelerate were loaded
    under other settings, since both read them only once.
    """
    found, (started, rank) = detect_platform(platform, environ), outer_launch(environ)
    if found.uses_xla and started:      # torch_xla has set this process up, and opened its device
        return found
    say = print if rank == 0 else lambda line: None
    changes = environment_changes(found, environ)
    if "USE_TORCH_XLA" in changes and "accelerate" in sys.modules:
        raise UserError(f"Accelerate was imported before the platform was set to {found.name!r}: restart the kernel and"
                        " run the cells from the top.")
    say(f"platform: {found.name} ({found.why}), {found.processes} process{'es' if found.processes > 1 else ''}")
    for name, value in sorted(changes.items()):
        before = environ.pop(name, None)
        if value is not None:
            environ[name] = value
        reason = f"   # {STALE_TPU_VARIABLES[name]}" if name in STALE_TPU_VARIABLES else ""
        say(f"  {name}: {before or 'unset'} -> {value or 'unset'}{reason}")
    if not changes:
        say("  environment already right, nothing changed")
    check_versions(found, say)
    warnings.filterwarnings("ignore", message="IProgress not found")    # Accelerate's bar, which is not used here
    sys.excepthook = _user_errors_in_one_line
    return found


def check_versions(platform: Platform, say=print) -> None:
    """Say the versions that must fit together; raise UserError when torch and torch_xla do not."""
    versions = {name: installed_version(name) for name in ("torch", "torch_xla", "libtpu", "accelerate")}
    say("  " + ", ".join(f"{name} {version}" for name, version in versions.items() if version))
    if versions["accelerate"] is None or versions["torch"] is None:
        raise UserError("torch and accelerate must be installed: pip install -r requirements.txt.")
    if not platform.uses_xla:
        return
    if versions["torch_xla"] is None:
        raise UserError(f"platform {platform.name!r} needs torch_xla, which is not installed here: choose a TPU session,"
                        " whose image brings it, or set platform='cpu'.")
    torch_minor, xla_minor = (versions[name].split(".")[:2] for name in ("torch", "torch_xla"))
    if torch_minor != xla_minor:
        raise UserError(f"torch {versions['torch']} and torch_xla {versions['torch_xla']} do not fit together: something"
                        " upgraded one of them. Restart the session and install nothing that replaces torch.")
    if [int(part) for part in versions["accelerate"].split(".")[:2]] < [1, 7]:
        raise UserError(f"accelerate {versions['accelerate']} cannot launch today's TPUs: pip install 'accelerate>=1.7'.")
    for name in ("tensorflow", "tensorflow-tpu"):
        if installed_version(name):
            say(f"  note: {name} is installed and may take the TPU when imported; nothing here imports it")


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _user_errors_in_one_line(kind, error, trace):
    if hasattr(kind, "_render_traceback_"):     # by trait, not by class: load_fresh may have made the class anew
        print(f"{kind.__name__}: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def load_fresh(name: str, folder: str | Path | None = None):
    """Import module `name` from `folder` as its file is now, with every module of that folder that it imports.

    A kernel keeps the first version of a module it imported, and forked workers inherit it: a changed `%%writefile`
    cell would train the old code. Prints a hash of each file, so a log shows which code ran.
    Raises UserError with file and line when a file is not valid Python.
    """
    folder = Path(folder or Path(__file__).parent).resolve()
    for loaded, path in _modules_of(folder).items():
        del sys.modules[loaded]
        # A cached .pyc is matched by second and size: a quick edit of the same length would not be seen.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except SyntaxError as error:
        raise UserError(f"{Path(error.filename).name} line {error.lineno} is not valid Python: {error.msg}; correct its"
                        " cell, run it again, then this one.") from None
    print("code: " + ", ".join(f"{loaded} {hashlib.sha256(path.read_bytes()).hexdigest()[:8]}"
                               for loaded, path in sorted(_modules_of(folder).items())))
    return module


def _modules_of(folder: Path) -> dict:
    """{name: file} of the loaded modules that lie directly in `folder`."""
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if name != "__main__"}
    # torch.classes claims a relative file of its own name, which would seem to lie in any current folder
    return {name: Path(file) for name, file in files.items()
            if file and os.path.isabs(file) and Path(file).resolve().parent == folder}


def install_missing(*packages: str) -> None:
    """pip-install pure additions that an image lacks, without their dependencies: nothing may replace torch.

    Without a network, says so and goes on: training from ready shards needs none of them.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        print(f"installing {', '.join(missing)}")
        done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *missing],
                              capture_output=True, text=True)
        if done.returncode:
            print(f"  could not be installed (is the session's Internet switched off?): text cannot be turned into tokens"
                  f" or back here, but training from ready shards works. pip said: {done.stderr.strip()[-200:]}")


# ---- launch -----------------------------------------------------------------------------------------------------------

def launch(worker, args: tuple = (), platform: Platform | None = None, processes: int = 0,
           log_folder: str | Path | None = None) -> None:
    """Run `worker(*args)` on every device of the platform and wait for the end.

    tpu, several chips: Accelerate's notebook_launcher, its TPU branch (a forked process a chip, always all of them);
    one XLA chip: in this process; several GPUs or CPU processes: notebook_launcher; one GPU or CPU: one forked child, so
    that this process never starts a thread pool or an autograd engine that a later fork could not use.
    Under `accelerate launch` or torchrun, this already is a worker and simply runs.

    Raises WorkerFailed with the first failing rank's traceback and the doctor's answer; UserError for a launch that
    cannot work. What every failed rank said is kept in log_folder (None: a temporary folder that stays), where possible.
    """
    platform = platform or detect_platform()
    count = resolve_processes(platform, processes)
    if outer_launch()[0]:
        return worker(*args)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        before = set(multiprocessing.active_children())
        finished, problem = threading.Event(), None
        threading.Thread(target=_end_stragglers, args=(folder, before, finished), daemon=True).start()
        # A child must not collect what an earlier launch left in this process: a store's destructor would wait there for
        # a thread that only exists here.
        gc.collect()
        gc.freeze()
        try:
            _start(_Guarded(worker, folder), args, platform, count)
        except (Exception, SystemExit) as error:
            problem = error if isinstance(error, UserError) else _explain_failure(error, folder, log_folder)
        finally:
            finished.set()
            _end_children(before)
            gc.unfreeze()
        if problem:         # raised out here, so that the launcher's own error, and all it holds, is let go
            raise problem


def resolve_processes(platform: Platform, processes: int) -> int:
    """The number of workers. 0 means all the platform has. Raises UserError for a number it cannot run."""
    if platform.uses_xla and processes not in (0, platform.processes):
        raise UserError(f"processes={processes} cannot be had on {platform.name}: PJRT drives all {platform.processes}"
                        f" devices or none, so use processes=0.")
    if platform.name == "gpu" and processes > platform.processes:
        raise UserError(f"processes={processes} is more than the {platform.processes} GPUs of this machine.")
    return processes or platform.processes


def _start(worker, args: tuple, platform: Platform, count: int) -> None:
    if platform.in_process:
        return worker(*args)
    if count == 1:
        return run_child(worker, args)
    _refuse_spoiled_parent(platform)
    if platform.name == "virtual-tpu":
        import virtual_tpu
        worker.worker = virtual_tpu.install(count, worker.worker)
    from accelerate import notebook_launcher
    from accelerate.utils import PrepareForLaunch
    if platform.name == "tpu" and not any(key.startswith("KAGGLE") for key in os.environ):
        # The launcher takes its TPU branch on Kaggle and Colab alone; elsewhere, do what that branch does.
        import torch_xla.distributed.xla_multiprocessing as xmp
        return xmp.spawn(PrepareForLaunch(worker, distributed_type="XLA"), args=args, start_method="fork")
    if platform.name == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")       # a host name that does not resolve would hang gloo
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)      # the failing rank's own words are shown instead
    print(f"starting {count} processes on {platform.name} (the launcher's own line may speak of another device)")
    if not platform.uses_xla:       # for a TPU the worker is pickled, and the launcher answers nobody
        worker.wait_for_all(count)
    notebook_launcher(worker, args=args, num_processes=count, use_port=str(_free_port()))


def run_child(worker, args: tuple) -> None:
    """Run `worker(*args)` in one forked process and wait. Raises RuntimeError with its exit code when it fails."""
    child = multiprocessing.get_context("fork").Process(target=worker, args=args)
    child.start()
    child.join()
    if child.exitcode:
        raise RuntimeError(f"the worker ended with exit code {child.exitcode}")


def _refuse_spoiled_parent(platform: Platform) -> None:
    """Forked workers cannot use a device, or a process group, that this process has already opened."""
    touched = None
    if "accelerate.state" in sys.modules and sys.modules["accelerate.state"].is_initialized():
        touched = "an Accelerator was created in this process"
    elif platform.name == "gpu" and "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        touched = "CUDA was used in this process"
    elif platform.name == "gpu" and "bitsandbytes" in sys.modules:
        touched = "bitsandbytes, which opens CUDA, was imported in this process"
    if touched:
        raise UserError(f"The launch cannot start its processes because {touched} before it: restart the kernel and run"
                        " the cells from the top, with nothing that touches a device before the launch cell.")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class _Guarded:
    """Calls the worker; writes its traceback to a file of its own, because a launcher only reports that a child died."""

    def __init__(self, worker, folder: Path):
        self.worker, self.folder, self.parent = worker, folder, os.getpid()
        self.arrived, self.count = None, 0
        self.__qualname__ = self.__name__ = getattr(worker, "__name__", "worker")

    def wait_for_all(self, count: int) -> None:
        """Let no process of the coming launch begin before all `count` are forked.

        The launcher answers the first process that connects in a thread, and that thread holds a lock of the C library
        while it looks up the caller's name. A process forked in that moment has the lock held for ever, and waits for it.
        """
        self.arrived, self.count = multiprocessing.get_context("fork").Value("i", 0), count

    def __call__(self, *args):
        if os.getpid() != self.parent and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)   # a launcher's handler, inherited, would report its own stop
        try:
            if self.arrived is not None:
                self._meet_the_others()
            return self.worker(*args)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._record(error)
            if os.getpid() == self.parent:
                raise
            raise SystemExit(1) from None       # the reason is on file; a second traceback would only bury it

    def _meet_the_others(self) -> None:
        with self.arrived.get_lock():
            self.arrived.value += 1
        while self.arrived.value < self.count:      # one that died on its way is the launcher's to see, and to end us all
            time.sleep(0.01)

    def _record(self, error: BaseException) -> None:
        thread = threading.current_thread().name        # "rank 3": in a rehearsal the ranks are threads
        rank = thread.removeprefix("rank ") if thread.startswith("rank ") else outer_launch()[1]
        kind, text = "user", str(error)
        if not isinstance(error, UserError):
            kind, text = "error", f"{traceback.format_exc()}(rank {rank}, peak memory {peak_host_gib():.2f} GiB)\n"
        (self.folder / f"failure_{time.time_ns()}_rank{rank}_{kind}.txt").write_text(text)


def _explain_failure(error: BaseException, folder: Path, log_folder: str | Path | None) -> UserError:
    """The first failing rank's own words, or the launcher's of a worker that vanished, and the doctor's answer."""
    failures = sorted(folder.glob("failure_*.txt"))     # named by time: the first failure caused the others
    if failures and failures[0].stem.endswith("user"):
        _keep_failures(failures, log_folder)
        return UserError(failures[0].read_text())
    launcher = "".join(traceback.format_exception(error))
    own = failures[0].read_text() if failures else ""
    kept = _keep_failures(failures, log_folder)
    answer = _answer(own, launcher, kept and kept / failures[0].name)
    silent = f"no worker told a Python error: it was ended by the system, or never started. Its launcher:\n{error}\n"
    return WorkerFailed(f"a worker failed:\n{own or silent}{answer}")


def _answer(own: str, launcher: str, log: Path | None) -> str:
    """The doctor's box; without it where a notebook does not bring the doctor."""
    if importlib.util.find_spec("doctor") is None:
        return f"full log: {log}" if log else ""
    import doctor
    return doctor.box(doctor.diagnose(own, launcher), log)


def _keep_failures(failures: list, log_folder: str | Path | None) -> Path | None:
    """Copy what the ranks said to where it stays; None when there is nothing, or no place that can be written."""
    if not failures:
        return None
    with contextlib.suppress(OSError):
        kept = Path(log_folder or tempfile.mkdtemp(prefix="failures-"))
        kept.mkdir(parents=True, exist_ok=True)
        for old in kept.glob("failure_*.txt"):
            old.unlink()
        for path in failures:
            shutil.copy(path, kept)
        return kept


def _end_stragglers(folder: Path, before: set, finished: threading.Event, grace: float = 10.0) -> None:
    """Once a rank has failed, the others wait for it in their next reduction, for ever: end them after `grace` seconds."""
    while not finished.wait(1.0):
        if any(folder.glob("failure_*.txt")) and not finished.wait(grace):
            return _end_children(before)


def _end_children(before: set) -> None:
    """End what this launch started and left: an orphan would keep the device busy for the next launch."""
    left = [child for child in multiprocessing.active_children() if child not in before]
    for stop in ("terminate", "kill"):
        for child in left:
            if child.is_alive():
                getattr(child, stop)()
        for child in left:
            child.join(timeout=5)


def peak_host_gib() -> float:
    """The largest resident memory of this process so far, in GiB (Linux counts ru_maxrss in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 20


# ---- inside a worker ------------------------------------------------------------------------------------------------------

def xla_operation(name: str, module: bytes):
    """A serialized HLO module as a function on XLA tensors: (*tensors) -> list of tensors. One operation of the program.

    torch_xla's public way to do this imports packages that no image has; the two functions here are what it calls.
    """
    import torch_xla
    computation = torch_xla._XLAC._xla_op_computation_from_module_proto(name, module)
    return lambda *tensors: torch_xla._XLAC._xla_user_computation(f"xla::{name}", list(tensors), computation)


def seconds_since_session_start() -> float:
    """The age of this machine's first process: a session's clock starts before its notebook does. 0 where unknown."""
    try:
        ticks = int(Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


class Runtime:
    """Device, rank, precision, sync and reductions of one worker. Create it first thing inside the worker.

    precision: 'auto', 'fp32', 'bf16' or 'fp16'. bf16 and fp16 are autocast: parameters, gradients and optimizer state
    stay fp32. Accelerate's own mixed_precision='bf16' is not used: on a TPU it stores the master weights as bf16.
    processes: the number of workers asked for, 0 for unknown. Raises RuntimeError when the world has another size, since
    N workers that never met would each train alone and believe to be the main one.
    """

    def __init__(self, precision: str = "auto", processes: int = 0):
        import torch
        from accelerate import Accelerator
        self.accelerator = Accelerator(mixed_precision="no")
        self.device = self.accelerator.device
        self.rank, self.world_size = self.accelerator.process_index, self.accelerator.num_processes
        self.is_main = self.accelerator.is_main_process
        self.is_xla = self.device.type == "xla"
        if processes and processes != self.world_size:
            raise RuntimeError(f"asked for {processes} processes, but this worker sees a world of {self.world_size}")
        poison = [name for name in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16") if name in os.environ]
        if poison:
            raise UserError(f"{' and '.join(poison)} would store master weights and optimizer state as bfloat16: remove"
                            " it and restart the kernel (patch_environment does both before torch is loaded).")
        if not self.is_xla:
            torch.set_num_threads(max(1, available_cores() // self.world_size))
        self.precision = choose_precision(precision, self.device)
        self.compute_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]
        # fp16 alone needs its gradients scaled; switched off, every call passes its argument through.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")

    def print(self, *words) -> None:
        """Print on the main process only. Never call a reduction inside its arguments."""
        if self.is_main:
            print(*words, flush=True)

    def autocast(self):
        """Matrix work in the compute dtype over fp32 weights, for the forward pass."""
        import torch
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def place(self, model):
        """The model on this rank's device. Weights that are one tensor under several names stay one.

        A move to XLA makes a new parameter for each name: a tied head would train on its own from then on, silently.
        """
        names, kept = {}, []
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
            kept.append(parameter)      # its id must not be given to another
        model.to(self.device)
        for first, *others in names.values():
            for name in others:
                module, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(module), attribute, model.get_parameter(first))
        if len(list(model.parameters())) != len(names):
            raise RuntimeError(f"{len(names)} weights became {len(list(model.parameters()))} on the device: some that were"
                               " tied no longer are")
        return model

    def seed(self, *numbers: int) -> None:
        """Set the random state as a function of the numbers alone: no generator state needs saving."""
        import torch
        value = mix_seed(*numbers)
        torch.manual_seed(value)
        if self.is_xla:
            import torch_xla
            torch_xla.manual_seed(value)

    def sync(self) -> None:
        """End the traced program and hand it to the device. Only the training loop and `host_values` call this."""
        if self.is_xla:
            import torch_xla
            torch_xla.sync()

    def all_reduce(self, tensor, op: str = "mean"):
        """The same shape, reduced over all ranks ('mean', 'sum', 'max', 'min'); every rank must call it.

        Out of place: on torch_xla 2.8 and 2.9 an in-place reduction of an accumulated gradient is lost when it is
        scaled afterwards, and the replicas drift apart.
        """
        if self.world_size == 1:
            return tensor
        if self.is_xla:
            import torch_xla.core.xla_model as xm
            return xm.all_reduce("sum" if op == "mean" else op, tensor,
                                 scale=1.0 / self.world_size if op == "mean" else 1.0)
        import torch.distributed as dist
        result = tensor.clone()
        dist.all_reduce(result, {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM,
                                 "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op])
        return result / self.world_size if op == "mean" else result

    def number(self, value: float):
        """A tensor (1,) with this value. Not 0-d: there XLA makes a 0 or a 1 part of the program, another one each time."""
        import torch
        return torch.tensor([float(value)]).to(self.device)

    def host_values(self, tensor) -> list:
        """Read a small tensor on the host. Ends the program, so only at log steps, and on all ranks alike."""
        self.sync()
        return tensor.cpu().tolist()

    def barrier(self) -> None:
        self.accelerator.wait_for_everyone()

    def optimizer_step(self, optimizer, max_norm: float):
        """Average the gradients over the ranks, clip, step once, clear. Returns the norm before clipping, a 0-d tensor.

        All gradients travel as one flat buffer: one reduction per optimizer step, however many micro-steps came before,
        and the norm is that of the averaged gradient, equal on every rank.
        """
        import torch
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        flat, share = self.all_reduce(torch.cat([p.grad.reshape(-1) for p in parameters]), "sum"), 1 / self.world_size
        if self.scaler.is_enabled():
            _set_gradients(parameters, flat)
            self.scaler.unscale_(optimizer)     # in place, through the views of `flat`
        norm = flat.norm() * share
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0) * share      # of mean and clip at once: one pass less
        if hasattr(optimizer, "step_flat"):
            optimizer.step_flat(flat, scale)
        else:
            _set_gradients(parameters, flat * scale)
            self.scaler.step(optimizer)         # skipped when fp16 overflowed, on all ranks alike: flat is shared
            self.scaler.update()
        clear_gradients(parameters)
        return norm

    def start_trace(self, folder: str | Path) -> None:
        """Record what host and device do until `stop_trace`, which writes it to the folder. One rank may do it alone."""
        if self.is_xla:
            import torch_xla.debug.profiler
            return torch_xla.debug.profiler.start_trace(folder)
        from torch.profiler import profile, tensorboard_trace_handler
        self.trace = profile(on_trace_ready=tensorboard_trace_handler(str(folder)), record_shapes=True)
        self.trace.start()

    def stop_trace(self) -> None:
        """Wait for the device, then write the trace that `start_trace` began."""
        if not self.is_xla:
            return self.trace.stop()
        import torch_xla.core.xla_model as xm
        import torch_xla.debug.profiler
        xm.wait_device_ops()
        torch_xla.debug.profiler.stop_trace()

    def check_replicas(self, named_tensors: dict, when: str) -> None:
        """Raise RuntimeError unless every rank holds the same values. All ranks must call it.

        Compares sum and sum of squares of each tensor: the same program on the same bits gives the same bits.
        """
        import torch
        sums = torch.stack([torch.stack((t.float().sum(), t.float().square().sum())) for t in named_tensors.values()])
        sums = torch.nan_to_num(sums)
        spread = self.all_reduce(sums, "max") - self.all_reduce(sums, "min")
        apart = [name for name, row in zip(named_tensors, self.host_values(spread)) if any(row)]
        if apart:
            raise RuntimeError(f"{when}: the replicas hold different weights in {len(apart)} of {len(named_tensors)}"
                               f" tensors ({', '.join(apart[:3])}): what they train is not one model")

    def compile_count(self) -> int:
        """Programs compiled so far by XLA; 0 elsewhere."""
        if not self.is_xla:
            return 0
        import torch_xla.debug.metrics as metrics
        data = metrics.metric_data("CompileTime")
        return data[0] if data else 0

    def usage(self) -> dict:
        """Counters of this process since its start, for a log: peak memory in GiB, compilations, transfers (XLA)."""
        found = dict(host_gib=round(peak_host_gib(), 3), compiles=self.compile_count())
        device = self.peak_memory_gib()
        found |= {} if device is None else dict(device_gib=round(device, 3))
        if self.is_xla:
            import torch_xla.debug.metrics as metrics
            counted = {name: (metrics.metric_data(name) or (0, 0.0))[:2]
                       for name in ("CompileTime", "TransferToDeviceTime", "TransferFromDeviceTime")}
            found |= dict(compile_seconds=round(counted["CompileTime"][1] / 1e9, 3),
                          to_device=counted["TransferToDeviceTime"][0], from_device=counted["TransferFromDeviceTime"][0])
        return found

    def pending_program(self, tensor) -> str:
        """The traced program behind a tensor that was not yet synced, as HLO text; empty elsewhere. Slow: not every step."""
        if not self.is_xla:
            return ""
        import torch_xla
        return torch_xla._XLAC._get_xla_tensors_hlo([tensor])

    def name_source_lines(self, wanted: bool) -> None:
        """Whether operations traced from now on carry the Python line they come from, for `pending_program`. Slow."""
        if self.is_xla:
            import torch_xla
            torch_xla._XLAC._set_ir_debug(wanted)

    def device_kind(self) -> str:
        """A name that `telemetry.peak_flops` may know: 'v5e', 'Tesla T4', ...; 'cpu' for XLA's CPU backend too."""
        import torch
        if self.is_xla and os.environ.get("PJRT_DEVICE") == "TPU":
            return tpu_kind(os.environ.get("TPU_ACCELERATOR_TYPE", "unknown TPU"))
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def peak_memory_gib(self) -> float | None:
        """Peak device memory where the device tells, in GiB; None elsewhere."""
        import torch
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2 ** 30
        if self.is_xla and os.environ.get("PJRT_DEVICE") == "TPU":
            import torch_xla.core.xla_model as xm
            info = xm.get_memory_info(self.device)
            return info.get("peak_bytes_used", info["bytes_used"]) / 2 ** 30
        return None

    def checkpoint_function(self):
        """Recompute-in-backward for this device: torch's own saves nothing on XLA, XLA's own needs its barriers."""
        import functools
        if self.is_xla:
            import torch_xla.utils.checkpoint
            return torch_xla.utils.checkpoint.checkpoint
        import torch.utils.checkpoint
        return functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)


class Mesh:
    """All devices of one process as a single one (torch_xla's SPMD): `shard` says how a tensor is divided over them.

    XLA's partitioner adds the communication; what is not marked is on every device. Make it before anything is on a
    device. With `wanted` False it is one device, and marks nothing.
    """

    def __init__(self, wanted: bool):
        self.devices, self.mesh = 1, None
        if wanted:
            import numpy as np
            import torch_xla.distributed.spmd as spmd
            import torch_xla.runtime as xr
            xr.use_spmd()
            self.devices = xr.global_runtime_device_count()
            self.mesh = spmd.Mesh(np.arange(self.devices), (self.devices,), ("fsdp",))

    def shard(self, tensor, dimension: int | None = 0):
        """The same tensor, divided along `dimension`, whose size the devices must share equally.

        None: whole on every device, as it would be anyway; but said so, as XLA says it of what a step gives back.
        Otherwise step two would get other tensors than step one, and be compiled anew.
        """
        if self.mesh:
            import torch_xla.distributed.spmd as spmd
            spmd.mark_sharding(tensor, self.mesh, tuple("fsdp" if d == dimension else None for d in range(tensor.dim())))
        return tensor

    def shard_outputs(self, modules) -> None:
        """Keep what these modules give back, and its gradient, divided along the batch.

        Left to itself, the partitioner gathers activations of the whole batch on each device, not the weights of one layer.
        """
        if self.mesh:
            for module in modules:
                module.register_forward_hook(self._along_the_batch)

    def _along_the_batch(self, module, inputs, output):
        from torch_xla.distributed.spmd.xla_sharding import MarkShardingFunction
        return MarkShardingFunction.apply(output, self.mesh, ("fsdp",) + (None,) * (output.dim() - 1))

    def shard_weights(self, parameters) -> None:
        """Divide each matrix along its longest dimension that the devices share equally; what has none stays whole."""
        for parameter in parameters:
            sizes = [size if size % self.devices == 0 else 0 for size in parameter.shape]
            if parameter.dim() > 1 and any(sizes):
                self.shard(parameter, sizes.index(max(sizes)))


class XlaLoop:
    """A micro-step, lowered once, in a While of XLA's. torch_xla's own `scan` would do it for functions that AOTAutograd
    can trace; ours holds kernels of JAX. The parts of torch_xla that `scan` is made of are used here the same way."""

    def __init__(self, loss_of, parameters: list, batches: tuple, shapes: list):
        import torch_xla
        import torch_xla.core.xla_builder as xb
        self.xla, self.shapes, self.parameters = torch_xla._XLAC, shapes, parameters
        stand_ins = [xb.create_placeholder_tensor(batch.shape[1:], batch.dtype) for batch in batches]
        loss = loss_of(*stand_ins)
        clear_gradients(self.parameters)
        loss.backward()     # not autograd.grad, which torch_xla's checkpointing refuses
        outputs = [loss.detach().view(1), *(parameter.grad for parameter in self.parameters)]
        clear_gradients(self.parameters)
        context = self.xla.lowering.LoweringContext("MicroStep")
        context.build(outputs)
        step = xb.computation_from_module_proto("micro_step", context.hlo())
        self.operations = operations_of(xb.get_computation_hlo(step))
        # What the lowered micro-step takes: {number: tensor}, and which of these is what.
        taken = context.device_parameter_id_tensor_mapping()
        places = {context.tensor_parameter_id(tensor): ("batch", n) for n, tensor in enumerate(stand_ins)}
        places |= {context.tensor_parameter_id(tensor): ("parameter", n) for n, tensor in enumerate(self.parameters)}
        if missing := len(self.parameters) - sum(kind == "parameter" for kind, _ in places.values()):
            raise UserError(f"{missing} of {len(self.parameters)} parameters were overwritten while the micro-step was"
                               " traced, or are one tensor under two names: it must leave them alone. (torch_xla's"
                               " checkpointing overwrites those of a module whose method it is given; give it the module.)")
        seed = self.number_of_the_seed(context, outputs)
        self.has_seed = seed is not None
        self.others = [tensor.to("xla") for number, tensor in sorted(taken.items())     # constants, as tensors
                       if number not in places and number != seed]
        others = iter(range(len(self.others)))
        arguments = [places.get(number) or (("seed", 0) if number == seed else ("other", next(others)))
                     for number in range(len(taken))]
        self.loop = self.build(xb, step, arguments, batches, outputs)

    def equals(self, other) -> bool:
        """Numbers of Python that are neither 0 nor 1 are no part of the program: torch_xla sends them as tensors."""
        import torch
        return self.operations == other.operations and all(
            torch.equal(a.cpu(), b.cpu()) for a, b in zip(self.others, other.others, strict=True))

    def number_of_the_seed(self, context, outputs: list):
        numbers, tensors = self.xla._get_tensors_xla_device_data_node(outputs)
        seed = self.xla._get_seed_info_id()
        return context.tensor_parameter_id(tensors[numbers.index(seed)]) if seed in numbers else None

    def build(self, xb, step, arguments: list, batches: tuple, outputs: list):
        """The computation (batches, parameters, seeds, others) -> (loss, gradients)."""
        import torch
        builder = xb.create_builder("micro_steps")
        seeds = [torch.zeros(len(batches[0]), dtype=torch.int64).to("xla")] if self.has_seed else []    # for their shape
        kinds = dict(batch=batches, parameter=self.parameters, seed=seeds, other=self.others)
        inputs, places = [], {}
        for kind, tensors in kinds.items():
            for n, tensor in enumerate(tensors):
                places[kind, n] = len(inputs)
                inputs.append(xb.mkparam(builder, len(inputs), xb.tensor_shape(tensor)))
        zeros = [xb.Op.scalar(builder, 0, dtype=xb.Op.from_torch_type(output.dtype)).broadcast(list(output.shape))
                 for output in outputs]
        count, sums = len(batches[0]), len(outputs)

        def goes_on(turn, *_):
            return turn < xb.Op.scalar(turn.builder(), count, dtype=xb.Type.S32)

        def body(turn, *rest):
            totals, given = rest[:sums], rest[sums:]
            values = [turn_of(given[places[key]], turn) if key[0] in ("batch", "seed") else given[places[key]]
                      for key in arguments]
            result = xb.Op.call(step, values)
            totals = [total + result.get_tuple_element(n) for n, total in enumerate(totals)]
            return xb.Op.tuple([turn + xb.Op.scalar(turn.builder(), 1, dtype=xb.Type.S32), *totals, *given])

        first = xb.Op.scalar(builder, 0, dtype=xb.Type.S32)
        looped = xb.Op.mkwhile([first, *zeros, *inputs], goes_on, body)
        return xb.Op.tuple([looped.get_tuple_element(1 + n) for n in range(sums)]).build("micro_steps")

    def seeds(self, count: int):
        """A seed a micro-step, from the host's random state: `runtime.seed` makes it a function of step and rank."""
        import torch
        return torch.randint(0, 2 ** 62, (count,), dtype=torch.int64).to("xla")

    def run(self, batches: tuple) -> list:
        seeds = [self.seeds(len(batches[0]))] if self.has_seed else []
        return self.xla._xla_user_computation("xla::micro_steps", [*batches, *self.parameters, *seeds, *self.others], self.loop)


def operations_of(text: str) -> list:
    """The operations of a program with their shapes and constants, sorted; without names, which count on from trace to trace.

    And without transposes: after a weight's first update torch_xla no longer sees that forward and backward pass want the same.
    """
    lines = (re.sub(r", metadata=\{[^}]*\}", "", line) for line in text.splitlines()[1:] if " transpose(" not in line)
    return sorted(re.sub(r"([A-Za-z%][\w%-]*)\.\d+", r"\1", line).strip() for line in lines)


def turn_of(values, turn):
    """values[turn] of an operation of XLA's."""
    sizes = values.shape().sizes
    rest = [turn.zeros_like() for _ in sizes[1:]]
    return values.dynamic_slice([turn, *rest], [1, *sizes[1:]]).reshape(list(sizes[1:]))


def clear_gradients(parameters: list) -> None:
    for parameter in parameters:
        parameter.grad = None


def _set_gradients(parameters: list, flat) -> None:
    for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
        parameter.grad = piece.view_as(parameter)


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tpu_kind(accelerator_type: str) -> str:
    """'v5litepod-8' and 'v5e-1' are 'v5e', 'v6e-1' is 'v6e'; anything else is returned as it is, without its count."""
    kind = accelerator_type.split("-")[0]
    return "v5e" if kind == "v5litepod" else kind


def choose_precision(wanted: str, device, capability: tuple | None = None) -> str:
    """'fp32', 'bf16' or 'fp16'. By compute capability, not by torch's support query: that counts emulation as support."""
    import torch
    if wanted not in ("auto", "fp32", "bf16", "fp16"):
        raise UserError(f"precision={wanted!r} is not known: use 'auto', 'fp32', 'bf16' or 'fp16'.")
    if device.type == "xla" and wanted == "fp16":
        raise UserError("precision='fp16' does not suit a TPU: use 'auto' or 'bf16'.")
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if (capability or torch.cuda.get_device_capability(device)) >= (8, 0) else "fp16"
    return "bf16" if device.type == "xla" else "fp32"


def mix_seed(*numbers: int) -> int:
    """A 62-bit seed that differs for every tuple of integers. Raises nothing; order matters."""
    digest = hashlib.sha256(",".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2


def run_main(main) -> None:
    """Run a script's main function: a user's mistake ends with one line on stderr and exit status 2."""
    try:
        main()
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
