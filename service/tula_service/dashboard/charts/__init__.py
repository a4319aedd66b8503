"""Every chart of Tula, defined once: pure functions from wire models to Vega-Lite specifications with their data.

The page, the notebook (`job.plot()`) and PNG or SVG files render the same specification. Nothing here reads a
database or a clock; `chart_routes.py` answers `GET .../charts/{name}` with them.
"""
