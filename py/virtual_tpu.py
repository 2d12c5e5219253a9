"""Eight virtual TPU devices on a CPU machine: rehearse a launch, and be told what would hang on the TPU.

    platform = patch_environment("virtual-tpu")         # before torch; VIRTUAL_TPU_DEVICES=2 for fewer of them
    launch(worker, (config,), platform)

The launcher's own TPU branch, torch_xla, the XLA programs and the collectives are real; only the devices are threads of
one process. `runtime.launch` calls `install`, and the worker stays as it is. It is a rehearsal: its speed says nothing.

How it works. Every sync becomes a meeting of all ranks:
- Between meetings one rank runs at a time, in the order of their numbers, with its own random state.
- XLA's CPU collectives find each other only inside one compiled program. So rank 0 compiles, and each next rank starts
  once the program of the one before is in torch_xla's cache. A rank does not wait for the one before to return: its
  program may well block until all are running.
- No rank leaves before every program has run: a rank that freed a tensor would wait for its own program while holding
  Python's lock, which the others need to start theirs.
- Each rank collects its garbage as it comes. Python's collector, which runs at any moment, would free it in the turn of
  another rank; a program holds every tensor that is alive, so equal ranks would bring different programs.

A rank that does not come, that has finished, or that brings another program than the rest raises `LeftCommonPath` in
all ranks: it names every party, its sync number and its source line.
"""
import atexit
import copy
import gc
import os
import random
import sys
import sysconfig
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from runtime import UserError

