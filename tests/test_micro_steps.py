"""The micro-steps of a step as one loop of an XLA program, against the same micro-steps written out in Python."""
import pytest
from conftest import run_script

SETUP = """
    import runtime
    runtime.patch_environment("xla-cpu")
    import torch, torch_xla
    from torch.nn import functional as F
    from micro_steps import MicroSteps
    run = runtime.Runtime("bf16")

    class Network(torch.nn.Module):
        def __init__(self, dropout=0.0, recompute=False):
            super().__init__()
            torch.manual_seed(0)
            self.table, self.inner, self.out = torch.nn.Embedding(16, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 16)
            self.middle = torch.nn.Sequential(self.inner, torch.nn.Tanh())
            self.dropout, self.recompute, self.factor = dropout, recompute, 2.0

        def forward(self, x, y):
            with run.autocast():
                x = self.table(x)
                x = run.checkpoint_function()(self.middle, x) if self.recompute else self.middle(x)
                x = F.dropout(x, self.dropout) * self.factor
                return F.cross_entropy(self.out(x).float().flatten(0, -2), y.flatten())

    def tokens(n, seed=0):
        made = torch.Generator().manual_seed(seed)
        return [torch.randint(0, 16, (n, 4, 8), generator=made).to(run.device) for _ in "xy"]

    def place(model):
        model.to(run.device)
        run.sync()
        return model

    def results(model, total):
        run.sync()
        return [total.cpu(), *(p.grad.cpu() for p in model.parameters())]
"""


@pytest.mark.parametrize("recompute", [False, True])
def test_the_loop_gives_what_the_same_micro_steps_give_in_python(tmp_path, recompute):
    run_script(SETUP + f"""
    for n in (1, 2, 5):
        model = place(Network(recompute={recompute}))
        gradients = MicroSteps(run, lambda x, y: model(x, y) / n, model.parameters())
        for seed in range(3):                   # the second and the third use what the first has lowered
            x, y = tokens(n, seed)
            looped = results(model, gradients(x, y))
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            total = run.number(0.0)
            for i in range(n):
                loss = model(x[i], y[i]) / n
                loss.backward()
                total = total + loss.detach()
                run.sync()
            for a, b in zip(looped, results(model, total)):     # of fp32; XLA may join other operations in a loop
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
            assert looped[0] > 2 and all(float(g.abs().max()) > 0 for g in looped)
    """, tmp_path)


def test_off_xla_it_is_a_loop_in_python_with_the_same_results(tmp_path):
    """Within the rounding of bf16, which two backends do not share."""
    run_script(SETUP + """
    import types
    model = Network()
    cpu = types.SimpleNamespace(is_xla=False, scaler=run.scaler, number=lambda value: torch.tensor([value]))
    run.device, on_xla = torch.device("cpu"), run.device
    x, y = tokens(3)
    gradients = MicroSteps(cpu, lambda x, y: model(x, y) / 3, model.parameters())
    model.table.weight.grad = torch.ones_like(model.table.weight)       # what was there before does not count
    mine = [gradients(x, y), *(p.grad for p in model.parameters())]
    run.device = on_xla
    model, x, y = place(Network()), x.to(on_xla), y.to(on_xla)
    theirs = results(model, MicroSteps(run, lambda x, y: model(x, y) / 3, model.parameters())(x, y))
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=0.05, atol=2e-3)
    """, tmp_path)


def test_each_micro_step_and_each_step_drops_others_and_a_seed_repeats_it(tmp_path):
    run_script(SETUP + """
    x, y = (t[:1].expand(4, -1, -1).contiguous() for t in tokens(1))    # four times the same: only dropout differs

    def trained(n, *seed):
        model = place(Network(dropout=0.5))
        gradients = MicroSteps(run, lambda x, y: model(x, y) / n, model.parameters())
        run.seed(*seed)
        return results(model, gradients(x[:n], y[:n]))

    once, again, other = trained(4, 1, 2), trained(4, 1, 2), trained(4, 1, 3)
    assert all(map(torch.equal, once, again)), "a step that is made again after a resume must be the same"
    assert float(once[0]) != float(other[0])
    assert abs(float(once[0]) - float(trained(1, 1, 2)[0])) > 1e-4, "all micro-steps dropped the same"
    """, tmp_path)


