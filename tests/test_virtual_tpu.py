"""The rehearsal on virtual TPU devices: it runs right workers, and names what would hang.

Every test launches real workers through runtime.launch and Accelerate's own notebook_launcher, in a fresh Python; the
faulty ones are in virtual_workers.py. Four devices where the number does not matter: a rank is a second of work here.
"""
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch_xla
from conftest import clean_environment, run_script

import virtual_tpu

WORKERS = Path(__file__).with_name("virtual_workers.py")


def rehearse(worker: str, check: bool = True, patience: int = 20, devices: int = 4) -> str:
    """Launch a worker of virtual_workers.py; its whole output, stdout and stderr together."""
    environment = clean_environment(VIRTUAL_TPU_DEVICES=str(devices), VIRTUAL_TPU_PATIENCE=str(patience))
    done = subprocess.run([sys.executable, str(WORKERS), worker], env=environment, text=True, timeout=200,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert not check or done.returncode == 0, done.stdout
    return done.stdout


def marked_line(worker: str, mark: str) -> str:
    """'virtual_workers.py:12' of the line in this worker that carries the mark."""
    lines = WORKERS.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(f"def {worker}("))
    last = next((number for number in range(first + 1, len(lines)) if lines[number].startswith(("def ", "# ----"))))
    (found,) = [number for number in range(first, last) if f"# HERE {mark}" in lines[number]]
    return f"{WORKERS.name}:{found + 1}"


# ---- what would hang is named ----------------------------------------------------------------------------------------

# worker, rank that leaves, sync at which it does
FAULTS = [("eval_on_rank_0", 0, 4), ("gather_on_rank_0", 0, 2), ("reduce_on_rank_0", 0, 2),
          ("save_that_one_rank_skips", 2, 2), ("stop_by_own_clock", 1, 2), ("branch_by_data", 1, 3),
          ("ragged_on_one_rank", 2, 4)]


@pytest.mark.parametrize("worker, odd, sync", FAULTS)
def test_a_rank_that_leaves_the_common_path_is_named(worker, odd, sync):
    started = time.monotonic()
    output = rehearse(worker, check=False)
    assert time.monotonic() - started < 30
    message = only_message(output)
    assert f"at sync {sync}:" in message
    assert said_of(message, odd) == f"came to sync {sync} at {marked_line(worker, 'the odd one')} in {worker}"
    for rank in set(range(4)) - {odd}:
        assert said_of(message, rank) == f"came to sync {sync} at {marked_line(worker, 'the others')} in {worker}"


def test_the_branch_shows_in_the_operations():
    assert "rank 1 traced xla::clamp 2 instead of 1 times" in rehearse("branch_by_data", check=False)


def test_a_rank_that_has_finished_is_reported_as_finished():
    message = only_message(rehearse("one_step_shorter", check=False))
    line = f"{marked_line('one_step_shorter', 'the odd one')} in one_step_shorter"
    assert said_of(message, 3) == f"finished its work: its last sync was number 4, at {line}"
    assert said_of(message, 0) == f"came to sync 5 at {line}"


def test_a_rank_that_stays_away_is_named_after_the_patience():
    message = only_message(rehearse("stuck", check=False, patience=6))
    assert said_of(message, 2).startswith("has not come for 6 seconds (VIRTUAL_TPU_PATIENCE sets how many are waited),"
                                          f" it is at {marked_line('stuck', 'the odd one')}")
    assert said_of(message, 0) == f"came to sync 3 at {marked_line('stuck', 'the others')} in stuck"


def test_a_rank_that_raised_is_shown_with_its_own_traceback():
    output = rehearse("raises", check=False)
    assert output.count("Traceback") == 1 and "ValueError: this rank's file is broken" in output
    assert "(rank 3, peak memory" in output
    if sys.version_info >= (3, 11):
        assert said_of(output, 3).startswith("raised ValueError (this rank's file is broken) at "
                                             + marked_line("raises", "the odd one"))
        assert said_of(output, 1).startswith("came to sync 3 at ")


