"""`accelerate launch` with the ready configuration files, and what Accelerate's precision switches really do."""
import subprocess
import sys

import pytest
from conftest import ROOT, clean_environment

import checkpoint as ckpt
import runtime as rt
import telemetry
import train_gpt

CPU = rt.Platform("cpu", 1, "test")
CONFIGS = ROOT / "accelerate_configs"


def accelerate_launch(config: str, script: str, *arguments: str, folder) -> str:
    """The output of the command that stands at the top of the configuration file."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / config),
               "--main_process_port", "0", str(ROOT / "py" / script), *arguments]
    done = subprocess.run(command, cwd=folder, env=clean_environment(), text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=280)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_two_cpu_processes_of_accelerate_launch_train_one_model_and_the_main_one_speaks(tmp_path):
    printed = accelerate_launch("cpu.yaml", "train_mlp.py", folder=tmp_path)
    assert printed.count("done: 2 processes on cpu, fp32, all replicas equal") == 1
    assert printed.count("platform: cpu (this machine, no accelerator used), 2 processes") == 1


def test_a_run_goes_on_under_accelerate_launch_exactly_where_it_stopped(shards, tmp_path):
    settings = dict(data_folder=str(shards), platform="cpu", processes=2, max_steps=6, eval_every=3, save_every=3)
    straight = train_gpt.launch(train_gpt.make_config("tiny", run_folder=str(tmp_path / "straight"), **settings), CPU)
    run = train_gpt.launch(train_gpt.make_config("tiny", run_folder=str(tmp_path / "run"), stop_at=3, **settings), CPU)
    printed = accelerate_launch("cpu.yaml", "resume_gpt.py", "--source", str(run), folder=tmp_path)
    losses = [[(r["step"], r["loss"]) for r in telemetry.read_log(folder) if "loss" in r] for folder in (straight, run)]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert ckpt.find_newest(run).step == 6 and printed.count("--- sample 1") == 1


def test_the_tpu_configuration_starts_one_process_that_starts_the_eight(shards, tmp_path):
    printed = accelerate_launch("tpu_v5e-8.yaml", "train_gpt.py", "--platform", "virtual-tpu", "--preset", "tiny",
                                "--tokens_per_step", "1024", "--max_steps", "2", "--sample_tokens", "0",
                                "--run_folder", "run", "--data_folder", str(shards), folder=tmp_path)
    assert "x 8 processes" in printed and "weights float32, optimizer state float32, matrix work bf16" in printed
    assert ckpt.find_newest(tmp_path / "run").step == 2


@pytest.mark.parametrize("config, processes", [("2xt4.yaml", 2), ("cpu.yaml", 2), ("tpu_v5e-8.yaml", 1)])
def test_accelerate_itself_reads_the_configuration_files(config, processes):
    from accelerate.commands.config.config_args import load_config_from_file
    read = load_config_from_file(str(CONFIGS / config))
    assert read.num_processes == processes and read.mixed_precision == "no"
    assert f"--config_file accelerate_configs/{config} " in (CONFIGS / config).read_text()


def test_a_worker_of_torch_xlas_spawn_is_seen_and_its_environment_left_alone():
    environ = {"PJRT_LOCAL_PROCESS_RANK": "3", "PJRT_LOCAL_PROCESS_COUNT": "8", "TPU_VISIBLE_CHIPS": "3"}
    before = dict(environ)
    assert rt.outer_launch(environ) == (8, 3) and rt.outer_launch({}) == (0, 0)
    assert rt.patch_environment("xla-cpu", environ).processes == 8 and environ == before


def test_the_page_shows_what_the_command_prints():
    done = subprocess.run([sys.executable, ROOT / "bench/precision_switches.py"], env=clean_environment(), text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=280)
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs/accelerate_config.md").read_text()
    first, second = done.stdout.strip().split("\n\n")
    assert first.startswith("| switch") and second.startswith("| configuration")
    assert first in page and second in page, f"the page is out of date, the command prints\n{done.stdout}"
