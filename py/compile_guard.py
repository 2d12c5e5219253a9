"""Says why XLA compiled again. A new program costs minutes on a TPU, and a loop that makes one every step never ends.

    guard = CompileGuard(runtime)
    for step in ...:
        loss = ...
        with guard.watch(step, loss, x=x, y=y, temperature=temperature):
            runtime.sync()

Give it the tensors and Python numbers that enter the step. After the warm-up it speaks when a sync compiles: at which
step, which input changed its shape or which number changed, and what to do. When no shape did, it reads the constants
of the next two programs and names the one that differs. Off XLA, and while nothing is compiled, it costs nothing.
"""
import contextlib
import re
import time
from pathlib import Path

PROGRAMS_TO_READ = 2        # a number that changes with every step shows between two of them
MOST_MESSAGES = 5


class CompileGuard:
    """Watches the syncs of one loop; an evaluation has its own programs and should have its own guard.

    warm_up: syncs that may compile, the first two: Adam may create its state in the first. messages: what was said.
    """

    def __init__(self, runtime, warm_up: int = 2, output=print):
        self.runtime, self.warm_up, self.output = runtime, warm_up, output
        self.seen = {}              # {input: its different shapes or values, in the order of their first use}
        self.last = {}              # {input: the shape or value of the step before}
        self.to_read, self.constants = 0, None
        self.messages = []

    @contextlib.contextmanager
    def watch(self, step: int, result, **inputs):
        """Put the sync of a step inside. result: a tensor that the step computes, the loss."""
        explained = bool(self.to_read) and self._compare_constants(step, result)
        before, started = self.runtime.compile_count(), time.monotonic()
        yield
        compiled, seconds = self.runtime.compile_count() - before, time.monotonic() - started
        now = {name: describe(value) for name, value in inputs.items()}
        if compiled and self.warm_up <= 0 and not explained:
            self._say(f"step {step}: XLA compiled {'a new program' if compiled == 1 else f'{compiled} new programs'}"
                      f" after the warm-up, in {seconds:.1f} s here, minutes on a TPU: {self._reason(now)}")
        self.warm_up -= 1
        self.last = now
        for name, description in now.items():
            if description not in self.seen.setdefault(name, []):
                self.seen[name].append(description)

    def summary(self) -> dict:
        """For a log: how often it was compiled again, and the first reasons. Empty while that has not happened."""
        return dict(retraces=len(self.messages), retrace_reasons=self.messages[:3]) if self.messages else {}

    def _reason(self, now: dict) -> str:
        for name, description in now.items():
            if isinstance(description, str) and description not in self.seen.get(name, [description]):
                return reason_shape(name, [*self.seen[name], description])
        self._read_constants()
        for name, value in now.items():
            if not isinstance(value, str) and name in self.last and value != self.last[name]:
                return (f"no shape changed, but the number {name} went from {self.last[name]} to {value}; if it is a"
                        f" constant of the program, make it a tensor: {name} = torch.tensor({name}).to(device).")
        return ("no input that the guard was given changed. Look for a Python number that changes and is given to an"
                " operation (an exponent, an epsilon), a value that became exactly 0 or 1, a list that grows, an `if`"
                " on data; or for code that ran for the first time.")

    # -- what differs when the shapes do not

    def _read_constants(self) -> None:
        if not self.to_read and self.constants is None:     # once: reading a large program takes a second
            self.to_read = PROGRAMS_TO_READ
            self.runtime.name_source_lines(True)

    def _compare_constants(self, step: int, result) -> bool:
        """Read the constants of the program that is about to be synced; True when one that differs was named."""
        before, now = self.constants, constants_by_operation(self.runtime.pending_program(result))
        self.constants = now
        self.to_read -= 1
        if not self.to_read:
            self.runtime.name_source_lines(False)
        for place, values in now.items():
            for was, value in zip((before or {}).get(place, ()), values):
                if was != value:
                    self._say(f"step {step}: the number {was} has become {value} in {place}: it is a constant of the"
                              " program, so every new value is a new program. Give it as a tensor on the device, or"
                              " keep it the same.")
                    return True
        return False

    def _say(self, message: str) -> None:
        self.messages.append(message)
        if self.runtime.is_main and len(self.messages) <= MOST_MESSAGES:
            self.output(f"RECOMPILED {message}" + (" (no more of these will be shown)"
                                                   if len(self.messages) == MOST_MESSAGES else ""), flush=True)


def describe(value):
    """'4x64 int32' for a tensor; a number as it is."""
    if hasattr(value, "shape"):
        return f"{'x'.join(map(str, value.shape)) or 'scalar'} {str(value.dtype).removeprefix('torch.')}"
    return value


def reason_shape(name: str, shapes: list) -> str:
    """One other shape is a ragged batch; a third, fourth, ... growing one is a sequence without a fixed length."""
    if len(shapes) >= 3 and grows(shapes[-3:]):
        return (f"{name} grows: {', '.join(shapes[-3:])}. Every length is a program of its own: fill up to one length,"
                " or to a few fixed ones, and give the filling no weight.")
    return (f"{name} is {shapes[-1]}, before it was {' or '.join(shapes[:-1][-3:])}. Give every batch the same shape:"
            " leave out the smaller last one (drop_last=True), or fill it up and give the filling no weight.")


def grows(shapes: list) -> bool:
    sizes = [[int(number) for number in re.findall(r"\d+", shape.split()[0])] for shape in shapes]
    if len({len(size) for size in sizes}) > 1:
        return False
    changing = [column for column in zip(*sizes) if len(set(column)) > 1]
    return len(changing) == 1 and list(changing[0]) == sorted(set(changing[0]))


def constants_by_operation(program: str) -> dict:
    """{'aten::pow (model.py:12)': ['2.5', ...]}: scalar constants of an HLO text, by the operation that uses them."""
    values = dict(re.findall(r"(%[\w.]+) = \w+\[\] constant\(([^)]*)\)", program))
    found = {}
    for line in program.splitlines():
        used = [values[name] for name in re.findall(r"(%[\w.]+)[,)]", line.partition(" = ")[2]) if name in values]
        operation = re.search(r'op_type="([^"]*)"', line)
        if used and operation:
            place = re.search(r'source_file="([^"]*)" source_line=(\d+)', line)
            where = f" ({Path(place[1]).name}:{place[2]})" if place else ""
            found.setdefault(f"{operation[1].replace('__', '::')}{where}", []).extend(used)
    return found
