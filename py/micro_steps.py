"""The gradients of one optimizer step from its micro-steps: a loop in Python, or on XLA a loop in the program.

    gradients = MicroSteps(runtime, lambda x, y: model(x, y) / n, model.parameters())
    loss = gradients(x, y)          # x, y: (n, micro_batch, ...); afterwards every parameter has its .grad

On XLA Python traces the micro-step once, and the whole optimizer step is one program. Written out, n micro-steps in one
program hold n sets of activations at once, for nothing orders them; a program for each costs Python n traces a step.
"""
import re

import torch

from runtime import UserError


class MicroSteps:
    """Calls `loss_of(*batch)` for each micro-batch, and sums losses and gradients.

    loss_of: must be a function of its tensors and the parameters alone. On XLA it is traced once; what it reads of
    Python after that has no effect, and what it changes in place is lost. The second step traces it once more, to compare.
    parameters: those that are trained, all of which the loss must depend on.
    """

    def __init__(self, runtime, loss_of, parameters):
        self.runtime, self.loss_of, self.parameters = runtime, loss_of, list(parameters)
        self.loop, self.is_checked = None, False

    def __call__(self, *batches):
        """The sum of the losses, (1,). batches: tensors (n, ...) on the device. Adds nothing: gradients begin at zero."""
        if self.runtime.is_xla:
            return self.as_one_loop(batches)
        clear_gradients(self.parameters)
        total = self.runtime.number(0.0)
        for batch in zip(*batches):
            loss = self.loss_of(*batch)
            self.runtime.scaler.scale(loss).backward()
            total = total + loss.detach()
        return total

    def as_one_loop(self, batches: tuple):
        shapes = [(tuple(batch.shape), batch.dtype) for batch in batches]
        if self.loop is None or self.loop.shapes != shapes:
            self.loop, self.is_checked = Loop(self, batches, shapes), False
        elif not self.is_checked:
            self.is_checked = True
            if not self.loop.equals(Loop(self, batches, shapes)):
                raise UserError(CHANGED)
        total, *gradients = self.loop.run(batches)
        for parameter, gradient in zip(self.parameters, gradients):
            parameter.grad = gradient
        return total


def clear_gradients(parameters: list) -> None:
    for parameter in parameters:
        parameter.grad = None


CHANGED = ("The micro-step of the second optimizer step is not that of the first, and only the first would be trained:"
           " something in the model or the loss reads Python that changes (a counter, a number that grows, an `if`). Give it"
           " to the micro-step as a tensor, or keep it the same.")


class Loop:
    """A micro-step, lowered once, in a While of XLA's. torch_xla's own `scan` would do it for functions that AOTAutograd
    can trace; ours holds kernels of JAX. The parts of torch_xla that `scan` is made of are used here the same way."""

    def __init__(self, owner: MicroSteps, batches: tuple, shapes: list):
        import torch_xla
        import torch_xla.core.xla_builder as xb
        self.xla, self.shapes, self.parameters = torch_xla._XLAC, shapes, owner.parameters
        stand_ins = [xb.create_placeholder_tensor(batch.shape[1:], batch.dtype) for batch in batches]
        loss = owner.loss_of(*stand_ins)
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
        return self.operations == other.operations and all(
            torch.equal(a.cpu(), b.cpu()) for a, b in zip(self.others, other.others, strict=True))

    def number_of_the_seed(self, context, outputs: list):
        numbers, tensors = self.xla._get_tensors_xla_device_data_node(outputs)
        seed = self.xla._get_seed_info_id()
        return context.tensor_parameter_id(tensors[numbers.index(seed)]) if seed in numbers else None

    def build(self, xb, step, arguments: list, batches: tuple, outputs: list):
        """The computation (batches, parameters, seeds, others) -> (loss, gradients)."""
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
