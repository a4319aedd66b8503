"""Every chart of Tula, defined once: pure functions from wire models to Vega-Lite specifications with their data.

The page, the notebook (`job.plot()`) and PNG or SVG files render the same specification. No function here reads a
database or a clock; `chart_routes.py` returns the charts for `GET .../charts/{name}`.
"""
