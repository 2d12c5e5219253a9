"""The notebooks as people use them: built from their sources, run by nbmake in another folder, run as scripts, edited."""
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest
from conftest import ROOT, clean_environment

NOTEBOOKS = ("mlp_minimal", "gpt_pretrain", "gpt_resume", "image_classification", "lora_finetune",
             "text_classifier")
FOLDER = ROOT / "notebooks"

# What a user in a hurry would edit in the settings cells; everything else stays as it is.
SHORTENED = {
    "gpt_pretrain": [('preset="auto", ', 'preset="tiny", stop_at=20, '), ('DATA = "auto"', 'DATA = "texts"'),
                     ('ENCODING = "auto"', 'ENCODING = "bytes"')],
    "image_classification": [('data="auto", ', 'data="digits", epochs=2, ')],
    "text_classifier": [('preset="auto", ', 'preset="small", epochs=1, batch=160, T=16, ')],
    "gpt_resume": [], "mlp_minimal": [("STEPS = 200", "STEPS = 60"), ("PROCESSES = 0", "PROCESSES = 2")],
    "lora_finetune": [('preset="auto", ', 'preset="tiny", ')],
}


def edited(text: str, name: str) -> str:
    for old, new in SHORTENED[name]:
        assert text.count(old) == 1, f"{name}: {old!r} stands {text.count(old)} times"
        text = text.replace(old, new)
    return text


def read(name: str):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def write_texts(folder: Path) -> None:
    """A few real documents: the source of Python's json and email packages."""
    for package in ("json", "email"):
        source = Path(__import__(package).__file__).parent
        (folder / package).mkdir(parents=True)
        for path in source.glob("*.py"):
            shutil.copy(path, folder / package)


def run_nbmake(folder: Path, *names: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "--nbmake", "--overwrite", "--nbmake-timeout=240", "-p", "no:cacheprovider",
               "-q", *(f"{name}.ipynb" for name in names)]
    return subprocess.run(command, cwd=folder, env=clean_environment(PYTHONPATH=""), text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)


def printed(folder: Path, name: str) -> str:
    """Everything an executed notebook printed."""
    notebook = nbformat.read(folder / f"{name}.ipynb", as_version=4)
    return "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))


def tree() -> str:
    return subprocess.run(["git", "status", "--porcelain", "--ignored=no"], cwd=ROOT, capture_output=True, text=True).stdout


