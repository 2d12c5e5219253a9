"""The preflight: the programs it compiles are the ones torch_xla would run, and what the TPU's compiler says about them.

The figures in golden_preflight.json come from the compiler. When a change to the model, the optimizer or the loop moves
them on purpose, look at the difference, then write the new ones:  python tests/test_preflight.py
"""
import importlib.util
import json
import os
import re
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

if __name__ != "__main__":
    from conftest import ROOT, run_script
else:
    ROOT = Path(__file__).resolve().parents[1]
    sys.path.insert(0, str(ROOT / "py"))

import preflight
from runtime import UserError

GOLDEN = Path(__file__).with_name("golden_preflight.json")
SMALL = dict(preset="tiny", vocab_size=1024, T=128, n_layer=2, n_head=2, n_embd=128, tokens_per_step=32768, micro_batch=8)

missing = [name for name in (*preflight.REQUIRED, "torch_xla") if importlib.util.find_spec(name) is None]
needs_compiler = pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} cannot be had here: the TPU's compiler is a"
                                    f" package for Linux x86-64 (pip install {' '.join(preflight.pinned())})")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The report on a small model for v5e-8, and the folder with its programs."""
    folder = tmp_path_factory.mktemp("small")
    return preflight.preflight("gpt", "v5e-8", SMALL, keep=folder), folder


def summary(report: dict) -> dict:
    """What a change of the code may not move unnoticed. Cycles are the compiler's idea and get a margin."""
    programs = {}
    for number, r in enumerate(report["programs"]):
        programs[f"{number} {r['kind']}"] = dict(
            per_step=r["per_step"], peak_bytes=round(r["peak_gib"] * preflight.GIB), cycles=r["cycles"], dots=r["dots"],
            reductions=[one["shape"] for one in r["reductions"]])
    return dict(libtpu=report["versions"]["libtpu"], training_programs=report["training_programs"],
                reductions_a_step=report["reductions"], reduced_bytes=report["reduced_bytes"], dtypes=report["dtypes"],
                programs=programs)


# ---- the compiler's figures ------------------------------------------------------------------------------------------

@needs_compiler
def test_figures_are_the_golden_ones(small):
    golden, now = json.loads(GOLDEN.read_text()), summary(small[0])
    hint = "if this change is meant: python tests/test_preflight.py writes the new figures"
    for name in ("libtpu", "training_programs", "reductions_a_step", "reduced_bytes", "dtypes"):
        assert now[name] == golden[name], f"{name}; {hint}"
    assert now["programs"].keys() == golden["programs"].keys(), hint
    for name, expected in golden["programs"].items():
        found = now["programs"][name]
        assert {k: found[k] for k in ("per_step", "dots", "reductions")} == {
            k: expected[k] for k in ("per_step", "dots", "reductions")}, f"{name}; {hint}"
        assert found["peak_bytes"] == pytest.approx(expected["peak_bytes"], rel=0.02), f"{name}; {hint}"
        assert found["cycles"] == pytest.approx(expected["cycles"], rel=0.1), f"{name}; {hint}"


@needs_compiler
def test_weights_and_state_are_fp32_and_products_bf16(small):
    report = small[0]
    held = report["dtypes"]
    assert set(held["parameters"]) == set(held["optimizer state"]) == {"float32"}
    parameters = held["parameters"]["float32"]
    assert held["optimizer state"]["float32"] == 2 * parameters
    step = next(r for r in report["programs"] if r["kind"] == "optimizer step")
    wide = sum(count for name, count in step["dots"].items() if not name.startswith("bf16 x bf16"))
    assert wide <= SMALL["n_layer"]         # one in the backward pass of each layer's attention kernel, at most
    assert sum(step["dots"].values()) - wide >= 13 * 3 - 6 * SMALL["n_layer"]


