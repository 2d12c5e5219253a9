"""Every answer of the doctor meets the real error: raised by the real library wherever that can be done without an
accelerator, else its words are looked up in the library's own file. What it does not know, it shows whole.
"""
import concurrent.futures
import importlib.metadata
import json
import mmap
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
from conftest import ROOT, clean_environment, run_script

import doctor
import runtime as rt

CPU = rt.Platform("cpu", 1, "test")


def text_of(provoke) -> str:
    """The traceback that provoke() ends with, as a worker's log would hold it."""
    try:
        provoke()
    except BaseException:
        return traceback.format_exc()
    raise AssertionError("nothing was raised")


def named(text: str) -> str | None:
    answer = doctor.diagnose(text)
    return answer and answer.name


# ---- raised here, by torch and its friends --------------------------------------------------------------------------

def two_devices():
    torch.ones(2, device="meta") + torch.ones(2)


def two_precisions():
    torch.nn.functional.linear(torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2))


def a_large_token():
    torch.nn.functional.embedding(torch.tensor([9]), torch.ones(2, 2))


def nan_in_backward():
    with torch.autograd.set_detect_anomaly(True):
        (torch.zeros(1, requires_grad=True).sqrt() * 0).backward()


def unscale_twice():
    scaler, weight = torch.amp.GradScaler("cpu"), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def too_much_memory():
    torch.empty(1 << 50)


def a_full_disk():
    with open("/dev/full", "w") as file:
        file.write("x" * 100_000)


def a_full_disk_under_torch():
    torch.save(torch.ones(1000), "/dev/full")


def a_numpy_number_in_a_checkpoint(path="number.pt"):
    import numpy as np
    torch.save({"best": np.float64(2.5)}, path)
    torch.load(path)


def names_of_a_wrapped_model():
    torch.nn.Linear(2, 2).load_state_dict({"module.weight": torch.ones(2, 2), "module.bias": torch.ones(2)})


def tied_tensors():
    from safetensors.torch import save_file
    weight = torch.ones(3)
    save_file({"embedding": weight, "head": weight}, "tied.safetensors")


def a_split_shorter_than_a_window():
    torch.randint(10 - 128, (4,))


def a_split_shorter_than_a_window_in_numpy():
    import numpy as np
    np.random.randint(10 - 128)


def a_separator_in_the_text():
    import tiktoken
    tiktoken.Encoding("b", pat_str=".", mergeable_ranks={bytes([i]): i for i in range(256)},
                      special_tokens={"<|endoftext|>": 256}).encode("a<|endoftext|>b")


def a_tokenizer_without_network():
    """A proxy that nobody listens at: what a session without Internet gives, on a machine that may have it."""
    import tiktoken.load
    tiktoken.load.read_file("https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe")


def a_busy_port():
    import socket

    import torch.distributed as dist
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        dist.TCPStore("127.0.0.1", taken.getsockname()[1], 1, True)


def a_rank_that_does_not_come():
    from datetime import timedelta

    import torch.distributed as dist
    dist.TCPStore("127.0.0.1", rt._free_port(), 2, True, timeout=timedelta(seconds=1))


def a_removed_variable():
    dict(os.environ, CLOUD_TPU_TASK_ID="0").pop("CLOUD_TPU_TASK_ID")
    os.environ.pop("CLOUD_TPU_TASK_ID")


def a_broken_pool():
    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        list(pool.map(os._exit, [9, 9]))


def an_old_symbol():
    import ctypes
    ctypes.CDLL(None).a_function_of_another_torch       # the dynamic loader's words, as for a whole library


def a_missing_package():
    import a_module_whose_cell_was_not_run      # noqa: F401


@pytest.mark.parametrize("provoke, name", [
    (two_devices, "devices-differ"), (two_precisions, "dtypes-differ"), (a_large_token, "token-too-large"),
    (nan_in_backward, "nan-in-backward"), (unscale_twice, "unscale-twice"), (too_much_memory, "host-memory"),
    (a_full_disk, "disk-full"), (a_full_disk_under_torch, "disk-full"),
    (a_numpy_number_in_a_checkpoint, "weights-only"),
    (names_of_a_wrapped_model, "names-differ"), (tied_tensors, "shared-tensors"),
    (a_split_shorter_than_a_window, "split-too-short"), (a_split_shorter_than_a_window_in_numpy, "split-too-short"),
    (a_separator_in_the_text, "special-token"), (a_tokenizer_without_network, "tokenizer-download"),
    (a_busy_port, "address-in-use"), (a_rank_that_does_not_come, "collective-timeout"),
    (a_removed_variable, "tpu-task-id"),
    (a_broken_pool, "pool-broken"), (an_old_symbol, "symbols"), (a_missing_package, "missing-package")])
