"""Every command in the README and in docs/ is run here or belongs to another test; tables and languages agree."""
import ast
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, clean_environment, run_script

import train_gpt

PAGES = sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")])
NEEDS_A_TPU = "# needs a TPU"

# Run by another test, or too long for one; what stands behind each is looked at below.
ELSEWHERE = {"make test": "what runs this test", "make test-2.8": "tests/test_virtual_tpu.py in another environment",
             "make demo": "its commands below", "make rehearse": "its commands below", "make soak": "tests/soak.py",
             "make preflight": "tests/test_preflight.py", "make bench": "bench/checkpoint_speed.py",
             "make notebooks": "tests/test_notebooks.py", "make owner": "tests/test_notebooks.py",
             "make kaggle": "tests/test_kaggle_files.py"}


def commands(page: Path) -> list[str]:
    """Commands of a page, in its order: lines of code blocks, and inline code, that begin with a program of ours."""
    text = page.read_text()
    blocks = re.findall(r"^```(?:bash|sh)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found = [line for block in blocks for line in block.splitlines() if line.startswith((".venv/bin/", "make "))]
    found += re.findall(r"`((?:\.venv/bin/|make )[^`]+)`", prose)
    return [line.partition(" # ")[0].strip() for line in found if NEEDS_A_TPU not in line]


ALL = list(dict.fromkeys(command for page in PAGES for command in commands(page)))
PYTEST = [command for command in ALL if " -m pytest " in command]
MAKE = [command for command in ALL if command.startswith("make ")]
PROGRAMS = [command for command in ALL if command not in PYTEST + MAKE]


def test_commands_are_found_on_the_pages():
    assert len(PYTEST) >= 15 and len(MAKE) >= 8 and len(PROGRAMS) >= 6


@pytest.mark.parametrize("command", PYTEST)
def test_a_pytest_command_selects_tests_that_exist(command):
    words = shlex.split(command)
    wanted = words[words.index("-k") + 1].split(" or ") if "-k" in words else ["test_"]
    files = [ROOT / word for word in words if word.startswith("tests/")]
    assert files and all(file.exists() for file in files), command
    names = [node.name for file in files for node in ast.walk(ast.parse(file.read_text()))
             if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    unmatched = [part for part in wanted if not any(part in name for name in names)]
    assert not unmatched, f"{command}: no test has {unmatched} in its name"


@pytest.mark.parametrize("command", MAKE)
def test_a_make_target_exists_and_its_training_commands_are_accepted(command):
    assert " ".join(command.split()[:2]) in ELSEWHERE, f"{command}: run it in a test, and say here in which"
    dry = subprocess.run(["make", "-n", *command.split()[1:], "PYTHON=false"], cwd=ROOT, text=True, capture_output=True)
    assert dry.returncode == 0, dry.stderr
    for line in dry.stdout.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        script = next((ROOT / word for word in words if word.endswith(".py")), None)
        assert script is None or script.exists(), line
        if script and script.name == "train_gpt.py":
            train_gpt.make_config(**train_gpt.settings_from_command_line(words[words.index("py/train_gpt.py") + 1:]))


@pytest.fixture(scope="module")
def machine(tmp_path_factory, shards):
    """A folder like the repository's, with what the pages' commands speak of: texts, shards, an error's text, a run."""
    folder = tmp_path_factory.mktemp("reader")
    for part in ("py", "data_prep", "notebooks", "tests", "docs"):
        (folder / part).symlink_to(ROOT / part)
    for package in ("json", "email", "xml"):
        shutil.copytree(Path(__import__(package).__file__).parent, folder / "my_texts" / package)
    shutil.copy(ROOT / "README.md", folder / "book.txt")
    shutil.copytree(shards, folder / "data/stdlib")
    (folder / "error.txt").write_text("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    run(folder, ".venv/bin/python py/train_gpt.py --preset tiny --data_folder data/stdlib --run_folder runs/demo"
        " --max_steps 4")
    return folder


def run(folder: Path, command: str) -> str:
    words = shlex.split(command)
    words[0] = str(Path(sys.executable).parent / Path(words[0]).name)
    done = subprocess.run(words, cwd=folder, env=clean_environment(PYTHONPATH=""), text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=200)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}"
    return done.stdout


def test_every_other_command_of_the_pages_runs_in_their_order(machine):
    for command in PROGRAMS:
        run(machine, command)


def test_the_whole_program_of_from_gpu_runs_as_it_stands_with_the_same_falling_losses(tmp_path):
    program = re.search(r"```python\n(.*?)```", (ROOT / "docs/from_gpu.md").read_text(), re.DOTALL)[1]
    assert program.count('"auto")') == 1 and program.count("(worker, (), platform)") == 1
    losses = []
    for platform, processes in (("cpu", 1), ("cpu", 2), ("xla-cpu", 0)):
        code = program.replace('"auto")', f'"{platform}")').replace("(), platform)", f"(), platform, {processes})")
        output = run_script(code, tmp_path).stdout
        losses.append([float(line.split()[-1]) for line in output.splitlines() if line.startswith("step ")])
    assert len(losses[0]) == 5 and losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], abs=2e-5) and losses[2] == pytest.approx(losses[0], abs=2e-5)