@needs_compiler
def test_all_gradients_are_reduced_once_a_step(small):
    report = small[0]
    assert report["reductions"] == 1
    assert report["reduced_bytes"] == pytest.approx(report["dtypes"]["parameters"]["float32"], abs=64)
    step = next(r for r in report["programs"] if r["kind"] == "optimizer step")
    assert step["per_step"] == 1 and report["facts"]["micro_steps"] == 4
    runs = [o["count"] for o in step["operations"] if o["name"].startswith("model.blocks") and o["name"].endswith(" mm")]
    assert runs and all(count % 4 == 0 for count in runs), "the loop's operations count as often as it runs"


# One layer under GPT-2's vocabulary: compiles in seconds, and its logits are what fills the chip.
WIDE = dict(preset="tiny", vocab_size=50304, T=1024, n_layer=1, n_head=1, n_embd=128)


@needs_compiler
def test_largest_buffers_come_from_the_schedule(tmp_path):
    """The buffers found alive at the fullest moment add up to what the compiler says it needs."""
    report = preflight.preflight("gpt", "v5e-8", {**WIDE, "micro_batch": 2, "tokens_per_step": 32768}, evaluation=False,
                                 keep=tmp_path)
    step = next(r for r in report["programs"] if r["kind"] == "optimizer step")
    file = max(tmp_path.glob("*.hlo.txt"), key=lambda f: json.loads(f.with_suffix(".json").read_text())["temporary"])
    computations, entry = preflight.read_computations(file.read_text())
    alive = sum(b["bytes"] for b in preflight.largest_at_peak(computations, entry, count=10 ** 6))
    temporary = step["temporary_gib"] * preflight.GIB
    assert 0.97 * temporary < alive < 1.03 * temporary      # the rest is padding, which the shapes do not show
    assert step["largest"][0]["module"].startswith("model") and "50304" in step["largest"][0]["shape"]
    assert step["largest"][0]["bytes"] >= 2 * 1024 * 50304 * 2


# Six narrow layers under a small vocabulary: what a block keeps for its backward pass is what fills the chip.
DEEP = dict(preset="tiny", vocab_size=512, T=512, n_layer=6, n_head=2, n_embd=128, micro_batch=16, tokens_per_step=65536,
            attention="plain")


@needs_compiler
def test_recomputed_blocks_take_less_memory_and_more_time():
    """The compiled program, not the intention: XLA is free to undo a recomputation, and did in other versions."""
    kept, again = (preflight.preflight("gpt", "v5e-8", {**DEEP, "recompute": wanted}, evaluation=False)
                   for wanted in (False, True))
    one, other = (next(r for r in report["programs"] if r["kind"] == "optimizer step") for report in (kept, again))
    assert other["temporary_gib"] < 0.5 * one["temporary_gib"]
    assert 1.15 * one["cycles"] < other["cycles"] < 1.6 * one["cycles"]
    assert sum(other["dots"].values()) > sum(one["dots"].values())


@needs_compiler
def test_a_template_of_its_own_goes_through_the_same_door():
    """The guides' recipe, small: all that is held is bf16, masters and averages too."""
    recipe = str(ROOT / "bench" / "guides_recipe.py")
    small = dict(n_layer=1, n_embd=128, n_head=2, T=128, vocab_size=512, micro_batch=2, tokens_per_step=4096)
    words = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    own, settings = preflight.parse_arguments(["--template", recipe, *words])
    report = preflight.preflight(own.template, "v5e-8", settings, evaluation=False)
    assert report["fits"] and report["reductions"] == 1 and report["facts"]["micro_steps"] == 2
    micro_step = next(r for r in report["programs"] if r["kind"] == "micro-step")       # as the guides have it
    assert set(micro_step["dots"]) == {"bf16 x bf16 -> bf16"} and not micro_step["kernels"]
    parameters = report["dtypes"]["parameters"]["float32"] / 4      # torch still calls them float32
    assert report["reduced_bytes"] == pytest.approx(2 * parameters, abs=64)