def only_message(output: str) -> str:
    """The one message of a failed rehearsal, as runtime.launch shows it: no traceback, nothing twice."""
    assert output.count("The ranks left the common path") == 1 and "Traceback" not in output, output
    return output[output.index("UserError: The ranks"):]


def said_of(message: str, rank: int) -> str:
    """What the message says of a rank, without the program's hash."""
    for numbers, words in re.findall(r"^  ranks? ([\d, -]+?) ([a-z].*)$", message, re.MULTILINE):
        for run in numbers.split(", "):
            first, _, last = run.partition("-")
            if int(first) <= rank <= int(last or first):
                return words.split(", with program")[0]
    raise AssertionError(f"nothing is said of rank {rank} in:\n{message}")


# ---- what is right runs through --------------------------------------------------------------------------------------

def test_every_rank_has_its_own_random_state():
    output = rehearse("own_random_state")
    assert output.count("drew its own numbers") == 4
    assert "REHEARSAL on 4 virtual TPU devices" in output and "its speed says nothing" in output


def test_barrier_rendezvous_gather_reduce_and_reads():
    assert rehearse("meets_in_every_way").count("of 4 met the others") == 4


def test_garbage_of_one_rank_is_not_collected_in_the_turn_of_another():
    """A program holds every tensor that is alive: equal ranks would bring different ones."""
    assert rehearse("leaves_cycles").count("left its garbage") == 4


def test_no_program_is_left_lying_in_a_thread_pool():
    """Handed over as fast as they come, one of them stayed there after 140 to 560 steps, in each of four runs."""
    assert rehearse("meets_often", devices=8).count("met the others 600 times") == 8


def test_torch_xla_still_counts_the_programs_it_hands_over(tmp_path):
    """By this counter the ranks' programs go through its thread pool one at a time, and none is left lying there."""
    code = """
import runtime as rt
rt.patch_environment("xla-cpu")
import torch, torch_xla
import torch_xla.debug.metrics as metrics
before = metrics.counter_value("ExecuteComputation") or 0
torch.ones(3, device="xla").add(1)
x = torch.rand(200, 200).to("xla") @ torch.rand(200, 200).to("xla")
torch_xla.sync(wait=True)
print("counted", metrics.counter_value("ExecuteComputation") - before)
"""
    assert "counted 1\n" in run_script(code, tmp_path).stdout


def test_install_says_clearly_when_torch_xla_has_moved_its_functions(monkeypatch):
    monkeypatch.delattr(torch_xla._XLAC, "_xla_step_marker")
    with pytest.raises(RuntimeError, match="has no _xla_step_marker in torch_xla._XLAC any more"):
        virtual_tpu.install(2, print)


def test_names_of_ranks():
    assert virtual_tpu.name_ranks([0, 1, 2, 5]) == "ranks 0-2, 5"
    assert virtual_tpu.name_ranks([3]) == "rank 3"


# ---- proofs about our own GPT worker, from the programs that XLA was given and torch_xla's counters ------------------

RANKS, STEPS = 8, 40
SMALL_GPT = dict(T=64, n_layer=2, n_head=2, n_embd=64, tokens_per_step=2048, max_steps=STEPS, warmup_steps=5,
                 clip_norm=0.1, log_every=5, eval_every=20, eval_windows=16, save_every=20)


