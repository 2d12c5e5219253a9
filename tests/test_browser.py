"""The MLP notebook in a real JupyterLab, in a real browser, run to its end: what a person sees, a failure too.

Needs Chromium and its driver (Debian: apt-get install chromium chromium-driver); skipped without, except in CI.
"""
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT, clean_environment

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

# A worker in a process of its own, as in every launch: fifty lines over one another, one that stays; then a failure.
LIVE = """import time, telemetry
def work(number):
    with telemetry.Heartbeat(True) as heartbeat:
        for step in range(1, number + 1):
            heartbeat.progress(f"step {step}/{number}  {'a long line ' * (step % 3)}end")
            if step == 20:
                heartbeat.say("validation 3.2")
            time.sleep(0.02)
runtime.launch(work, (50,), platform)"""
FAILING = """def fail():
    import torch
    torch.nn.functional.embedding(torch.tensor([9]), torch.ones(2, 2))
runtime.launch(fail, (), platform)"""


@pytest.fixture
def lab(tmp_path):
    """(folder, address) of a JupyterLab of its own that draws every cell, also those outside the window."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = tmp_path / "settings/@jupyterlab"
    for name, text in (("notebook-extension/tracker", '{"windowingMode": "none"}'),
                       ("apputils-extension/notification", '{"fetchNews": "false", "checkForUpdates": false}')):
        path = settings / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    folder = tmp_path / "work"
    folder.mkdir()
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
               "--IdentityProvider.token=", "--LabApp.expose_app_in_browser=True",
               f"--LabApp.user_settings_dir={tmp_path / 'settings'}",
               f"--LabApp.workspaces_dir={tmp_path / 'workspaces'}"]
    with (tmp_path / "lab.log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, env=clean_environment(PYTHONPATH=""), stdout=log, stderr=log)
    yield folder, f"http://127.0.0.1:{port}/lab/tree"
    server.terminate()
    server.wait(30)


@pytest.fixture
def browser():
    if not (CHROMIUM and DRIVER):
        if os.environ.get("CI"):
            pytest.fail("CI needs Chromium: .ci/run installs it")
        pytest.skip("no Chromium here: apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,900"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def wait_for(what, seconds: float, every: float = 0.5):
    """The first true value of what(); exceptions count as not yet."""
    deadline, last = time.monotonic() + seconds, None
    while time.monotonic() < deadline:
        try:
            if value := what():
                return value
        except Exception as error:
            last = error
        time.sleep(every)
    raise AssertionError(f"not within {seconds} s; last error: {last}")


def cells(browser) -> list:
    """[(prompt, [texts of outputs], is the source folded)] of every code cell as drawn."""
    return browser.execute_script("""
        return Array.from(document.querySelectorAll('.jp-CodeCell')).map(cell => [
            cell.querySelector('.jp-InputPrompt')?.innerText ?? '',
            Array.from(cell.querySelectorAll('.jp-OutputArea-output')).map(output => output.innerText),
            !!cell.querySelector('.jp-InputPlaceholder, .jp-Placeholder')])""")


def kernel_status(browser) -> str:
    return browser.execute_script("return window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status")


@pytest.mark.timeout(400)
def test_the_mlp_notebook_runs_to_its_end_in_jupyterlab(lab, browser):
    folder, address = lab
    notebook = nbformat.read(ROOT / "notebooks/mlp_minimal.ipynb", as_version=4)
    telemetry = "%%writefile telemetry.py\n" + (ROOT / "py/telemetry.py").read_text()
    count = sum(cell.cell_type == "code" for cell in notebook.cells)
    notebook.cells += [nbformat.v4.new_code_cell(source) for source in (telemetry, LIVE, FAILING)]
    (folder / "mlp.ipynb").write_text(nbformat.writes(notebook))
    wait_for(lambda: browser.get(f"{address}/mlp.ipynb") or True, 90)
    wait_for(lambda: len(cells(browser)) == count + 3 and browser.execute_script("return !!window.jupyterapp"), 90)
    first_screen = browser.find_element("css selector", ".jp-Notebook").text
    assert "What it trains." in first_screen and "How long." in first_screen and "What you get." in first_screen
    wait_for(lambda: kernel_status(browser) == "idle", 90)      # a command before that would be lost
    browser.execute_script("window.jupyterapp.commands.execute('notebook:run-all-cells')")
    wait_for(lambda: "What to do" in "".join(cells(browser)[-1][1]), 240)
    drawn = cells(browser)
    # the training cell: the last of the notebook's own
    training = "".join(drawn[count - 1][1])
    assert "all replicas equal" in training and "Warning" not in training, training
    folded = [index for index, (_, _, is_folded) in enumerate(drawn[:count]) if is_folded]
    assert len(folded) == sum(bool(c.metadata.get("_kg_hide-input")) for c in notebook.cells) >= 3
    live = "".join(drawn[count + 1][1]).splitlines()
    assert [line.strip() for line in live] == ["validation 3.2", f"step 50/50  {'a long line ' * 2}end"]
    failure = "".join(drawn[count + 2][1])
    assert "IndexError: index out of range in self" in failure and "notebook_launcher" not in failure
    assert "A token id is larger than the embedding table." in failure and "What to do" in failure
    assert Path(folder / "train_mlp.py").exists()