@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
def test_an_error_that_can_be_raised_here_is_answered(provoke, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("CLOUD_TPU_TASK_ID", raising=False)
    assert named(text_of(provoke)) == name


# ---- raised by torch_xla, Accelerate and the launchers, in processes of their own -----------------------------------

TELL = """
import json, traceback
def tell(name, provoke):
    try:
        provoke()
        text = "nothing was raised"
    except BaseException:
        text = traceback.format_exc()
    print("TOLD", json.dumps([name, text]), flush=True)
"""

ON_XLA = """
import runtime as rt
rt.patch_environment("xla-cpu")
import torch, torch_xla
from accelerate import Accelerator, notebook_launcher
from safetensors.torch import save_file
import torch.utils.checkpoint as torchs, torch_xla.utils.checkpoint as xlas
import torch_xla.core.xla_model as xm, torch_xla.distributed.xla_multiprocessing as xmp

device = torch_xla.device()
layer = torch.nn.Linear(2, 2).to(device)
x = torch.ones(2, 2).to(device).requires_grad_()
def without_the_import():
    del globals()["torch_xla"]
    torch_xla.sync()

tell("devices-differ", lambda: layer(torch.ones(2, 2)))
tell("device-before-launch", lambda: xmp.spawn(print))
tell("nprocs", lambda: xmp.spawn(print, nprocs=8))
tell("removed-function", xm.xrt_world_size if hasattr(xm, "xrt_world_size") else lambda: xm.xrt_world_size())
tell("xla-storage", lambda: save_file({"x": torch.ones(3).to(device)}, "x.safetensors"))
tell("xla-to-numpy", lambda: torch.ones(3).to(device).numpy())
tell("xla-checkpointing", lambda: xlas.checkpoint(layer, x, use_reentrant=False))
tell("xla-checkpointing", lambda: torchs.checkpoint(layer, x, use_reentrant=False).sum().backward())
accelerator = Accelerator()
tell("device-before-launch", lambda: notebook_launcher(print, num_processes=2))
tell("state-already-set", lambda: Accelerator(mixed_precision="bf16"))
from torch.utils.data import DataLoader, TensorDataset
loader = accelerator.prepare(DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2))
tell("save-state", lambda: accelerator.save_state("state"))
tell("alias", without_the_import)
"""

NO_DEVICE = """
import torch_xla
tell("{name}", torch_xla.device)
"""

# Kaggle's variables on a machine without the chips, and a device that torch_xla does not know.
KAGGLE = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
          "TPU_HOST_BOUNDS": "1,1,1", "TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}

# torch_xla's own function, with a server of ours that answers 404 where Google's metadata server would stand.
NO_METADATA = """
import http.server, threading
from torch_xla._internal import tpu
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
server.RequestHandlerClass.do_GET = lambda self: self.send_error(404)
threading.Thread(target=server.serve_forever, daemon=True).start()
tpu._GCE_METADATA_ROOT_URL = f"http://127.0.0.1:{server.server_port}"
tell("tpu-metadata", tpu.version)
"""

# The real TPU compiler, asked for 20 GiB on a chip of 16.
TOO_LARGE_FOR_A_CHIP = """
import os
import preflight
os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_WORKER_ID="0", TPU_WORKER_HOSTNAMES="localhost",
                  TPU_ACCELERATOR_TYPE="v5litepod-8", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
chip = topologies.get_topology_desc("v5e:2x4", platform="tpu").devices[0]
half = jax.ShapeDtypeStruct((40960, 65536), jnp.float32, sharding=SingleDeviceSharding(chip))
tell("tpu-memory", lambda: jax.jit(lambda x, y: (x + y, x * y)).lower(half, half).compile())
"""

AFTER_A_BACKWARD = """
import runtime as rt, torch
platform = rt.patch_environment("virtual-tpu")
def backward():
    runtime = rt.Runtime("fp32")
    torch.ones(3).to(runtime.device).requires_grad_().sum().backward()
    runtime.sync()
def one_rank_alone():
    runtime = rt.Runtime("fp32")
    loss = torch.tensor([runtime.rank + 2.0]).to(runtime.device)
    if runtime.rank == 0:
        runtime.host_values(runtime.all_reduce(loss))
    runtime.barrier()
tell("left-common-path", lambda: rt.launch(one_rank_alone, (), platform))
torch.ones(3, requires_grad=True).sum().backward()
tell("fork-autograd", lambda: rt.launch(backward, (), platform))
"""


@pytest.mark.parametrize("code, environment", [
    (ON_XLA, {}), (NO_DEVICE.format(name="tpu-not-found"), dict(KAGGLE, PJRT_DEVICE="TPU")),
    (NO_DEVICE.format(name="pjrt-unknown"), {"PJRT_DEVICE": "CUDA"}), (NO_METADATA, {}), (TOO_LARGE_FOR_A_CHIP, {}),
    (AFTER_A_BACKWARD, {"VIRTUAL_TPU_DEVICES": "2", "VIRTUAL_TPU_PATIENCE": "20"})],
    ids=["on-xla", "no-tpu", "unknown-device", "no-metadata", "too-large", "virtual-tpu"])
def test_an_error_of_torch_xla_accelerate_or_the_tpu_compiler_is_answered(tmp_path, code, environment):
    output = run_script(TELL + code, tmp_path, **environment).stdout
    told = [json.loads(line[5:]) for line in output.splitlines() if line.startswith("TOLD ")]
    assert told, output
    assert [(name, named(text)) for name, text in told] == [(name, name) for name, text in told], output


# ---- errors that need an accelerator or another package: their words, in the library's own file ---------------------

def file_of(package: str, end: str) -> Path:
    return next(Path(importlib.metadata.distribution(package).locate_file(file))
                for file in importlib.metadata.files(package) if str(file).endswith(end))


@pytest.mark.parametrize("name, package, file", [
    ("tpu-addresses", "libtpu", "libtpu.so"), ("tpu-busy", "libtpu", "libtpu.so"),
    ("kernels-refused", "libtpu", "libtpu.so"),
    ("gpu-memory", "torch", "lib/libc10_cuda.so"), ("cuda-before-fork", "torch", "torch/cuda/__init__.py"),
    ("cuda-before-fork", "accelerate", "accelerate/launchers.py"), ("dataset-script", "datasets", "datasets/load.py")])
def test_words_that_cannot_be_provoked_here_are_those_in_the_librarys_own_file(name, package, file):
    """Not raised: they need a TPU or a GPU. The longest literal piece of a message must be in the file that says it."""
    answer = next(answer for answer in doctor.ANSWERS if answer.name == name)
    with file_of(package, file).open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        pieces = [max(message.split(" ... "), key=len).split("`")[0].strip().encode() for message in answer.messages]
        assert any(content.find(piece) >= 0 for piece in pieces), pieces


# Recorded words of libraries and systems that are not on this machine: a newer libtpu with torch_xla 2.8 (Kaggle's own
# image notes), CUDA's error string, Linux on a read-only mount. Not raised here.
@pytest.mark.parametrize("words, name", [
    ("RuntimeError: Unexpected PJRT_Plugin_Attributes_Args size: expected 32, got 24.", "libtpu-mismatch"),
    ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "kernel-image"),
    (f"OSError: [Errno 30] {os.strerror(30)}: '/kaggle/input/x/log.jsonl'", "read-only")])
