"""The files for Kaggle's command line tool, judged by its own code; only the calls over the network are replaced."""
import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, clean_environment, run_script


@pytest.fixture
def project(tmp_path):
    for part in ("py", "data_prep", "notebooks"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def make(project, *arguments):
    return subprocess.run([sys.executable, project / "notebooks/kaggle_files.py", *arguments], cwd=project, text=True,
                          capture_output=True, env=clean_environment())


PUSH = """
import json, pathlib
from kaggle.api.kaggle_api_extended import KaggleApi

class Sent(Exception):
    pass

class Client:
    def __enter__(self): return self
    def __exit__(self, *_): pass
    @property
    def kernels(self): return self
    @property
    def kernels_api_client(self): return self
    def save_kernel(self, request): raise Sent(request.to_dict())

api = KaggleApi()
api.build_kaggle_client = Client
for folder in sorted(pathlib.Path("build/kaggle").iterdir()):
    try:
        api.kernels_push(str(folder))
    except Sent as sent:
        print("SENT", json.dumps(sent.args[0]))
"""


def test_kaggles_tool_accepts_every_notebook_and_asks_for_the_tpu(project):
    made = make(project, "--user", "ada", "--attach", "ada/my-shards")
    assert made.returncode == 0, made.stderr
    folders = [line.split()[-1] for line in made.stdout.splitlines()]
    sys.path.insert(0, str(ROOT / "notebooks"))
    from build import NOTEBOOKS
    assert sorted(folders) == sorted(f"build/kaggle/{name}" for name in NOTEBOOKS)
    output = run_script(PUSH, project, KAGGLE_USERNAME="ada", KAGGLE_KEY="none").stdout
    assert "does not resolve to the specified" not in output and "retired" not in output
    sent = [json.loads(line[5:]) for line in output.splitlines() if line.startswith("SENT ")]
    assert len(sent) == len(NOTEBOOKS)
    for request in sent:
        assert (request["enableTpu"], request["machineShape"], request["isPrivate"]) == (True, "TpuV5E8", True)
        assert request["datasetDataSources"] == ["ada/my-shards"] and "dockerImage" not in request
        assert len(request["newTitle"]) <= 50 and json.loads(request["text"])["cells"]
    resume = next(request for request in sent if "resume" in request["slug"])
    pretrain = next(request for request in sent if "pretrain" in request["slug"])
    assert resume["kernelDataSources"] == [pretrain["slug"]]


CREATE = """
from kaggle.api.kaggle_api_extended import HTTPError, KaggleApi
api = KaggleApi()
api.config_values[api.CONFIG_NAME_USER] = "ada"
class Reached(Exception):
    pass
def upload(*args, **kwargs):
    raise Reached
def not_there_yet(ref):      # the other question to the network: is the name taken?
    raise HTTPError()
api.upload_files, api.dataset_status = upload, not_there_yet
try:
    api.dataset_create_new({folder!r})
except Reached:
    print("ACCEPTED")
"""


def test_kaggles_tool_accepts_a_folder_of_shards(project, shards):
    folder = project / "data/stdlib"
    shutil.copytree(shards, folder)
    made = make(project, "--user", "ada", "--dataset", "data/stdlib")
    assert made.returncode == 0, made.stderr
    assert json.loads((folder / "dataset-metadata.json").read_text())["id"] == "ada/token-shards-stdlib"
    output = run_script(CREATE.format(folder=str(folder)), project, KAGGLE_USERNAME="ada", KAGGLE_KEY="none").stdout
    assert "ACCEPTED" in output
    import token_data
    token_data.open_shards(folder, T=32)        # the file beside the shards does not disturb them


@pytest.mark.parametrize("arguments, words", [
    (["--user", "Ada Lovelace"], "is no Kaggle user name"),
    (["--user", "ada", "--attach", "shards"], "is not of the form user/dataset"),
    (["--user", "ada", "--dataset", "py"], "holds no manifest.json")])
def test_a_mistake_is_one_sentence(project, arguments, words):
    done = make(project, *arguments)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and words in done.stderr
    assert not os.path.exists(project / "build")
