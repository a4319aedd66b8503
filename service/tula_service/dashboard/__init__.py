"""Serves the dashboard's pages and charts, which load nothing from other hosts.

The application requires authentication for `pages`, but not for `session` (the login) or `static_files`.
"""