def test_kernels_are_counted_by_the_blocks_they_compute():
    """T=1024: three of four blocks forward; backward one of 1024 keys, so all."""
    import tpu_attention
    assert tpu_attention.blocks_computed(1024) == (0.75, 1.0) and tpu_attention.blocks_computed(512) == (1.0, 1.0)
    assert tpu_attention.blocks_computed(2048) == (10 / 16, 0.75) and tpu_attention.blocks_computed(1536) == (6 / 9, 6 / 9)
    facts = dict(T=1024, n_layer=12, n_embd=768, n_head=6, tokens_per_step=8 * 8192)
    flops = 12 * 8 * 6 * (0.75 + 2.5) * (2 * 2 * 1024 * 1024 * 128)         # layers, windows, heads, products of T x T x D
    found = preflight.kernel_milliseconds(preflight.CHIPS["v5e-8"], facts)
    assert found == pytest.approx(flops / (0.6 * 197e12) * 1e3)
    assert preflight.kernel_milliseconds(preflight.CHIPS["v5e-8"], {**facts, "n_head": 12}) == pytest.approx(2 * found)


@needs_compiler
def test_table_names_modules_and_says_estimate(small):
    text = preflight.show(small[0])
    assert "an estimate by the TPU compiler, not a measurement" in text
    for expected in ("tokens/s", "MFU", "fits", "model.blocks.*.attn", "(backward)", "bf16 x bf16", "1 reduction of"):
        assert expected in text, text


@needs_compiler
def test_running_out_of_memory_is_a_result():
    report = preflight.preflight("gpt", "v5e-8", {**WIDE, "micro_batch": 256, "tokens_per_step": 2097152})
    assert not report["fits"] and report["peak_gib"] > report["memory_limit_gib"] == 15.75
    failed = next(r for r in report["programs"] if r.get("error"))
    assert any("50304" in b["shape"] for b in failed["largest"]) and "tokens_per_second" not in report
    text = preflight.show(report)
    assert "DOES NOT FIT" in text and "[256,1024,50304]" in text and "Traceback" not in text


@needs_compiler
@pytest.mark.parametrize("chip", ["v5e-1", "v6e-1"])
def test_a_single_chip_reduces_nothing(chip):
    report = preflight.preflight("gpt", chip, dict(preset="tiny"), evaluation=False)
    assert report["fits"] and report["reductions"] == 0 and report["step_ms"] > 0


@needs_compiler
def test_the_mlp_goes_through_the_same_door():
    report = preflight.preflight("mlp", "v5e-8", {})
    assert report["fits"] and report["reductions"] == 1 and report["facts"]["tokens_per_step"] == 512
    assert [r["per_step"] for r in report["programs"]] == [1]
    assert preflight.show(report).startswith("mlp  on v5e-8")


def test_search_finds_the_largest_that_fits(monkeypatch):
    """Only sizes that share out the batch are tried, and each at most once. Here 24 and less fit."""
    tried = []

    def fake(template, chip, settings, say, evaluation):
        tried.append(settings["micro_batch"])
        return dict(fits=tried[-1] <= 24, peak_gib=tried[-1], micro_batch=tried[-1])

    monkeypatch.setattr(preflight, "preflight", fake)
    say = lambda line: None     # noqa: E731
    search = lambda **more: preflight.search_micro_batch(dict(preset="gpt2-124m", **more), preflight.CHIPS["v5e-8"], say)  # noqa: E731
    assert search()["micro_batch"] == 16 and len(tried) == len(set(tried)) <= 3 and set(tried) <= {1, 2, 4, 8, 16, 32, 64}
    assert search(tokens_per_step=1024 * 8 * 36)["micro_batch"] == 18
    monkeypatch.setattr(preflight, "preflight", lambda *rest, **more: dict(fake(*rest, **more), fits=False))
    assert search()["micro_batch"] == 1


# ---- are they the programs that would run? ---------------------------------------------------------------------------

REAL_RUN = """
    import os, sys
    os.environ["XLA_FLAGS"] = "--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_pass_re=NONE"
    from pathlib import Path
    import preflight
    preflight.rt.patch_environment("xla-cpu")
    os.environ["XLA_ALWAYS_ALLREDUCE"] = "1"

    class EightReplicas(preflight.rt.Runtime):
        def __init__(self, precision="auto", processes=0):
            super().__init__(precision)
            self.world_size = 8
        def check_replicas(self, tensors, when):
            pass

    settings = dict(preset="tiny", tokens_per_step=4096, stop_at=2, max_steps=2, eval_every=9, save_every=9, sample_tokens=0)
    Path("run").mkdir()
    worker, arguments, facts = preflight.gpt_template(settings, preflight.CHIPS["v5e-8"], Path("run"))
    preflight.rt.Runtime = EightReplicas
    import train_gpt
    train_gpt.save = lambda *rest: None
    worker(*arguments)
"""