def test_python_traces_it_twice_and_one_program_serves_all_steps(tmp_path):
    run_script(SETUP + """
    model, calls = place(Network()), []
    def loss(x, y):
        calls.append(1)
        return model(x, y) / 3
    gradients = MicroSteps(run, loss, model.parameters())
    for step in range(6):
        gradients(*tokens(3, step))
        run.sync()
        compiled = compiled if step > 1 else run.compile_count()
    assert len(calls) == 2 and run.compile_count() == compiled
    gradients(*tokens(2))                       # another number of micro-steps is another loop
    assert len(calls) == 3
    """, tmp_path)


def test_a_micro_step_that_overwrites_its_weights_is_refused(tmp_path):
    """It ended in a segmentation fault."""
    done = run_script(SETUP + """
    class ByMethod(Network):
        def rest(self, x):
            return self.out(torch.tanh(self.inner(x)))

        def forward(self, x, y):
            x = run.checkpoint_function()(self.rest, self.table(x))
            return F.cross_entropy(x.flatten(0, -2), y.flatten())

    model = place(ByMethod())
    gradients = MicroSteps(run, model, model.parameters())
    gradients(*tokens(2))
    """, tmp_path, check=False)
    assert done.returncode == 1 and "parameters were overwritten while the micro-step was traced" in done.stdout, done.stdout


@pytest.mark.parametrize("change", ["3.0 + step", "step"])      # 0 and 1 are in the program, other numbers are sent to it
def test_a_micro_step_that_changes_is_refused_at_the_second_step(tmp_path, change):
    """Traced once, the first would silently be trained for ever."""
    done = run_script(SETUP + f"""
    model = place(Network())
    gradients = MicroSteps(run, lambda x, y: model(x, y), model.parameters())
    for step in range(2):
        model.factor = {change}
        gradients(*tokens(2))
        run.sync()
    """, tmp_path, check=False)
    assert done.returncode and "UserError: The micro-step of the second optimizer step is not that of the first" in done.stdout


def test_a_program_is_compared_by_its_operations_and_not_by_its_names():
    from runtime import operations_of
    text = """HloModule a.1, entry
      %sum.3 (x.1: f32[]) -> f32[] {
      %constant.7 = bf16[] constant(0.25), metadata={op_name="model.3/x"}
      ROOT %add.12 = f32[2]{0} add(f32[2]{0} %p0.3, f32[2]{0} %get-tuple-element.163)"""
    renamed = text.replace("a.1", "b.2").replace(".12 ", ".13 ").replace("%p0.3", "%p0.4").replace("model.3", "model.4")
    assert operations_of(text) == operations_of(renamed) and len(operations_of(text)) == 3
    for before, after in (("0.25", "0.75"), ("f32[2]{0} add", "f32[2]{0} multiply"), ("f32[2]", "f32[3]")):
        assert operations_of(text) != operations_of(text.replace(before, after))


def test_what_it_uses_of_torch_xla_without_a_public_name_is_there(tmp_path):
    """`torch_xla.experimental.scan` is made of these. When one has moved, see there how it is done now."""
    run_script(SETUP + """
    inner = torch_xla._XLAC
    for name in ("_xla_user_computation", "_get_seed_info_id", "_get_tensors_xla_device_data_node"):
        assert hasattr(inner, name), f"torch_xla._XLAC.{name} has moved: py/runtime.py needs it"
    for name in ("build", "hlo", "tensor_parameter_id", "device_parameter_id_tensor_mapping"):
        assert hasattr(inner.lowering.LoweringContext, name), f"LoweringContext.{name} has moved: py/runtime.py needs it"
    """, tmp_path)
