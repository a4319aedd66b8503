"""Defines all charts, as pure functions that turn wire models into Vega-Lite specifications with data.

Pages, notebooks (`job.plot()`) and PNG or SVG files render the same specification. No function here reads a database or
a clock. `chart_routes.py` serves the charts as `GET .../charts/{name}`.
"""