def interface(header: str) -> tuple:
    """(inputs, outputs, donated inputs) of an HLO module, each as a sorted list of shapes."""
    layout = re.sub(r"/\*.*?\*/|\{[0-9,]*\}", "", re.search(r"entry_computation_layout=\{(.*)\}", header)[1])
    inputs, outputs = (re.findall(r"\w+\[[0-9,]*\]", part) for part in layout.split(")->"))
    donors = re.search(r"buffer_donor=\{ (.*?) \}, entry", header)
    donated = [inputs[int(number)] for number in re.findall(r"\((\d+), ", donors[1])] if donors else []
    return sorted(inputs), sorted(outputs), sorted(donated)


@needs_compiler
def test_programs_are_those_that_torch_xla_runs(tmp_path):
    """Inputs, outputs and donated buffers of every training program, against the modules torch_xla hands to XLA."""
    run_script(REAL_RUN.format(dump=tmp_path / "dump"), tmp_path)
    real = [interface(file.read_text().split("\n", 1)[0]) for file in (tmp_path / "dump").glob("*before_optimizations.txt")]
    traced = run_script("""
        import json, sys
        from pathlib import Path
        import preflight
        folder = Path("traced")
        folder.mkdir()
        preflight.trace(dict(template="gpt", chip="v5e-8", names=True,
                             settings=dict(preset="tiny", tokens_per_step=4096)), folder)
        from jax._src.lib import xla_client
        programs = json.loads((folder / "programs.json").read_text())["programs"]
        for p in programs:
            p["header"] = xla_client.XlaComputation((folder / p["file"]).read_bytes()).as_hlo_text().split("\\n", 1)[0]
        Path("traced.json").write_text(json.dumps(programs))
    """, tmp_path)
    assert "Traceback" not in traced.stdout
    programs = [p for p in json.loads((tmp_path / "traced.json").read_text()) if p["per_step"] or p["kind"] == "evaluation"]
    assert {p["kind"] for p in programs} == {"optimizer step", "evaluation"}
    for p in programs:
        layout = re.sub(r"/\*.*?\*/|\{[0-9,]*\}", "", re.search(r"entry_computation_layout=\{(.*)\}", p["header"])[1])
        order = re.findall(r"\w+\[[0-9,]*\]", layout.split(")->")[0])
        inputs, outputs, _ = interface(p["header"])
        assert (inputs, outputs, sorted(order[n] for n in p["donated"])) in real, p["kind"]


@needs_compiler
def test_names_change_nothing(tmp_path):
    """The module names that the table shows are annotations: without them the programs are the same."""
    done = run_script("""
        import json, re, subprocess, sys
        from pathlib import Path
        import preflight
        def programs(names):
            folder = Path(f"names_{names}")
            folder.mkdir()
            preflight.run_child("trace", dict(template="gpt", chip="v5e-8", names=names,
                                settings=dict(preset="tiny", tokens_per_step=2048)), folder, print)
            from jax._src.lib import xla_client
            listed = json.loads((folder / "programs.json").read_text())["programs"]
            stored = [(folder / p["file"]).read_bytes() for p in listed]
            return stored, [xla_client.XlaComputation(one).as_hlo_text() for one in stored]     # the text has no names
        named, plain = programs(True), programs(False)
        assert named[1] == plain[1] and len(named[1]) >= 4
        assert any(b"blocks.1" in one and b"_backward" in one for one in named[0])
        assert not any(b"blocks.1" in one for one in plain[0])
    """, tmp_path)
    assert done.returncode == 0