# Seconds that a rank may run between two syncs. A save or a preparation on one rank may need more.
PATIENCE_VARIABLE, PATIENCE = "VIRTUAL_TPU_PATIENCE", 30.0
HOST_READS = ("item", "tolist", "cpu", "__float__", "__int__", "__bool__")
COLLECTIVES = ("cross_replica_sum", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")     # in torch_xla's IR


class LeftCommonPath(UserError):
    """The ranks no longer do the same. On a TPU this is a hang, or two replicas that train different models."""


@dataclass
class Rank:
    number: int
    syncs: int = 0              # meetings it has come to, the one it waits in included
    line: str = "the start"     # the worker's own source line of its newest sync
    state: str = "running"      # running, waiting, finished, or what it raised
    thread: int = 0
    launched: bool = False      # its program of the present meeting has been handed over, or is in the cache
    returned: bool = False
    program: str = ""           # torch_xla's hash of that program; empty when there was nothing to run
    operations: dict = field(default_factory=dict)      # {operation: times traced since the last meeting}
    random_state: tuple = ()


class Conductor:
    """Lets one rank run at a time, brings all of them together at every sync, and says when that cannot be.

    All waiting happens on one condition. `stage` is 'run' (worker code, one rank at a time) or 'launch' (all have come,
    one after the other hands its program over); `turn` is the rank that may go on.
    """

    def __init__(self, count: int, patience: float, xlac):
        start = get_random_state()      # a forked process would start with its parent's
        self.ranks = [Rank(number, random_state=start) for number in range(count)]
        self.patience, self.xlac = patience, xlac
        self.condition = threading.Condition()
        self.stage, self.turn, self.turn_since = "run", 0, float("inf")
        self.still_launching = 0
        self.failure, self.release_at = None, 0.0
        self.here = threading.local()       # .rank is set in the threads of the ranks, and in no other
        self.debug_log = None
        self.counts = {}
        self.run_on_the_spot = set()        # programs

    # -- the life of a rank

    def begin(self, number: int) -> None:
        rank = self.here.rank = self.ranks[number]
        rank.thread = threading.get_ident()
        threading.current_thread().name = f"rank {number}"
        if number == self.turn:
            self.turn_since = time.monotonic()
            gc.freeze()         # what is there already stays, and need not be looked at again at every sync
        self._wait_for_turn(rank)

    def finish(self, state: str) -> str:
        """The rank is done, or raised. Returns where all ranks stand at this moment."""
        with self.condition:
            self.here.rank.state = state
            standing = list_parties(self.ranks)
            if self.failure is None:
                self._pass_turn()
        return standing

    def meet(self, action):
        """Called by each rank in place of `action()`, a sync. Returns its result once all ranks' programs have run."""
        rank = self.here.rank
        gc.collect()
        with self.condition:
            rank.syncs, rank.line, rank.state = rank.syncs + 1, worker_line(sys._getframe(2)), "waiting"
            rank.launched = rank.returned = False
            rank.operations = self._operations_since_last_turn()
            rank.random_state = get_random_state()
            self._pass_turn()
        self._wait_for("launch", rank)
        result = self._launch(rank, action)
        self._wait_for_turn(rank)
        return result

    # -- turns

    def _pass_turn(self) -> None:
        """Give the turn to the next rank that runs; when none is left, all have come: begin the launch."""
        still_running = [rank.number for rank in self.ranks if rank.state == "running"]
        if still_running:
            self._give_turn("run", still_running[0])
        elif any(rank.state == "waiting" for rank in self.ranks):
            if any(rank.state != "waiting" for rank in self.ranks):
                self._fail()
            else:
                self.still_launching = len(self.ranks)
                self._give_turn("launch", 0)

    def _give_turn(self, stage: str, number: int) -> None:
        self.stage, self.turn, self.turn_since = stage, number, time.monotonic()
        self.condition.notify_all()

    def _wait_for(self, stage: str, rank: Rank) -> None:
        with self.condition:
            while not (self.stage == stage and self.turn == rank.number) or self.failure:
                self.condition.wait(0.5)
                self._check_patience()
                if self.failure and time.monotonic() >= self.release_at:
                    raise LeftCommonPath(self.failure)

    def _wait_for_turn(self, rank: Rank) -> None:
        self._wait_for("run", rank)
        set_random_state(rank.random_state)
        self.counts = self._count_operations()

    # -- a meeting

    def _launch(self, rank: Rank, action):
        """Hand over this rank's program. The next rank follows when this one's is known; the last ends the meeting."""
        before, executions = self._cache_state(), self._executions()
        os.truncate(self.debug_log, 0)      # a host read since the last meeting has left its report there
        watch = threading.Thread(target=self._pass_on_when_known, args=(rank, before, executions), daemon=True)
        watch.start()
        try:
            return action()
        finally:
            rank.returned = True
            watch.join()
            self._end_meeting(rank)

    def _pass_on_when_known(self, rank: Rank, before: tuple, executions: int) -> None:
        while not rank.returned and self._cache_state() == before:
            time.sleep(0.0005)
        rank.program = self._program_hash() if self._cache_state() != before else ""
        if rank.program:
            self._wait_until_executing(rank.program, executions)
        with self.condition:
            rank.launched = True
            if any(other.launched and other.program != rank.program for other in self.ranks):
                self._fail()
            elif rank.number + 1 < len(self.ranks):
                self._give_turn("launch", rank.number + 1)

    def _wait_until_executing(self, program: str, executions: int) -> None:
        """One program at a time through the thread pools of torch_xla and XLA.

        They are made for work that never waits for other work: of two jobs that come at once, the second may lie until
        the thread that took the first is free again. Here that one waits for the second, in a collective, for ever.
        A cheap program is run on the spot, and is counted only when all ranks have met in it: it gets a moment instead.
        """
        end = time.monotonic() + (0.05 if program in self.run_on_the_spot else 1.0)
        while self._executions() == executions:
            if time.monotonic() > end:
                self.run_on_the_spot.add(program)
                return
            time.sleep(0.0005)

    def _executions(self) -> int:
        """Programs that torch_xla's own pool has handed over to XLA."""
        return self.xlac._xla_counter_value("ExecuteComputation") or 0

    def _end_meeting(self, rank: Rank) -> None:
        """The last to return waits for the devices while all others still stand here, then all go on."""
        with self.condition:
            self.still_launching -= 1       # counted, so that exactly one rank is the last
            if self.failure or self.still_launching:
                return
        self.xlac._xla_wait_device_ops([])
        with self.condition:
            for other in self.ranks:
                other.state = "running"
            self._give_turn("run", 0)

    def _cache_state(self) -> tuple:
        """Moves when a program has been found in, or added to, torch_xla's cache."""
        return (self.xlac._xla_get_num_cached_compilation_graph(), self.xlac._xla_counter_value("CachedCompile"))

    def _program_hash(self) -> str:
        """The hash of the program handed over last, from torch_xla's own report: it has no call that tells."""
        for _ in range(200):
            lines = [line for line in self.debug_log.read_text().splitlines()
                     if line.startswith("Execution Analysis") and "Graph Hash:" in line]
            if lines:
                return lines[-1].split()[-1]
            time.sleep(0.005)
        return "unknown"

    def _count_operations(self) -> dict:
        return {name: self.xlac._xla_counter_value(name) for name in self.xlac._xla_counter_names()
                if name.startswith("xla::")}

    def _operations_since_last_turn(self) -> dict:
        now = self._count_operations()
        return {name: number - self.counts.get(name, 0) for name, number in now.items()
                if number != self.counts.get(name, 0)}

    # -- failures

    def _check_patience(self) -> None:
        holder = self.ranks[self.turn]
        late = time.monotonic() - self.turn_since
        if self.failure is None and self.stage == "run" and holder.state == "running" and late > self.patience:
            frame = sys._current_frames().get(holder.thread)
            holder.state = (f"has not come for {late:.0f} seconds ({PATIENCE_VARIABLE} sets how many are waited),"
                            f" it is at {worker_line(frame)}")
            self._fail()

    def _fail(self) -> None:
        """Say who left the common path. The words of a rank that raised must be on file first: it is the cause."""
        self.failure = explain(self.ranks)
        raised = any("raised" in rank.state for rank in self.ranks)
        self.release_at = time.monotonic() + (0.5 if raised else 0.0)
        # A rank may be inside a program that will never end; XLA would end the process itself, after 10 s and noisily.
        leave = threading.Timer(2.0, end_process)
        leave.daemon = True
        leave.start()
        self.condition.notify_all()


def end_process() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def explain(ranks: list) -> str:
    """One message: what each party does, by sync number and source line, and what that means on a TPU."""
    reached = max(rank.syncs for rank in ranks)
    return (f"The ranks left the common path at sync {reached}:\n{list_parties(ranks)}\n" + different_operations(ranks)
            + "On a TPU the others would wait for ever, or train different models. Let every rank call the same syncs"
              " and reductions in the same order; guard printing and writing by rank, never computing.")


def list_parties(ranks: list) -> str:
    """A line for each group of ranks that did the same."""
    parties = {}
    for rank in ranks:
        parties.setdefault(describe(rank), []).append(rank.number)
    return "\n".join(f"  {name_ranks(numbers)} {words}" for words, numbers in parties.items())


def describe(rank: Rank) -> str:
    if rank.state == "waiting":
        program = f", with program {rank.program[:8] or 'none'}" if rank.launched else ""
        return f"came to sync {rank.syncs} at {rank.line}{program}"
    state = {"finished": "finished its work", "running": "has not had its turn yet"}.get(rank.state, rank.state)
    return f"{state}: its last sync was number {rank.syncs}, at {rank.line}"


def name_ranks(numbers: list) -> str:
    """[0, 1, 2, 5] -> 'ranks 0-2, 5'"""
    runs = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
    return f"rank{'s' if len(numbers) > 1 else ''} {text}"


def different_operations(ranks: list) -> str:
    """What the rarest rank traced and the most common one did not: a branch that the data decided shows in it."""
    came = [rank for rank in ranks if rank.state == "waiting"]
    kinds = [(rank.line, tuple(sorted(rank.operations.items()))) for rank in came]
    by_number = sorted(range(len(came)), key=lambda index: kinds.count(kinds[index]))
    if len(came) < 2:
        return ""
    odd, usual = came[by_number[0]], came[by_number[-1]]
    apart = [f"{name} {odd.operations.get(name, 0)} instead of {usual.operations.get(name, 0)} times"
             for name in sorted({*odd.operations, *usual.operations})
             if odd.operations.get(name, 0) != usual.operations.get(name, 0)]
    if not apart and all(rank.line == odd.line for rank in came) and any(rank.program != odd.program for rank in came):
        return ("All traced the same operations, on other shapes or with other numbers: a batch of another size, a"
                " Python number that differs by rank, or a tensor without dimensions that holds 0 or 1 (XLA makes it a"
                " constant).\n")
    return (f"Since the last sync {name_ranks([odd.number])} traced {', '.join(apart[:4])}, compared with"
            f" {name_ranks([usual.number])}.\n" if apart else "")


LIBRARIES = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))
OURS = (__file__, str(Path(__file__).with_name("runtime.py")))


