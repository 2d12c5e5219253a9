"""Prompts and answers for fine-tuning: read, split, and turned into rows of one fixed length.

    train, val = read_examples("stdlib")                # or a .jsonl file, one {"prompt": ..., "response": ...} a line
    rows = encode(train, tokenizer, T=512)              # tokens (N, T+1) and which of them are learned (N, T)

The loss counts the answer alone. Rows are filled up to T on the right: one shape, so one program on a TPU; a causal
model needs no attention mask for what comes after its text.
"""
import ast
import functools
import hashlib
import inspect
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime import UserError

HELD_OUT = 0.1          # share of the examples that are validated on
QUESTION, ANSWER = "### Question\n", "\n### Answer\n"


@dataclass(frozen=True)
class Example:
    prompt: str
    response: str


@dataclass(frozen=True)
class Rows:
    tokens: np.ndarray      # (N, T+1) int32
    learned: np.ndarray     # (N, T) float32: 1 where the next token belongs to an answer
    cut: int                # how many examples were longer than T


# ---- where examples come from ----------------------------------------------------------------------------------------

def read_examples(source: str) -> tuple[list[Example], list[Example]]:
    """(training, validation) examples; which is which follows from the prompt alone.

    source: 'stdlib' (what the functions of Python's standard library do, from their own documentation), or a .jsonl
    file. Raises UserError that names the line which is not an example, and when a side is empty.
    """
    examples = documented_functions() if source == "stdlib" else read_jsonl(Path(source))
    held_out = [int.from_bytes(hashlib.sha256(e.prompt.encode()).digest()[:4], "little") < HELD_OUT * 2 ** 32
                for e in examples]
    train = [e for e, held in zip(examples, held_out) if not held]
    val = [e for e, held in zip(examples, held_out) if held]
    if not train or not val:
        raise UserError(f"{source} has {len(examples)} examples, too few to train on some and to validate on others:"
                        " give at least a few dozen.")
    return train, val


def read_jsonl(path: Path) -> list[Example]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The examples {path} cannot be read ({error}): give a .jsonl file, or 'stdlib'.") from None
    return [_example(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _example(path: Path, number: int, line: str) -> Example:
    try:
        record = json.loads(line)
        prompt, response = record["prompt"], record["response"]
        if not (isinstance(prompt, str) and isinstance(response, str) and response.strip()):
            raise TypeError
    except (json.JSONDecodeError, KeyError, TypeError):
        raise UserError(f"{path} line {number} is not an example: each line must be"
                        ' {"prompt": "...", "response": "..."} with a response that is not empty.') from None
    return Example(prompt, response)


@functools.cache        # parsing the library takes seconds; forked workers inherit the answer
def documented_functions() -> list[Example]:
    """'What does json.dumps do?' and its documentation's first paragraph, for every public function of the library."""
    found = []
    for module, text in library_source():
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        found += [Example(f"What does {module}.{name} do?", words) for name, words in _documentation(tree)]
    return found


def library_source():
    """(module, source text) of the Python standard library's public modules, real text that is on every machine."""
    top = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(top.glob("*.py")) + sorted(top.glob("[a-z]*/*.py")):
        if path.name.startswith("_") or {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(path.parts):
            continue
        yield ".".join(path.relative_to(top).with_suffix("").parts), path.read_text(encoding="utf-8", errors="replace")


def _documentation(tree: ast.Module):
    """(name, first paragraph) of the public functions and methods of a module."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    places = [("", tree)] + [(f"{node.name}.", node) for node in classes]
    for prefix, place in places:
        for node in place.body:
            text = isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and ast.get_docstring(node)
            if text:
                yield prefix + node.name, " ".join(inspect.cleandoc(text).split("\n\n")[0].split())


# ---- examples as rows of tokens --------------------------------------------------------------------------------------

def prompt_text(prompt: str, tokenizer) -> str:
    """The prompt as the model sees it: by the tokenizer's own chat template where it has one."""
    if getattr(tokenizer, "chat_template", None):
        return tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False,
                                             add_generation_prompt=True)
    return f"{QUESTION}{prompt}{ANSWER}"


def encode(examples: list[Example], tokenizer, T: int) -> Rows:
    """Rows of T+1 tokens: prompt, answer, end of text, filling. Longer examples are cut at T+1.

    Raises UserError when T leaves no room for any answer.
    """
    tokens = np.full((len(examples), T + 1), tokenizer.eos_token_id, dtype=np.int32)
    learned = np.zeros((len(examples), T), dtype=np.float32)
    cut = 0
    for row, example in enumerate(examples):
        start = tokenizer(prompt_text(example.prompt, tokenizer), add_special_tokens=False)["input_ids"]
        answer = tokenizer(example.response, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        both = (start + answer)[:T + 1]
        cut += len(start) + len(answer) > T + 1
        tokens[row, :len(both)] = both
        learned[row, max(len(start) - 1, 0):len(both) - 1] = 1
    if not learned.any():
        raise UserError(f"T={T} leaves no room for an answer: every prompt alone is longer. Raise T.")
    return Rows(tokens, learned, cut)
