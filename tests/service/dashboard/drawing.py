"""Draws charts as a browser would."""

from __future__ import annotations

import json

import altair as alt
import vl_convert
from altair.utils.schemapi import validate_jsonschema

from tula_service.dashboard.charts.vega import Spec


def compiles(spec: Spec) -> str:
    """Return the SVG of a specification that Vega-Lite's schema and compiler and Vega's runtime accept.

    All numbers of the specification must be finite.
    """
    validate_jsonschema({**spec, "datasets": {}}, alt.load_schema())
    drawn: str = vl_convert.vegalite_to_svg(json.dumps(spec, allow_nan=False), allowed_base_urls=[])
    return drawn