# ---- mistakes and small parts ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("arguments, expected", [
    (["--chip", "v9"], "chip='v9' is not known: use v5e-8, v5e-1, v6e-1."),
    (["--template", "cnn"], "template='cnn' is not known"),
    (["--micro_bach", "4"], "did you mean 'micro_batch'?"),
    (["--template", "mlp", "--search"], "--search varies micro_batch"),
    (["--template", "mlp", "--width", "4"], "the settings of mlp are"),
])
def test_wrong_arguments_end_with_one_sentence(arguments, expected):
    with pytest.raises(preflight.UserError, match=re.escape(expected)):
        preflight.parse_arguments(arguments)


@needs_compiler
def test_a_wrong_setting_is_told_by_the_template(tmp_path):
    done = run_script(f"""
        import subprocess, sys
        done = subprocess.run([sys.executable, {str(ROOT / "py" / "preflight.py")!r}, "--preset", "tiny", "--micro_batch", "3"],
                              capture_output=True, text=True)
        assert done.returncode == 2, done
        print(done.stderr)
    """, tmp_path)
    assert "UserError: tokens_per_step=256 is 8 windows" in done.stdout and "Traceback" not in done.stdout


def test_missing_compiler_is_one_sentence(monkeypatch):
    monkeypatch.setattr(preflight.rt, "installed_version", lambda name: None if name == "libtpu" else "1")
    with pytest.raises(preflight.UserError, match=r"preflight needs libtpu, not installed here: pip install .*libtpu==\d"):
        preflight.preflight("gpt", "v5e-8", {})


OUT_OF_MEMORY = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 57.41G of 15.75G \
hbm. Exceeded hbm capacity by 41.66G.

  Largest program allocations in hbm:

  1. Size: 1.54G
     Operator: op_name="model.157/aten__mm" source_file="gpt.py" source_line=130 source_end_line=130
     Shape: bf16[16,1024,50304]{2,1,0:T(8,128)(2,1)}
     Unpadded size: 1.54G
     ==========================

  2. Size: 768.00M
     Operator: op_name="model.153/blocks.0.4/attn.2/aten__softmax" source_file="functional.py" source_line=2133
     Shape: f32[192,1024,1024]{1,2,0:T(8,128)}
     Unpadded size: 768.00M
"""


def test_out_of_memory_report_is_read():
    found = preflight.read_out_of_memory(OUT_OF_MEMORY)
    assert found["needed_gib"] == 57.41
    assert [b["module"] for b in found["largest"]] == ["model", "model.blocks.*.attn"]
    assert found["largest"][1] == dict(bytes=768 * 2 ** 20, module="model.blocks.*.attn", shape="f32[192,1024,1024]")
    alone = preflight.read_out_of_memory("RESOURCE_EXHAUSTED: Allocation (size=26373783552) would exceed memory (size=171798)"
                                         " :: #allocation135 [shape = 'bf16[256,1024,50304]{2,1,0:T(8,128)}', space=hbm]")
    assert (round(alone["needed_gib"], 2), alone["largest"][0]["shape"]) == (24.56, "bf16[256,1024,50304]")
    assert preflight.read_out_of_memory("INTERNAL: something else") is None


PROGRAM = """HloModule jit, is_scheduled=true

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %inner = f32[8]{0} fusion(%p), kind=kLoop, calls=%f, metadata={op_name="model.3/blocks.1.4/mlp.2/aten__mul"}, \
backend_config={"estimated_cycles":"10"}
  ROOT %t = (s32[], f32[8]) tuple(%p, %inner)
}