def worker_line(frame) -> str:
    """'file.py:12 in function', the innermost line that belongs to the worker: no library, no harness."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(LIBRARIES) and "site-packages" not in name and name not in OURS:
            return f"{Path(name).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown line"


# ---- what threads share and processes do not ------------------------------------------------------------------------

def get_random_state() -> tuple:
    import numpy
    import torch
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state()


def set_random_state(state: tuple) -> None:
    import numpy
    import torch
    random.setstate(state[0])
    numpy.random.set_state(state[1])
    torch.set_rng_state(state[2])


# ---- installing it --------------------------------------------------------------------------------------------------

_conductor = None       # the newest one; the forked process that runs all ranks inherits it


class RehearsedWorker:
    """The worker, run by each rank in its turn. The worker itself does not know.

    Holds nothing else: the launcher pickles it.
    """

    def __init__(self, worker):
        self.worker = worker

    def __call__(self, *args):
        import torch_xla.runtime as xr
        conductor = _conductor
        conductor.begin(xr.global_ordinal())
        try:
            result = self.worker(*copy.deepcopy(args))    # a process has its own: of a model built before, for one
        except BaseException as error:
            if not isinstance(error, LeftCommonPath):
                state = f"raised {type(error).__name__} ({first_line(error)}) at {raised_at(error)}"
                add_note(error, f"Where the ranks stood in this rehearsal:\n{conductor.finish(state)}")
            raise
        conductor.finish("finished")
        return result


def add_note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):          # Python 3.11
        error.add_note(text)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no text"])[0][:120]


def raised_at(error: BaseException) -> str:
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    return worker_line(trace.tb_frame)


def install(devices: int, worker, patience_s: float | None = None):
    """Turn every sync of torch_xla into a meeting of `devices` ranks. Returns the worker to launch instead of `worker`.

    Call it in the parent, after the environment is set and before the launch; calling it again starts afresh. Raises
    RuntimeError when torch_xla no longer has the functions that are wrapped here.
    """
    import torch_xla
    import torch_xla.core.xla_model as xm
    patience = patience_s or float(os.environ.get(PATIENCE_VARIABLE, PATIENCE))
    global _conductor
    conductor = _conductor = Conductor(devices, patience, torch_xla._XLAC)
    missing = [name for name in ("_xla_step_marker", "_xla_sync_multi", "_xla_wait_device_ops", "_xla_counter_value",
                                 "_xla_counter_names", "_xla_get_num_cached_compilation_graph", "_get_xla_tensors_text")
               if not hasattr(torch_xla._XLAC, name)]
    if missing:
        raise RuntimeError(f"torch_xla {torch_xla.__version__} has no {', '.join(missing)} in torch_xla._XLAC any more:"
                           " virtual_tpu.py must be fitted to it before a rehearsal can run.")
    conductor.debug_log = follow_executions()
    step_marker = unwrapped(torch_xla._XLAC._xla_step_marker)
    torch_xla._XLAC._xla_step_marker = wrapped(step_marker, lambda *args, **named: meet_at_sync(conductor, step_marker,
                                                                                              args, named))
    gather = unwrapped(xm.all_gather)
    # As it is, torch_xla pads by rank and sums: another program on each rank. This asks for the true all-gather.
    xm.all_gather = wrapped(gather, lambda *args, **named: gather(*args, **{**named, "pin_layout": False}))
    meet_at_host_reads(conductor)
    print(f"REHEARSAL on {devices} virtual TPU devices, threads of one process that take turns on this CPU: it shows"
          " what would go wrong on a TPU; its speed says nothing.", flush=True)
    return RehearsedWorker(worker)


def follow_executions() -> Path:
    """Let torch_xla report each execution to a file: that names the program, which nothing else does."""
    handle, name = tempfile.mkstemp(prefix="virtual_tpu_", suffix=".log")
    os.close(handle)
    atexit.register(lambda: Path(name).unlink(missing_ok=True))
    os.environ.update(PT_XLA_DEBUG_LEVEL="2", PT_XLA_DEBUG_FILE=name)
    return Path(name)


def wrapped(original, replacement):
    replacement.original = original
    return replacement


def unwrapped(function):
    return getattr(function, "original", function)


def meet_at_sync(conductor: Conductor, step_marker, args: tuple, named: dict):
    if not hasattr(conductor.here, "rank"):         # a thread of the worker's own, a data loader's
        return step_marker(*args, **named)
    return conductor.meet(lambda: step_marker(*args, **{**named, "wait": False}))


def meet_at_host_reads(conductor: Conductor) -> None:
    """Reading a reduction that was not yet synced runs it then and there: all ranks must come, as on a TPU."""
    import torch
    import torch_xla
    sync_multi = torch_xla._XLAC._xla_sync_multi

    def reading(read):
        def meet_first(tensor, *args, **named):
            if (tensor.device.type == "xla" and hasattr(conductor.here, "rank")
                    and is_collective(torch_xla._XLAC._get_xla_tensors_text([tensor]))):
                conductor.meet(lambda: sync_multi([tensor], [], True))
            return read(tensor, *args, **named)
        return meet_first

    for name in HOST_READS:
        read = unwrapped(getattr(torch.Tensor, name))
        setattr(torch.Tensor, name, wrapped(read, reading(read)))


def is_collective(program: str) -> bool:
    return any(word in program for word in COLLECTIVES)
