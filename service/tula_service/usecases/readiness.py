"""Whether this process can do its work now."""

from __future__ import annotations

import sqlalchemy as sa

from tula_service.errors import StoreUnavailable
from tula_service.store import Store
from tula_service.store.migrations import check_schema

__all__ = ["check_ready"]


def check_ready(store: Store) -> None:
    """Raise StoreUnavailable when the database does not answer, SchemaMismatch when its schema is another."""
    try:
        check_schema(store.engine)
    except sa.exc.SQLAlchemyError as error:
        raise StoreUnavailable("The database cannot be reached: check that it is running.") from error
