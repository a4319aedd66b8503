"""Pages and charts; nothing is loaded from another host.

The application requires authentication for `pages`, but not for `session` (login) and `static_files`.
"""