ENTRY %main (a: f32[1024]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  %loop = (s32[], f32[8]) while(%a), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  %big = f32[1024,1024]{1,0} fusion(%a), kind=kLoop, calls=%f, metadata={op_name="model.3/aten__mm"}, \
backend_config={"estimated_cycles":"100"}
  %small = f32[1024]{0} fusion(%big), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"5"}
  %sum = f32[1024]{0} all-reduce(%small), replica_groups={}, to_apply=%add
  %late = f32[512]{0} fusion(%sum), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"1"}
  ROOT %out = f32[1024]{0} fusion(%late), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"1"}
}
"""


def test_a_scheduled_program_is_read():
    found = preflight.read_program(PROGRAM)
    assert found["cycles"] == 7 * 10 + 100 + 5 + 1 + 1
    assert found["operations"][:2] == [dict(name="model mm", cycles=100, count=1),
                                       dict(name="model.blocks.*.mlp mul", cycles=70, count=7)]
    assert found["reductions"] == [dict(shape="f32[1024]", bytes=4096)]
    assert found["largest"][0] == dict(bytes=4 * 2 ** 20, module="model", shape="f32[1024,1024]")
    assert len(found["largest"]) == 2       # the sum and what follows are born after the fullest moment


def test_a_loop_runs_as_often_as_its_condition_says():
    """The compiler does not write it down of the loop over the micro-steps."""
    condition = """%c (q: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(16), metadata={op_name="xla__micro_steps"}
  %q = (s32[], f32[8]) parameter(0)
  ROOT %less = pred[] compare(%q, %limit), direction=LT
}

ENTRY"""
    unknown = PROGRAM.replace(', backend_config={"known_trip_count":{"n":"7"}}', "")
    assert preflight.read_program(unknown.replace("ENTRY", condition))["cycles"] == 16 * 10 + 100 + 5 + 1 + 1
    assert preflight.read_program(unknown)["cycles"] == 10 + 100 + 5 + 1 + 1, "once, where nothing says it"


def test_donated_arguments_are_marked():
    mlir = ('func.func public @main(%arg0: tensor<4xf32>, %arg1: tensor<2x4xbf16> {mhlo.sharding = "{replicated}"}, '
            '%arg2: tensor<f32>) -> (tensor<4xf32>) {')
    marked = preflight.mark_donated(mlir, {0, 1})
    assert marked.count("jax.buffer_donor = true") == 2
    assert "%arg0: tensor<4xf32> {jax.buffer_donor = true}" in marked and "%arg2: tensor<f32>)" in marked


@needs_compiler
@pytest.mark.timeout(1800)
@pytest.mark.skipif("PREFLIGHT_SLOW" not in os.environ, reason="takes minutes: PREFLIGHT_SLOW=1 runs it")
def test_gpt2_124m_fits_a_v5e(tmp_path):
    report = preflight.preflight("gpt", "v5e-8", dict(preset="gpt2-124m"), print)
    assert report["fits"] and report["peak_gib"] <= 14.5 and report["tokens_per_second"] > 400_000


@needs_compiler
def test_lora_is_one_replica_in_eight_partitions_whose_weights_are_gathered(tmp_path):
    import train_lora
    from transformers import LlamaConfig
    LlamaConfig(**{**train_lora.SMALL_LLAMA, "hidden_size": 256, "vocab_size": 4096}).save_pretrained(tmp_path / "model")
    report = preflight.preflight("lora", "v5e-8", dict(preset="tiny", model=str(tmp_path / "model")), evaluation=False,
                                 names=False, keep=tmp_path / "kept")
    step = next(program for program in report["programs"] if program["kind"] == "micro-step")
    frozen = report["dtypes"]["parameters"]["bfloat16"]
    assert report["fits"] and step["arguments_gib"] * 2 ** 30 < frozen, "each chip holds the whole base"
    assert set(report["dtypes"]["optimizer state"]) == {"float32"} and set(step["dots"]) == {"bf16 x bf16 -> bf16"}
    text = next(path.read_text() for path in (tmp_path / "kept").glob("*.hlo.txt") if "all-gather" in path.read_text())
    assert "num_partitions=8" in text


def test_a_compilation_that_the_system_ends_for_lack_of_memory_says_so(tmp_path):
    def end_it():
        while not (children := psutil.Process().children()):
            time.sleep(0.01)
        children[0].kill()
    threading.Thread(target=end_it).start()
    with pytest.raises(UserError, match="The preflight's compile was ended by the system, .* memory runs out: lower micro_batch"):
        preflight.run_child("compile", {}, tmp_path, print)


if __name__ == "__main__":
    figures = summary(preflight.preflight("gpt", "v5e-8", SMALL, print))
    GOLDEN.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"wrote {GOLDEN}")
