"""Pages and charts; nothing is loaded from another host.

The application includes `router` behind authentication and `open_router` (login and static files) without it, and adds
`BrowserSession` inside `RequestMiddleware`.
"""

from __future__ import annotations

from fastapi import APIRouter

from tula_service.dashboard import pages, session, static_files, what_if
from tula_service.dashboard.session import BrowserSession

__all__ = ["BrowserSession", "open_router", "router"]

router = APIRouter()
router.include_router(pages.router)
router.include_router(what_if.router)

open_router = APIRouter()
open_router.include_router(session.router)
open_router.include_router(static_files.router)