def table_rows(text: str) -> list[list[str]]:
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in text.splitlines()
            if line.startswith("|") and not set(line) <= set("|- ")]


def test_the_presets_page_agrees_with_the_presets_and_the_readmes_figures():
    rows = table_rows((ROOT / "docs/presets.md").read_text())
    described = {row[0]: row for row in rows if len(row) == 7 and row[0] != "preset"}
    assert list(described) == list(train_gpt.PRESETS)
    for name, (_, parameters, shape, T, tokens, windows, steps) in described.items():
        config = train_gpt.make_config(name)
        expected = (train_gpt.count_parameters(config.model(config.vocab_size or 384)),
                    f"{config.n_layer} x {config.n_head} x {config.n_embd}", config.T, config.tokens_per_step,
                    config.micro_batch, config.max_steps)
        assert (parameters, shape, T, tokens, windows, steps) == tuple(
            f"{value:,}" if isinstance(value, int) and value > 1024 else str(value) for value in expected)
    estimated = [row for row in rows if len(row) == 6 and row[0].startswith("gpt2")]
    readme = [row for row in table_rows((ROOT / "README.md").read_text()) if len(row) == 5 and row[1].split(" ")[0] in
              ("kernels", "written")]
    assert len(estimated) == len(readme) >= 4
    for ours, theirs in zip(estimated, readme):
        assert ours[0] == theirs[0] and ours[1].split(" ")[0] == theirs[1].split(" ")[0] and ours[2:5] == theirs[2:]
        hours = 19073 * 524288 / int(ours[2].replace(",", "")) / 3600
        assert float(ours[5]) == round(hours, 1), ours


def test_links_between_the_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
            built_from = (page.parent / target).with_suffix(".py") if target.endswith(".ipynb") else page.parent / target
            assert target.startswith("http") or built_from.exists(), f"{page.name}: {target}"


def skeleton(text: str) -> dict:
    """What a translation leaves as it is: commands, tables without their words, links, headings by level, inline code."""
    text = re.sub(r"\[(?:English|中文)\]\(README[.\w]*\)\n\n", "", text)
    blocks = [[line.partition(" # ")[0].rstrip() for line in block.splitlines()]
              for block in re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    tables = [[sorted(re.findall(r"`[^`]+`|[\d,.]*\d", cell)) for cell in row] for row in table_rows(prose)]
    return dict(blocks=blocks, tables=tables, links=sorted(re.findall(r"\]\(([^)\s]+)\)", prose)),
                headings=[len(mark) for mark in re.findall(r"^(#+) ", prose, re.MULTILINE)],
                figures=sorted(re.findall(r"(?<![\w/])\d+[.,]\d[\d,.]*\d|(?<![\w/])\d+[.,]\d", prose)),
                points=len(re.findall(r"^(?:-|\d\.) ", prose, re.MULTILINE)), code=sorted(re.findall(r"`[^`]+`", prose)))


def test_the_chinese_readme_says_the_same():
    english, chinese = (skeleton((ROOT / name).read_text()) for name in ("README.md", "README.zh.md"))
    for part, expected in english.items():
        assert chinese[part] == expected, f"README.zh.md: {part} differ from README.md's"
