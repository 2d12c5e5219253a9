"""The gradients of one optimizer step from its micro-steps: a loop in Python, or on XLA a loop in the program.

    gradients = MicroSteps(runtime, lambda x, y: model(x, y) / n, model.parameters())
    loss = gradients(x, y)          # x, y: (n, micro_batch, ...); afterwards every parameter has its .grad

On XLA Python traces the micro-step once, and the whole optimizer step is one program. Written out, n micro-steps in one
program hold n sets of activations at once, for nothing orders them; a program for each costs Python n traces a step.
"""
from runtime import UserError, XlaLoop, clear_gradients


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
            self.loop, self.is_checked = XlaLoop(self.loss_of, self.parameters, batches, shapes), False
        elif not self.is_checked:
            self.is_checked = True
            if not self.loop.equals(XlaLoop(self.loss_of, self.parameters, batches, shapes)):
                raise UserError(CHANGED)
        total, *gradients = self.loop.run(batches)
        for parameter, gradient in zip(self.parameters, gradients):
            parameter.grad = gradient
        return total


CHANGED = ("The micro-step of the second optimizer step is not that of the first, and only the first would be trained:"
           " something in the model or the loss reads Python that changes (a counter, a number that grows, an `if`). Give it"
           " to the micro-step as a tensor, or keep it the same.")
