"""The recompile guard on XLA's CPU backend: each way to make XLA compile again is named, a steady loop is not."""
import pytest
from conftest import run_script

LOOP = """
    import runtime as rt
    platform = rt.patch_environment("xla-cpu")
    import torch
    from compile_guard import CompileGuard

    def worker():
        runtime = rt.Runtime("fp32")
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4).to(runtime.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), capturable=True, foreach=False)
        guard = CompileGuard(runtime)
        for step in range(1, 13):
            rate = torch.tensor(0.01 / step).to(runtime.device)
            for group in optimizer.param_groups:
                group["lr"] = rate
            rows, exponent, factor = {setting}
            x = torch.rand(rows, 4).to(runtime.device)
            loss = ((model(x).square() + 1.0) ** exponent * factor).mean()
            loss.backward()
            runtime.optimizer_step(optimizer, 1.0)
            with guard.watch(step, loss.detach(), x=x{given}):
                runtime.sync()
        print(f"said {{min(5, len(guard.messages))}} things")

    rt.launch(worker, (), platform)
"""


def messages(tmp_path, setting: str, given: str = "") -> list:
    output = run_script(LOOP.format(setting=setting, given=given), tmp_path).stdout
    found = [line for line in output.splitlines() if line.startswith("RECOMPILED")]
    assert output.rstrip().endswith(f"said {len(found)} things"), output
    return found


def test_a_steady_loop_is_left_in_peace(tmp_path):
    assert messages(tmp_path, "8, 1.5, 0.37 / step") == []      # a changing factor is an input, no constant


def test_a_ragged_batch(tmp_path):
    (said,) = messages(tmp_path, "(5 if step == 9 else 8), 1.5, 2.5")
    assert said.startswith("RECOMPILED step 9: XLA compiled a new program after the warm-up")
    assert "x is 5x4 float32, before it was 8x4 float32. Give every batch the same shape: leave out the smaller" in said


def test_a_growing_sequence(tmp_path):
    said = messages(tmp_path, "8 + step, 1.5, 2.5")
    assert said[0].startswith("RECOMPILED step 3:") and "x grows: 9x4 float32, 10x4 float32, 11x4 float32. " in said[0]
    assert "fill up to one length" in said[0]
    assert len(said) == 5 and said[-1].endswith("(no more of these will be shown)")


@pytest.mark.parametrize("given", ["", ", exponent=exponent"])
def test_a_number_baked_into_the_program(tmp_path, given):
    said = messages(tmp_path, "8, (1.5 if step < 6 else 1.5 + step / 16), 2.5", given)
    assert said[0].startswith("RECOMPILED step 6:")
    assert ("the number exponent went from 1.5 to 1.875" if given else "an exponent, an epsilon") in said[0]
    named = next(line for line in said if "has become" in line)
    assert "step 8: the number 1.9375 has become 2 in aten::pow" in named and "as a tensor on the device" in named
