"""`/v1/tokens`: making, listing and revoking API tokens."""

from __future__ import annotations

from fastapi import APIRouter

from tula_service.api.deps import Caller, Current
from tula_service.store import TokenRecord
from tula_service.usecases.access import issue_token, revoke_token, visible_tokens
from tula_wire import Token, TokenCreate, TokenCreated, TokenList, routes

__all__ = ["router"]

router = APIRouter(tags=["access"])


@router.post(routes.TOKENS, status_code=201)
def post_token(wanted: TokenCreate, caller: Caller, have: Current) -> TokenCreated:
    """Make a token; its secret is in this answer and nowhere else."""
    issued = issue_token(
        have.store,
        caller,
        name=wanted.name,
        scope=wanted.scope,
        project=wanted.project,
        job_id=wanted.job_id,
        expires_in_s=wanted.expires_in_s,
    )
    have.access.forget()
    return TokenCreated(token=_wire(issued.token), secret=issued.secret)


@router.get(routes.TOKENS)
def get_tokens(caller: Caller, have: Current) -> TokenList:
    """Tokens without their secrets: all for an administrator, the project's for a user."""
    return TokenList(tokens=[_wire(token) for token in visible_tokens(have.store, caller)])


@router.delete(routes.TOKEN)
def delete_token(token_id: str, caller: Caller, have: Current) -> Token:
    """Revoke a token: at once in this worker, within a second in others."""
    revoked = revoke_token(have.store, caller, token_id)
    have.access.forget()
    return _wire(revoked)


def _wire(token: TokenRecord) -> Token:
    return Token(
        id=token.id,
        name=token.name,
        scope=token.scope,
        project=token.project_id,
        job_id=token.job_id,
        created_at=token.created_at,
        expires_at=token.expires_at,
        last_used_at=token.last_used_at,
        revoked_at=token.revoked_at,
    )
