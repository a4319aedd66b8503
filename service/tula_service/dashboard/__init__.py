"""Pages and charts; nothing is loaded from another host.

The application puts `pages` behind authentication; `session` (login) and `static_files` need none.
"""
