"""Settings of a template: a dataclass, checked in the parent, unknown names refused with the nearest valid one.

    config = make_config(TrainConfig, {**PRESETS[preset], **settings})      # a notebook's settings cell
    settings = settings_from_command_line(TrainConfig, __doc__, PRESETS)    # python py/train_x.py --name value
"""
import argparse
import dataclasses
import difflib
import typing

from runtime import UserError


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise UserError(sentence)


def nearest_name(name: str, known) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""


def nearest_multiples(value: int, base: int) -> str:
    below = value // base * base
    return f"{below} and {below + base}" if below else str(base)


def require_equal_shares(batch: int, processes: int) -> None:
    require(batch % processes == 0, f"batch={batch} cannot be shared equally by {processes} processes: use"
            f" {nearest_multiples(batch, processes)}.")


def check_types(config) -> None:
    """Refuse a value of the wrong type, such as '1e-4' for a float; an int is taken where a float is wanted."""
    for name, kind in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) if kind is float else type(value) is kind
        require(fits, f"{name}={value!r} must be of type {kind.__name__}, not {type(value).__name__}.")


def check_ranges(config, at_least: dict) -> None:
    """Refuse a number below its limit. at_least: {limit: names of the settings}."""
    for limit, names in at_least.items():
        for name in names:
            value = getattr(config, name)
            require(value >= limit, f"{name}={value} must " + ("not be negative." if limit == 0 else
                                                               f"be at least {limit}."))


def make_config(kind: type, presets: dict, preset: str, settings: dict):
    """A config of dataclass `kind` from a preset and settings that replace parts of it.

    Raises UserError for an unknown preset or setting, naming the nearest known one.
    """
    known = [field.name for field in dataclasses.fields(kind)]
    require(preset in presets, f"preset={preset!r} is not known{nearest_name(preset, presets)}: the presets are"
            f" {', '.join(presets)}.")
    for name in settings:
        require(name in known, f"setting {name!r} is not known{nearest_name(name, known)}.")
    return kind(**{**presets[preset], **settings})


def settings_from_command_line(kind: type, presets: dict, description: str, arguments: list | None = None) -> dict:
    """--name value for `preset` and every field of dataclass `kind`; values take the field's type.

    Only what was given is in the result. Raises UserError for an unknown argument, naming the nearest known one.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="auto", help=f"auto, {', '.join(presets)}")
    for name, field_type in typing.get_type_hints(kind).items():
        parser.add_argument(f"--{name}", type=parse_bool if field_type is bool else field_type, default=None)
    known, unknown = parser.parse_known_args(arguments)
    for word in unknown:
        name = word.lstrip("-").split("=")[0]
        require(False, f"argument {word!r} is not known{nearest_name(name, vars(known))}.")
    return {name: value for name, value in vars(known).items() if value is not None}


def parse_bool(text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