def train_gpt_with_probes(folder: Path, shards: Path, platform: str, devices: int = RANKS, **settings):
    """Train in a fresh Python. Returns its log records, the ranks' weight digests, and the programs XLA was given."""
    (folder / "programs").mkdir(parents=True)
    settings = dict(data_folder=str(shards), run_folder=str(folder / "run"), **settings)
    request = json.dumps(dict(folder=str(folder), platform_name=platform, settings=settings))
    environment = clean_environment(VIRTUAL_TPU_DEVICES=str(devices), PYTHONUNBUFFERED="1",
                                    XLA_FLAGS=f"--xla_dump_to={folder / 'programs'} --xla_dump_hlo_as_text")
    started = time.monotonic()
    done = subprocess.run([sys.executable, str(WORKERS), "gpt", request], env=environment, text=True, timeout=400,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stdout
    # The same program dumped by two launches has one name, apart from its position: `module_0003.SyncTensorsGraph.751`.
    programs = {path.name.split(".", 1)[1]: path.read_text()
                for path in sorted((folder / "programs").glob("*before_optimizations.txt"))}
    shutil.rmtree(folder / "programs")      # tens of megabytes of compiled code
    log = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    ranks = [[json.loads(line) for line in path.read_text().splitlines()]
             for path in sorted(folder.glob("rank_*.jsonl"))]
    return SimpleNamespace(output=done.stdout, seconds=seconds, log=log, ranks=ranks, programs=programs,
                           training=[r for r in log if "loss" in r], evaluations=[r for r in log if "val_loss" in r])


def with_matrix_work(run) -> list:
    """The programs of an optimizer step and of an evaluation batch."""
    return [text for text in run.programs.values() if " dot(" in text]


def with_gradient_reduction(run) -> list:
    """The programs that reduce as many numbers as the model has parameters."""
    parameters = re.search(r"model: ([\d,]+) parameters", run.output)[1].replace(",", "")
    return [text for text in run.programs.values() if re.search(rf"f32\[{parameters}\]\S*[^=]* all-reduce\(", text)]


def results_of(operation: str, program: str) -> set:
    """The element types that this operation produces in the program: results_of('dot', text) == {'bf16'}."""
    return set(re.findall(rf" = \(?([a-z]+\d*)\[[^=]*? {operation}\(", program))


@pytest.fixture(scope="module")
def gpt_run(tmp_path_factory, shards):
    """40 steps on 8 ranks, accumulation 2, clipping at work, stopped and resumed half way."""
    return train_gpt_with_probes(tmp_path_factory.mktemp("gpt") / "ranks", shards, "virtual-tpu", micro_batch=2,
                                 stop_at=STEPS // 2, **SMALL_GPT)


@pytest.fixture(scope="module")
def gpt_on_one_device(tmp_path_factory, shards):
    return train_gpt_with_probes(tmp_path_factory.mktemp("gpt") / "one", shards, "xla-cpu", micro_batch=16, **SMALL_GPT)


def test_a_rehearsal_with_two_saves_and_a_resume_takes_minutes_not_hours(gpt_run):
    assert gpt_run.seconds < 180
    assert "at step 20 of 40" in gpt_run.output
    assert [record["step"] for record in gpt_run.evaluations] == [0, 20, 40]
    assert "2 micro-steps x 8 processes" in gpt_run.output and "REHEARSAL on 8" in gpt_run.output


def test_all_ranks_end_with_equal_weights_after_accumulation_and_clipping(gpt_run):
    assert all(record["grad_norm"] > SMALL_GPT["clip_norm"] for record in gpt_run.training), "nothing was clipped"
    assert len(gpt_run.ranks) == RANKS
    first_half, whole = zip(*gpt_run.ranks)
    assert len({rank["digest"] for rank in first_half}) == len({rank["digest"] for rank in whole}) == 1
    assert first_half[0]["digest"] != whole[0]["digest"]


def test_losses_are_those_of_one_device_at_the_same_global_batch(gpt_run, gpt_on_one_device):
    """bf16 matrix work rounds differently in batches of 2 and of 16 windows; measured, they differ by up to 3e-4."""
    for kind in ("loss", "val_loss"):
        many, one = ({r["step"]: r[kind] for r in run.log if kind in r} for run in (gpt_run, gpt_on_one_device))
        shared = sorted(set(many) & set(one))
        assert shared == ([0, 20, 40] if kind == "val_loss" else [1, *range(5, 41, 5)])
        assert [many[step] for step in shared] == pytest.approx([one[step] for step in shared], rel=1e-3)


def test_one_gradient_reduction_a_step_and_no_host_read_between_log_steps(gpt_run):
    pairs = [(a, b) for a, b in zip(gpt_run.training, gpt_run.training[1:]) if b["step"] - a["step"] == 5
             and a["step"] != 20]
    assert len(pairs) >= 5
    for a, b in pairs:
        spent = {name: b["counters"][name] - a["counters"][name] for name in b["counters"]}
        assert spent["all_reduces"] == RANKS * (5 + 1), "one for each step's gradients, one for the log"
        assert spent["reads"] == RANKS and spent["scalars"] == 0, "each rank reads once, at the log step"


def test_the_gradient_reduction_is_one_buffer_however_many_micro_steps(tmp_path, shards):
    """Six micro-steps; gpt_run has two. They are a loop of one program, as two are."""
    run = train_gpt_with_probes(tmp_path / "six", shards, "virtual-tpu", devices=2, micro_batch=2, T=16, n_layer=1,
                                tokens_per_step=2 * 2 * 16 * 6, max_steps=3, eval_every=3, save_every=3)
    assert "6 micro-steps x 2 processes" in run.output
    assert_one_training_and_one_eval_program(run)
    a, b = run.training[1:]
    assert b["counters"]["all_reduces"] - a["counters"]["all_reduces"] == 2 * (1 + 1)


def assert_one_training_and_one_eval_program(run):
    """Of the two, the first loops over the micro-steps, reduces their gradients in one all-reduce and updates the weights."""
    training, = with_gradient_reduction(run)
    assert training.count(" all-reduce(") == 1 and training.count(" while(") == 1
    evaluation, = set(with_matrix_work(run)) - {training}
    assert " all-reduce(" not in evaluation and " while(" not in evaluation


def test_each_training_and_eval_program_is_compiled_once_also_across_a_resume(gpt_run):
    assert_one_training_and_one_eval_program(gpt_run)
    for launch in ([r for r in gpt_run.training if r["step"] <= 20], [r for r in gpt_run.training if r["step"] > 20]):
        assert len({record["compiles"] for record in launch}) == 1, "something was compiled after the first step"


def test_matrix_work_is_bf16_and_everything_that_must_be_exact_is_fp32(gpt_run):
    assert all(rank["dtypes"] == ["torch.float32"] for both in gpt_run.ranks for rank in both)
    for program in with_matrix_work(gpt_run):
        assert results_of("dot", program) == {"bf16"}
        for operation in ("exponential", "log", "rsqrt", "batch-norm-training"):    # softmax, loss, QK-norm, LayerNorm
            assert results_of(operation, program) <= {"f32"}, operation
        assert results_of("exponential", program) and results_of("rsqrt", program) and results_of("log", program)
        for kept in re.findall(r"ROOT [^=]*tuple[^=]*= \((.*?)\) tuple\(", program):
            assert "f32" in kept and "bf16" not in kept, "a bf16 value is carried from one micro-step or step to the next"
    (update,) = with_gradient_reduction(gpt_run)
    assert results_of("all-reduce", update) == {"f32"}
    after = update[update.index(" all-reduce("):]
    assert "bf16" not in after, "the update of the weights is not all in fp32"


def test_nothing_is_compiled_in_200_steps_of_changing_learning_rate(tmp_path, shards):
    run = train_gpt_with_probes(tmp_path / "long", shards, "virtual-tpu", micro_batch=1, tokens_per_step=8 * 16, T=16,
                                n_layer=1, n_head=1, n_embd=16, max_steps=200, warmup_steps=20, log_every=20,
                                eval_every=200, save_every=200)
    assert len({record["lr"] for record in run.training}) == len(run.training) == 11
    assert len({record["compiles"] for record in run.training}) == 1
    assert_one_training_and_one_eval_program(run)
