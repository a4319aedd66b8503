"""Pages and charts; nothing is loaded from another host.

The application includes `router` behind authentication and `open_router` (login and static files) without it, and adds
`BrowserSession` inside `RequestMiddleware`.
"""

from __future__ import annotations

from fastapi import APIRouter

from tula_service.dashboard import session, static_files
from tula_service.dashboard.pages import router
from tula_service.dashboard.session import BrowserSession

__all__ = ["BrowserSession", "open_router", "router"]

open_router = APIRouter()
open_router.include_router(session.router)
open_router.include_router(static_files.router)
