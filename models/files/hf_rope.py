"""Rotary parameters as config.json spells them, in both generations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

ORIGINAL = "original_max_position_embeddings"
_BOUNDS = ("low_freq_factor", "high_freq_factor")
_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")

# For each supported type the names in config.json: (must be there, may be there).
TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", *_BOUNDS, ORIGINAL), ()),
    "yarn": ((ORIGINAL,), ("factor", *_YARN)),
    "longrope": (("short_factor", "long_factor", ORIGINAL), ("factor", "attention_factor")),
}
_HUGE = 1e30  # also keeps out infinities, and integers that no float can hold
_NEUTRAL = {"rope_type", "type", "rope_theta", ORIGINAL}


def read_rope(config: Mapping[str, Any], problems: list[str]) -> tuple[float, dict[str, Any]]:
    """(rope_theta, fields of Rope), by the precedence of Transformers 5: a non-empty rope_scaling replaces
    rope_parameters. What cannot be used goes to `problems`."""
    raw = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(raw, Mapping):
        problems.append(f"rope_parameters={raw!r} must be an object")
        raw = {}
    theta = _first(raw.get("rope_theta"), config.get("rope_theta"), 10000.0)
    if not _is_number(theta):
        problems.append(f"rope_theta={theta!r} must be a positive number")
        theta = 10000.0
    partial = _first(raw.get("partial_rotary_factor"), config.get("partial_rotary_factor"), 1.0)
    if partial != 1.0:
        problems.append(f"partial_rotary_factor={partial} must be 1.0")
    nested = sorted(str(key) for key, value in raw.items() if isinstance(value, Mapping))
    if nested:
        problems.append(f"rope_parameters={nested} differ by layer type, which is not supported")
        return float(theta), {}
    kind = _first(raw.get("rope_type"), raw.get("type"), "default")
    if not isinstance(kind, str) or kind not in TYPES:
        problems.append(f"rope_type={kind!r} must be one of {sorted(TYPES)}")
        return float(theta), {}
    given = {key: value for key, value in raw.items() if value is not None and key != "partial_rotary_factor"}
    _fill_original(given, config, kind)
    return float(theta), {"rope_type": kind, **_fields(given, kind, problems)}


def _first(*values: Any) -> Any:
    """The first that is there: null is as good as absent, 0 and "" are values."""
    return next(value for value in values if value is not None)


def _fill_original(given: dict[str, Any], config: Mapping[str, Any], kind: str) -> None:
    """The length before the extension: beside the rotary parameters it wins over inside them.

    Transformers takes max_position_embeddings where both are absent. For llama3 that is never what the model
    was trained with, so it stays missing there.
    """
    if config.get(ORIGINAL) is not None and ORIGINAL in TYPES[kind][0]:
        given[ORIGINAL] = config[ORIGINAL]
    elif kind in ("yarn", "longrope") and config.get("max_position_embeddings") is not None:
        given.setdefault(ORIGINAL, config["max_position_embeddings"])


def _fields(given: Mapping[str, Any], kind: str, problems: list[str]) -> dict[str, Any]:
    required, optional = TYPES[kind]
    known = (*required, *optional)
    for key in sorted(given, key=str):
        if key not in known and key not in _NEUTRAL:
            problems.append(f"rope_parameters.{key}={given[key]!r} has no meaning for rope_type={kind}")
    problems += [
        f"rope_parameters.{key} is missing for rope_type={kind}" for key in required if key not in given
    ]
    fields: dict[str, Any] = {} if "factor" in required or not optional else {"factor": None}
    for key in known:
        if key not in given:
            continue
        if not _CHECKS[wanted := _wanted(key)](given[key]):
            problems.append(f"rope_parameters.{key}={given[key]!r} must be {wanted}")
            continue
        fields[key.replace(ORIGINAL, "original_max_position")] = given[key]
    return fields


def _wanted(key: str) -> str:
    if key in ("short_factor", "long_factor"):
        return "a list of numbers"
    return "true or false" if key == "truncate" else "a whole number" if key == ORIGINAL else "a number"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _HUGE


_CHECKS: dict[str, Callable[[object], bool]] = {
    "a number": _is_number,
    "a whole number": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "true or false": lambda v: isinstance(v, bool),
    "a list of numbers": lambda v: isinstance(v, (list, tuple)) and all(_is_number(x) for x in v),
}


def write_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Rope in config.json's names, without the base. A derived factor is written as null."""
    kind = rope["rope_type"]
    required, optional = TYPES[kind]
    out: dict[str, Any] = {"rope_type": kind}
    for key in (*required, *optional):
        value = rope[key.replace(ORIGINAL, "original_max_position")]
        if isinstance(value, tuple):
            value = list(value)
        if value is not None and not (key == "truncate" and value):
            out[key] = value
    if kind == "yarn":
        out.setdefault("factor", None)  # Transformers wants the key there
    return out
