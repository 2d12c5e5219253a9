"""The rehearsal on virtual TPU devices: it runs right workers, and names what would hang.

Every test launches real workers through runtime.launch and Accelerate's own notebook_launcher, in a fresh Python; the
faulty ones are in virtual_workers.py. Four devices where the number does not matter: a rank is a second of work here.
"""
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch_xla
from conftest import clean_environment

import virtual_tpu

WORKERS = Path(__file__).with_name("virtual_workers.py")


def rehearse(worker: str, *arguments: str, devices: int = 4, patience: float = 3, check: bool = True,
             timeout: float = 200) -> str:
    """Launch a worker of virtual_workers.py; its whole output, stdout and stderr together."""
    environment = clean_environment(VIRTUAL_TPU_DEVICES=str(devices), VIRTUAL_TPU_PATIENCE=str(patience))
    done = subprocess.run([sys.executable, str(WORKERS), worker, *arguments], env=environment, text=True, timeout=timeout,
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


# ---- what would hang is named ------------------------------------------------------------------------------------------

#              worker                       odd rank, sync number, what the others did there
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
    message = only_message(rehearse("stuck", check=False))
    assert said_of(message, 2).startswith(f"has not come for 3 seconds, it is at {marked_line('stuck', 'the odd one')}")
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


# ---- what is right runs through ----------------------------------------------------------------------------------------

def test_every_rank_has_its_own_random_state():
    output = rehearse("own_random_state")
    assert output.count("drew its own numbers") == 4
    assert "REHEARSAL on 4 virtual TPU devices" in output and "its speed says nothing" in output


def test_barrier_rendezvous_gather_reduce_and_reads():
    assert rehearse("meets_in_every_way").count("of 4 met the others") == 4


def test_install_says_clearly_when_torch_xla_has_moved_its_functions(monkeypatch):
    monkeypatch.delattr(torch_xla._XLAC, "_xla_step_marker")
    with pytest.raises(RuntimeError, match="has no _xla_step_marker in torch_xla._XLAC any more"):
        virtual_tpu.install(2, print)


def test_names_of_ranks():
    assert virtual_tpu.name_ranks([0, 1, 2, 5]) == "ranks 0-2, 5"
    assert virtual_tpu.name_ranks([3]) == "rank 3"
