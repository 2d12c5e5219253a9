"""Make a notebook ready for `kaggle kernels push`, with the TPU; and a folder of shards for `kaggle datasets create`.

    python notebooks/kaggle_files.py --user ada                                  # every notebook, below build/kaggle
    python notebooks/kaggle_files.py --user ada --attach ada/my-shards           # with datasets as inputs
    python notebooks/kaggle_files.py --user ada --dataset data/mine              # dataset-metadata.json beside shards

Then, with Kaggle's own command line tool and your key: kaggle kernels push -p build/kaggle/gpt_pretrain
"""
import argparse
import json
import re
import sys
from pathlib import Path

from build import HERE, NOTEBOOKS, REPOSITORY, ROOT, build

OUT = ROOT / "build" / "kaggle"
LONGEST_TITLE = 50
CONTINUES = {"gpt_resume": "gpt_pretrain"}      # whose output is attached as an input


def slug(title: str) -> str:
    """As Kaggle makes it from a title; the two must agree."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def title_of(name: str) -> str:
    """The first heading of a notebook, its title on Kaggle too; of a long one the part before a colon or comma."""
    heading = re.search(r"^# # (.+)$", (HERE / f"{name}.py").read_text(), re.MULTILINE)[1].strip()
    return heading if len(heading) <= LONGEST_TITLE else re.split("[:,]", heading)[0][:LONGEST_TITLE].strip()


def kernel_metadata(name: str, user: str, datasets: list) -> dict:
    """What kernel-metadata.json says. docker_image is left out: a pinned image would replace that of the TPU."""
    title = title_of(name)
    before = CONTINUES.get(name)
    return dict(id=f"{user}/{slug(title)}", title=title, code_file=f"{name}.ipynb", language="python",
                kernel_type="notebook", is_private=True, enable_gpu=False, enable_tpu=True, enable_internet=True,
                machine_shape="TpuV5E8", dataset_sources=datasets, competition_sources=[], model_sources=[],
                kernel_sources=[f"{user}/{slug(title_of(before))}"] if before else [])


def dataset_metadata(folder: Path, user: str) -> dict:
    """What dataset-metadata.json says; the licence is the user's to name. Exits with a sentence where no shards are."""
    if not (folder / "manifest.json").exists():
        sys.exit(f"error: {folder} holds no manifest.json, so it is no finished shard folder: make it with"
                 " data_prep/prepare.py.")
    title = f"Token shards {folder.resolve().name}"[:50]
    return dict(id=f"{user}/{slug(title)}", title=title, licenses=[{"name": "unknown"}])


def write_json(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--user", required=True, help="your name on Kaggle, as in kaggle.com/NAME")
    parser.add_argument("--attach", nargs="*", default=[], metavar="USER/DATASET", help="datasets to attach as inputs")
    parser.add_argument("--dataset", type=Path, metavar="FOLDER", help="shards to publish, instead of notebooks")
    options = parser.parse_args()
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]+", options.user):
        sys.exit(f"error: {options.user!r} is no Kaggle user name: small letters, digits and hyphens, as in"
                 " kaggle.com/NAME.")
    for source in options.attach:
        if not re.fullmatch(r"[\w-]+/[\w-]+", source):
            sys.exit(f"error: {source!r} is not of the form user/dataset, as in the address of a dataset's page.")
    if options.dataset:
        write_json(options.dataset / "dataset-metadata.json", dataset_metadata(options.dataset, options.user))
        print(f"wrote {options.dataset}/dataset-metadata.json; name the licence in it, then: kaggle datasets create -p"
              f" {options.dataset}")
        return
    for name in NOTEBOOKS:
        write_json(OUT / name / "kernel-metadata.json", kernel_metadata(name, options.user, options.attach))
        (OUT / name / f"{name}.ipynb").write_text(build(name, REPOSITORY.read_text().strip()))
        print(f"kaggle kernels push -p {(OUT / name).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
