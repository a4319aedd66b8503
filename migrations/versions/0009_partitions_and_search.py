"""Telemetry in partitions by month on Postgres, and an index of the trigrams of names.

No chunk is copied: the table becomes the first partition, of this month and all before. The key of a run begins with the
month in which it was created (`store/partitions.py`).

Revision ID: 0009
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

MONTH = "to_char(now() AT TIME ZONE 'UTC', 'YYYYMM')::bigint"
NEXT = "to_char((now() AT TIME ZONE 'UTC') + interval '1 month', 'YYYYMM')::bigint"
CHUNKS = "telemetry_chunks"

TRIGRAMS = """
CREATE FUNCTION tula_trigrams(text) RETURNS text[] LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE COST 500 AS $$
DECLARE found text[] := '{}'; BEGIN
FOR at IN 1 .. length($1) - 2 LOOP found := found || substr($1, at, 3); END LOOP; RETURN found; END $$
"""  # what an index needs of the extension pg_trgm, which not every server has

SQLITE = (
    "CREATE VIRTUAL TABLE jobs_search USING fts5"
    "(name, model_name, content='jobs', content_rowid='key', tokenize='trigram')",
    "INSERT INTO jobs_search (jobs_search) VALUES ('rebuild')",
    "CREATE TRIGGER jobs_search_insert AFTER INSERT ON jobs BEGIN"
    " INSERT INTO jobs_search (rowid, name, model_name) VALUES (new.key, new.name, new.model_name); END",
    "CREATE TRIGGER jobs_search_delete AFTER DELETE ON jobs BEGIN"
    " INSERT INTO jobs_search (jobs_search, rowid, name, model_name)"
    " VALUES ('delete', old.key, old.name, old.model_name); END",
)  # names never change: there is no trigger for that


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        for statement in SQLITE:
            op.execute(statement)
        return
    op.execute(TRIGRAMS)
    op.execute("CREATE INDEX ix_jobs_trigrams ON jobs USING gin (tula_trigrams(lower(name || ' ' || model_name)))")
    month, following = op.get_bind().execute(sa.text(f"SELECT {MONTH}, {NEXT}")).one()
    first = f"{CHUNKS}_{month}"
    op.execute(f"ALTER TABLE {CHUNKS} RENAME TO {first}")
    for kind in ("pk_{}", "fk_{}_run_key"):
        op.execute(f"ALTER TABLE {first} RENAME CONSTRAINT {kind.format(CHUNKS)} TO {kind.format(first)}")
    op.execute(
        f"CREATE TABLE {CHUNKS} (LIKE {first} INCLUDING DEFAULTS INCLUDING STORAGE,"
        f" CONSTRAINT pk_{CHUNKS} PRIMARY KEY (run_key, rank, boot_id, sequence),"
        f" CONSTRAINT fk_{CHUNKS}_run_key FOREIGN KEY (run_key) REFERENCES runs (key) ON DELETE CASCADE"
        ") PARTITION BY RANGE (run_key)"
    )
    op.execute(f"ALTER TABLE {CHUNKS} ATTACH PARTITION {first} FOR VALUES FROM (MINVALUE) TO ({following}000000000)")
    op.execute(f"ALTER TABLE runs ALTER COLUMN key SET DEFAULT {MONTH} * 1000000000 + nextval('runs_key_seq')")
