"""Build the notebooks: each .py twin in this folder, its %%writefile cells filled from py/ and data_prep/.

    python notebooks/build.py                       # build; exit status 1 and a list when a committed file differed
    python notebooks/build.py --check               # the same comparison, nothing written
    python notebooks/build.py --owner name/repo     # point every badge at that repository, then build

Edit the .py twins and the modules, never the .ipynb: they are built, and a check compares them by content.
"""
import argparse
import re
import sys
from pathlib import Path

import jupytext
import nbformat

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
READMES = (ROOT / "README.md", ROOT / "README.zh.md")
REPOSITORY = HERE / "repository.txt"
NOTEBOOKS = ("mlp_minimal", "gpt_pretrain", "gpt_resume", "image_classification", "lora_finetune",
             "text_classifier")
MODULE_FOLDERS = (ROOT / "py", ROOT / "data_prep")
SHOWN_MODULES = ("train_gpt.py", "train_mlp.py", "resume_gpt.py", "train_images.py",
                 "train_lora.py", "train_classifier.py")      # the training scripts; the others are folded

# What Kaggle and Colab read. The names that Kaggle itself writes for a TPU are not documented: the text of each notebook
# also tells the reader what to choose.
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
    "accelerator": "TPU",
    "colab": {"gpuType": "V5E1", "provenance": []},
    "kaggle": {"accelerator": "tpuV5e8", "dataSources": [], "isGpuEnabled": False, "isInternetEnabled": True,
               "language": "python", "sourceType": "notebook"},
}
FOLDED = {"_kg_hide-input": True, "jupyter": {"source_hidden": True}}      # Kaggle's name for it, and Jupyter's


def badges(path: str, repository: str) -> str:
    """The two links that open a notebook of the repository's main branch in Kaggle and in Colab."""
    address = f"github.com/{repository}/blob/main/{path}"
    return (f"[![Open In Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)]"
            f"(https://kaggle.com/kernels/welcome?src=https://{address}) "
            f"[![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
            f"(https://colab.research.google.com/{address.replace('github.com', 'github', 1)})")


def module_text(name: str) -> str:
    """The text of a module by file name. Exits with a sentence when it is missing or would be cut into cells."""
    found = [folder / name for folder in MODULE_FOLDERS if (folder / name).exists()]
    if len(found) != 1:
        sys.exit(f"error: a notebook asks for %%writefile {name}, and {len(found)} files in py/ and data_prep/ have that name.")
    text = found[0].read_text()
    if cut := re.search(r"^# %%.*$", text, re.MULTILINE):
        sys.exit(f"error: {found[0]} has a line {cut.group()!r}: jupytext would cut the cell there; reword it.")
    return text


def build(name: str, repository: str) -> str:
    """The .ipynb of a twin as text: no outputs, cell ids that do not change from build to build."""
    notebook = jupytext.read(HERE / f"{name}.py", fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
        cell.source = cell.source.replace("{{badges}}", badges(f"notebooks/{name}.ipynb", repository))
        if written := re.fullmatch(r"%%writefile (\S+)", cell.source.strip()):
            cell.source = f"{cell.source.strip()}\n{module_text(written.group(1)).rstrip()}"
            if written.group(1) not in SHOWN_MODULES:
                cell.metadata.update(FOLDED)
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    nbformat.validate(notebook)
    return nbformat.writes(notebook, indent=1) + "\n"


def readme_with_badges(readme: Path, repository: str) -> str:
    """A README with every line between badge markers written anew."""
    def line(match):
        return f"<!-- badges {match.group(1)} -->{badges(match.group(1), repository)}<!-- /badges -->"
    return re.sub(r"<!-- badges (\S+) -->.*?<!-- /badges -->", line, readme.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 when something differs")
    parser.add_argument("--owner", metavar="NAME/REPOSITORY", help="where the badges point")
    options = parser.parse_args()
    if options.owner is not None:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", options.owner):
            sys.exit(f"error: OWNER={options.owner!r} is not of the form name/repository, as in make owner OWNER=ada/tpu.")
        REPOSITORY.write_text(options.owner + "\n")
    repository = REPOSITORY.read_text().strip()
    wanted = {HERE / f"{name}.ipynb": build(name, repository) for name in NOTEBOOKS}
    wanted |= {readme: readme_with_badges(readme, repository) for readme in READMES}
    drifted = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if not options.check:
        for path in drifted:
            path.write_text(wanted[path])
    for path in drifted:
        print(f"{path.relative_to(ROOT)} {'differs from its sources' if options.check else 'was out of date, now built'}")
    print(f"{len(wanted) - len(drifted)} of {len(wanted)} up to date")
    sys.exit(1 if drifted and options.owner is None else 0)


if __name__ == "__main__":
    main()