def test_the_committed_notebooks_are_what_their_sources_build():
    done = subprocess.run([sys.executable, FOLDER / "build.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("drift", ["py/gpt.py", "notebooks/gpt_pretrain.py", "notebooks/gpt_pretrain.ipynb", "README.md"])
def test_a_drift_on_either_side_is_found_and_a_build_mends_it(tmp_path, drift):
    for part in ("py", "data_prep", "notebooks"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    for readme in ROOT.glob("README*.md"):
        shutil.copy(readme, tmp_path)
    path = tmp_path / drift
    if drift == "README.md":
        path.write_text(path.read_text().replace("colab-badge.svg", "other.svg", 1))
    else:
        path.write_text(path.read_text().replace("GPT", "GTP", 1))
    build = [sys.executable, tmp_path / "notebooks/build.py"]
    check = subprocess.run([*build, "--check"], capture_output=True, text=True)
    assert check.returncode == 1 and "differs from its sources" in check.stdout
    built = subprocess.run(build, capture_output=True, text=True)
    assert built.returncode == 1 and "now built" in built.stdout
    assert subprocess.run([*build, "--check"]).returncode == 0


def test_one_target_points_every_badge_at_a_fork(tmp_path):
    for part in ("py", "data_prep", "notebooks"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    for readme in ROOT.glob("README*.md"):
        shutil.copy(readme, tmp_path)
    build = [sys.executable, str(tmp_path / "notebooks/build.py")]
    assert subprocess.run([*build, "--owner", "ada/tpu-notes"]).returncode == 0
    owner = (FOLDER / "repository.txt").read_text().strip()
    for path in (*tmp_path.glob("notebooks/*.ipynb"), *tmp_path.glob("README*.md")):
        assert "github.com/ada/tpu-notes/blob/main/notebooks/" in path.read_text() and owner not in path.read_text()
    refused = subprocess.run([*build, "--owner", "nonsense"], capture_output=True, text=True)
    assert refused.returncode == 1 and "is not of the form" in refused.stderr


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_clean_and_survives_jupytexts_round_trip(name):
    notebook = read(name)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    again = jupytext.reads(jupytext.writes(notebook, "py:percent"), "py:percent")
    assert [(c.cell_type, c.source) for c in again.cells] == [(c.cell_type, c.source) for c in notebook.cells]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_order_of_cells_is_the_promised_one(name):
    sources = [cell.source for cell in read(name).cells]
    code = [cell.source for cell in read(name).cells if cell.cell_type == "code"]
    assert sources[0].startswith("# ") and "open-in-kaggle.svg" in sources[0] and "colab-badge.svg" in sources[0]
    settings, environment = code[0], next(i for i, text in enumerate(code) if "patch_environment(" in text and "%%" not in text)
    assert len(settings.splitlines()) <= 12 and "import" not in settings
    before = "\n".join(text for text in code[:environment] if not text.startswith("%%writefile"))
    assert not re.search(r"^\s*(import|from) ", before, re.MULTILINE), "something is imported before the environment is set"
    assert all(text.startswith("%%writefile") for text in code[1:environment])
    folded = {cell.source.split()[1] for cell in read(name).cells if cell.metadata.get("_kg_hide-input")}
    assert "runtime.py" in folded and not {"train_gpt.py", "train_mlp.py", "resume_gpt.py", "train_lora.py"} & folded - {"train_gpt.py"}


def test_all_notebooks_run_in_order_in_another_folder_and_leave_the_tree_clean(tmp_path):
    before = tree()
    write_texts(tmp_path / "texts")
    for name in NOTEBOOKS:
        (tmp_path / f"{name}.ipynb").write_text(edited_notebook(name))
    done = run_nbmake(tmp_path, *NOTEBOOKS)
    assert done.returncode == 0 and f"{len(NOTEBOOKS)} passed" in done.stdout, done.stdout
    assert "2 processes on cpu, fp32, all replicas equal" in printed(tmp_path, "mlp_minimal")
    first, second = printed(tmp_path, "gpt_pretrain"), printed(tmp_path, "gpt_resume")
    assert "step 20/30" in first and "step 20 of 30" in second and "step 30/30" in second
    steps = [json.loads(line)["step"] for line in (tmp_path / "runs/gpt/log.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(31))
    assert "of 359 images, each counted once" in printed(tmp_path, "image_classification")
    assert "of 800 texts, each counted once" in printed(tmp_path, "text_classifier")
    assert "step 6/6" in printed(tmp_path, "lora_finetune")
    for name in ("gpt_pretrain", "gpt_resume", "image_classification", "lora_finetune", "text_classifier"):
        notebook = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)
        assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))
    assert tree() == before


REHEARSED = {"image_classification": [('data="auto", ', 'data="digits", epochs=1, width=8, batch=160, '),
                                      ('platform="auto"', 'platform="virtual-tpu"')],
             "lora_finetune": [('preset="auto", ', 'preset="tiny", '), ('platform="auto"', 'platform="virtual-tpu"')],
             "text_classifier": [('preset="auto", ', 'preset="small", epochs=1, batch=400, T=16, '),
                                 ('platform="auto"', 'platform="virtual-tpu"')]}


@pytest.mark.parametrize("name", REHEARSED)
def test_a_notebook_rehearses_on_eight_virtual_devices(tmp_path, name):
    """An epoch or a few steps: to see that its cells and modules are complete, not what it learns."""
    notebook = read(name)
    settings = next(cell for cell in notebook.cells if cell.cell_type == "code")
    for old, new in REHEARSED[name]:
        assert settings.source.count(old) == 1, old
        settings.source = settings.source.replace(old, new)
    (tmp_path / f"{name}.ipynb").write_text(nbformat.writes(notebook))
    done = run_nbmake(tmp_path, name)
    assert done.returncode == 0, done.stdout
    assert "REHEARSAL on 8" in printed(tmp_path, name) and "RECOMPILED" not in printed(tmp_path, name)


def edited_notebook(name: str) -> str:
    notebook = read(name)
    settings = next(cell for cell in notebook.cells if cell.cell_type == "code")
    settings.source = edited(settings.source, name)
    return nbformat.writes(notebook)


def test_an_edited_cell_is_the_code_that_trains_and_mistakes_are_told_in_one_line(tmp_path):
    """Run all cells, edit the training script, run its cell and the launch again: the same kernel, the new code."""
    notebook = read("mlp_minimal")
    script = next(cell for cell in notebook.cells if cell.source.startswith("%%writefile train_mlp.py"))
    launch = next(cell for cell in notebook.cells if "train_mlp.launch(" in cell.source and "%%" not in cell.source)
    def again(*pairs):
        source = script.source
        for old, new in pairs:
            assert old in source
            source = source.replace(old, new)
        return [nbformat.v4.new_code_cell(source), nbformat.v4.new_code_cell(launch.source)]
    notebook.cells += again(('f"done: ', 'f"EDITED: '))
    notebook.cells += [nbformat.v4.new_code_cell(launch.source.replace("PROCESSES)", "2)"))]
    mistakes = again(("import torch\n", "import torch(\n")) + again() \
        + [nbformat.v4.new_code_cell(launch.source.replace("batch=BATCH", "batch=511").replace("PROCESSES)", "2)"))]
    for cell in mistakes:
        cell.metadata["tags"] = ["raises-exception"]
    notebook.cells += mistakes
    (tmp_path / "twice.ipynb").write_text(nbformat.writes(notebook))
    done = run_nbmake(tmp_path, "twice")
    assert done.returncode == 0, done.stdout
    text = printed(tmp_path, "twice")
    assert text.count("EDITED: 1 process ") == 1 and text.count("EDITED: 2 processes ") == 1 and text.count("done: ") == 2
    executed = nbformat.read(tmp_path / "twice.ipynb", as_version=4)
    errors = [output for cell in executed.cells for output in cell.get("outputs", []) if output.output_type == "error"]
    assert ["is not valid Python" in errors[0].evalue, "cannot be shared equally by 2" in errors[1].evalue] == [True, True]
    assert all(len(error.traceback) == 1 for error in errors), "a user's mistake shows a traceback"


def test_the_data_cell_takes_shards_from_an_input_or_makes_them_once(tmp_path, monkeypatch, capsys):
    from prepare import find_or_prepare
    from runtime import UserError
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "texts")
    made = find_or_prepare("texts", small_model=True)
    assert made == "data/texts-bytes" and find_or_prepare("texts", small_model=True) == made
    assert find_or_prepare("texts", encoding="gpt2") == "data/texts-gpt2"
    assert find_or_prepare(made) == made
    shutil.copytree(made, tmp_path / "input/datasets/someone/shards")
    (tmp_path / "input/other").mkdir()
    (tmp_path / "input/other/manifest.json").write_text("{}")
    assert find_or_prepare(inputs="input") == "input/datasets/someone/shards"
    shutil.copytree(made, tmp_path / "input/second")
    with pytest.raises(UserError, match="Several inputs hold token shards: input/datasets/someone/shards, input/second"):
        find_or_prepare(inputs="input")
    capsys.readouterr()
    assert find_or_prepare(inputs="nowhere", small_model=True) == "data/stdlib-bytes"
    assert "reading Python's own standard library" in capsys.readouterr().out


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_each_twin_runs_as_a_script(tmp_path, name):
    for part in ("py", "data_prep"):
        (tmp_path / part).symlink_to(ROOT / part)
    (tmp_path / "notebooks").mkdir()
    work = tmp_path / "work"
    write_texts(work / "texts")
    needed = ("gpt_pretrain", "gpt_resume") if name == "gpt_resume" else (name,)
    for each in needed:
        script = tmp_path / "notebooks" / f"{each}.py"
        script.write_text(edited((FOLDER / f"{each}.py").read_text(), each))
        done = subprocess.run([sys.executable, script], cwd=work, env=clean_environment(PYTHONPATH=""), text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240)
        assert done.returncode == 0, done.stdout
    assert {"mlp_minimal": "all replicas equal", "gpt_pretrain": "step 20/30", "gpt_resume": "step 30/30",
            "image_classification": "each counted once", "lora_finetune": "step 6/6",
            "text_classifier": "each counted once"}[name] in done.stdout
