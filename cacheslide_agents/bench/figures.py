"""Figures as files: JSON with everything that was measured, CSV with the summaries.

The JSON file holds one object:

    schema        1
    environment   where it ran: package, Python, torch and transformers versions, platform, processor, cores, torch
                  threads, load average at the end, device, dtype, model, context_tokens, date (UTC)
    settings      of the comparison: variants [{name, policy, settings}], repeats, answer_tokens
    left_out      what is wrong with each record that could not be used
    summaries     one object a set of turns and variant: the fields of `Summary`; none if Ctrl-C came while they were
                  made
    measurements  one object a pair of turns and variant: the set's name, the fields of `Measurement`, the receipt as
                  `Receipt.to_dict()` gives it
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from .comparison import Measurement
from .summary import Summary


def as_json(
    environment: Mapping[str, Any],
    settings: Mapping[str, Any],
    left_out: Sequence[str],
    summaries: Iterable[Summary],
    measured: Mapping[str, Sequence[Sequence[Measurement]]],
) -> str:
    """The JSON file's text."""
    figures = {
        "schema": 1,
        "environment": environment,
        "settings": settings,
        "left_out": left_out,
        "summaries": [asdict(summary) for summary in summaries],
        "measurements": [
            measurement_as_json(name, one) for name, turns in measured.items() for ones in turns for one in ones
        ],
    }
    return json.dumps(figures, indent=2) + "\n"


def measurement_as_json(turn_set: str, measurement: Measurement) -> dict[str, Any]:
    """One measurement as plain JSON values."""
    return {"turn_set": turn_set, **asdict(measurement), "receipt": measurement.receipt.to_dict()}


def as_csv(summaries: Iterable[Summary]) -> str:
    """The summaries, one a line, under the names of `Summary`'s fields; nothing measured is an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Summary)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(summary) for summary in summaries)
    return text.getvalue()