def test_recorded_words_are_answered(words, name):
    assert named(f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n{words}\n') == name


def test_every_answer_is_provoked_or_looked_up_in_this_file():
    own = Path(__file__).read_text()
    missing = [answer.name for answer in doctor.ANSWERS if f'"{answer.name}"' not in own]
    assert not missing and len({answer.name for answer in doctor.ANSWERS}) == len(doctor.ANSWERS)


# ---- from a worker to the box ---------------------------------------------------------------------------------------

def drift():
    runtime = rt.Runtime("fp32", 2)
    runtime.check_replicas({"w": torch.ones(2) + runtime.rank}, "at step 7")


def one_rank_alone():
    """Two seconds instead of the ten minutes that a group waits by itself."""
    from datetime import timedelta
    runtime = rt.Runtime("fp32", 2)
    group = torch.distributed.new_group(timeout=timedelta(seconds=2))
    if runtime.rank == 0:
        torch.distributed.all_reduce(torch.ones(1), group=group)
    time.sleep(30)


def end_by(number: int, rank: int, then=lambda: time.sleep(60)):
    runtime = rt.Runtime("fp32")
    if runtime.rank == rank:
        import faulthandler
        faulthandler.disable()      # pytest's own handler would print a page
        os.kill(os.getpid(), number)
    then()


@pytest.mark.parametrize("worker, args, processes, name, says", [
    (a_large_token, (), 1, "token-too-large", "IndexError: index out of range in self"),
    (drift, (), 2, "replicas-differ", "at step 7: the replicas hold different weights in 1 of 1 tensors"),
    (one_rank_alone, (), 2, "collective-timeout", "Timed out waiting"),
    (end_by, (signal.SIGKILL, 0), 1, "killed", "exit code -9"), (end_by, (signal.SIGKILL, 1), 2, "killed", ""),
    (end_by, (signal.SIGSEGV, 0), 1, "crash-in-fork", "exit code -11"),
    (end_by, (signal.SIGABRT, 0), 1, "aborted", "exit code -6"),
    (end_by, (signal.SIGBUS, 0), 1, "bus-error", "exit code -7")])
def test_a_workers_failure_ends_in_one_box(tmp_path, worker, args, processes, name, says):
    with pytest.raises(rt.WorkerFailed) as caught:
        rt.launch(worker, args, CPU, processes, tmp_path / "failures")
    text = str(caught.value)
    answer = next(answer for answer in doctor.ANSWERS if answer.name == name)
    shown = " ".join(re.sub("[│┌┐└┘─]", " ", text).split())
    assert says in text and text.count("┌") == 1 and text.rstrip().endswith("┘")
    assert answer.happened in shown and answer.cause in shown and answer.do in shown
    assert len({len(line) for line in text[text.index("┌"):].splitlines()}) == 1, "the frame is not straight"
    logs = list((tmp_path / "failures").glob("failure_*.txt"))
    assert bool(logs) == ("Full log" in text) and all(str(log) in shown for log in logs[:1] if len(logs) == 1)


def test_two_worlds_are_answered_too(tmp_path, monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    with pytest.raises(rt.WorkerFailed) as caught:
        rt.launch(lambda: rt.Runtime("fp32", 2), (), CPU, 2, tmp_path)
    assert named(str(caught.value)) == "worlds-apart"


def test_a_rank_that_lost_its_peer_is_not_taken_for_the_cause(tmp_path):
    """Which of the two the launcher sees first is chance."""
    with pytest.raises(rt.WorkerFailed) as caught:
        rt.launch(end_by, (signal.SIGKILL, 1, torch.distributed.barrier), CPU, 2, tmp_path)
    assert "Another rank ended" in str(caught.value) or "The system ended a worker" in str(caught.value)
    lost = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n' \
        "RuntimeError: [pair.cc:538] Read error [127.0.0.1]:2: Connection reset by peer\n"
    assert doctor.diagnose(lost, "Signal 9 (SIGKILL) received by PID 12").name == "killed"
    assert doctor.diagnose(lost, "exitcode: 1").name == "other-rank-gone"
    own = text_of(a_large_token)
    assert doctor.diagnose(own, "Signal 9 (SIGKILL) received by PID 12").name == "token-too-large"


# ---- what is not known ----------------------------------------------------------------------------------------------

def something_new():
    # This line quotes a known error and must not be taken for it: CUDA out of memory
    raise RuntimeError("a message that nobody has seen")      # No space left on device


def test_an_unknown_error_is_shown_whole_and_not_guessed_at(tmp_path):
    assert named(text_of(something_new)) is None
    with pytest.raises(rt.WorkerFailed) as caught:
        rt.launch(something_new, (), CPU, 1, tmp_path)
    assert "RuntimeError: a message that nobody has seen" in str(caught.value) and "Not known here" in str(caught.value)


def test_an_error_that_was_handled_on_the_way_is_not_the_cause_but_a_named_cause_is():
    def handled():
        try:
            a_full_disk()
        except OSError:
            something_new()

    def wrapped():
        try:
            a_full_disk()
        except OSError as error:
            raise RuntimeError("the save failed") from error

    assert named(text_of(handled)) is None and named(text_of(wrapped)) == "disk-full"


# ---- the command line and the page ----------------------------------------------------------------------------------

def run_doctor(folder, *arguments, environment=None, given=""):
    return subprocess.run([sys.executable, ROOT / "py/doctor.py", *arguments], cwd=folder, text=True, input=given,
                          env=clean_environment(PYTHONPATH="", **(environment or {})), capture_output=True, timeout=120)


def test_an_errors_text_is_answered_on_the_command_line(tmp_path):
    (tmp_path / "error.txt").write_text(text_of(a_large_token))
    for done in (run_doctor(tmp_path, "error.txt"), run_doctor(tmp_path, "-", given=text_of(a_large_token))):
        assert done.returncode == 0 and "A token id is larger than the embedding table." in done.stdout
    missing = run_doctor(tmp_path, "nothing.txt")
    assert missing.returncode == 2 and missing.stderr.startswith("UserError: nothing.txt cannot be read")


def test_the_machine_is_looked_at_without_touching_it(tmp_path):
    done = run_doctor(tmp_path)
    assert done.returncode == 0 and "ready to train" in done.stdout, done.stdout
    verdicts = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ") and line[2] != " "]
    assert len(verdicts) == 10 and set(verdicts) <= {"ok", "note"}
    loaded = run_script("""
        import sys, doctor
        doctor.check_machine()
        print([name for name in ("torch", "torch_xla", "jax", "accelerate") if name in sys.modules])
        """, tmp_path)
    assert loaded.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("environment, words", [
    ({"ISTPUVM": "1"}, "no TPU chip is attached"),
    ({"ISTPUVM": "1", "TPU_PROCESS_ADDRESSES": "local"}, "TPU_PROCESS_ADDRESSES would spoil the run")])
def test_a_machine_that_is_not_ready_is_told_in_the_table(tmp_path, environment, words):
    done = run_doctor(tmp_path, environment=environment)
    assert done.returncode == 1 and "1 of 10 checks must be put right first" in done.stdout
    assert words in " ".join(done.stdout.split())


@pytest.mark.skipif(not os.access("/dev", os.W_OK), reason="a device file can only be made by root")
def test_who_holds_the_tpu_is_named(monkeypatch):
    """A file where a chip's device file would be, held open by a process of its own."""
    monkeypatch.setattr(rt, "count_tpu_chips", lambda: 8)
    device = Path("/dev/accel99")
    device.touch()
    try:
        code = "import sys, time; held = open(sys.argv[1]); print('held', flush=True); time.sleep(60)"
        holder = subprocess.Popen([sys.executable, "-c", code, device], stdout=subprocess.PIPE, text=True)
        holder.stdout.readline()
        checks = {check.name: check for check in doctor.check_machine(environ=dict(KAGGLE, TPU_PROCESS_ADDRESSES="local"))}
        assert f"held by process {holder.pid}" in checks["device free"].finding and checks["device free"].verdict == "BAD"
        assert checks["device"].finding.startswith("tpu: ") and checks["variables"].verdict == "note"
        holder.kill()
        holder.wait()
        assert doctor.check_holders(rt.Platform("tpu", 8, "test")).verdict == "ok"
    finally:
        device.unlink()


def test_packages_disk_and_time_that_do_not_suffice_are_told(tmp_path, monkeypatch):
    versions = {"torch": "2.9.0", "torch_xla": "2.8.0", "accelerate": "1.15.0", "libtpu": "0.0.52"}
    monkeypatch.setattr(rt, "installed_version", versions.get)
    tpu = rt.Platform("tpu", 8, "test")
    assert (doctor.check_packages(tpu).verdict, doctor.check_libtpu(tpu).verdict) == ("BAD", "note")
    monkeypatch.setattr(doctor, "GPT2_CHECKPOINTS_GB", 1e9)
    assert doctor.check_disk(tpu, tmp_path).verdict == "BAD"
    monkeypatch.setattr(rt, "seconds_since_session_start", lambda: 60 * 500)
    late = doctor.check_time(tmp_path)
    assert late.verdict == "note" and "about 40 of 540 minutes" in late.finding


def test_the_page_of_errors_is_the_doctors_own():
    assert (ROOT / "docs/errors.md").read_text() == doctor.page(), "run: python py/doctor.py --page > docs/errors.md"
