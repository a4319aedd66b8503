CREATE FUNCTION public.refuse_ledger_update() RETURNS trigger
    LANGUAGE plpgsql
    AS $$ BEGIN RAISE EXCEPTION 'ledger entries are immutable'; END $$;
-- next
CREATE FUNCTION public.tula_trigrams(text) RETURNS text[]
    LANGUAGE plpgsql IMMUTABLE STRICT COST 500 PARALLEL SAFE
    AS $_$ DECLARE trigrams text[] := '{}'; BEGIN FOR at IN 1 .. length($1) - 2 LOOP trigrams := trigrams || substr($1, at, 3); END LOOP; RETURN trigrams; END $_$;
-- next
CREATE TABLE public.alembic_version (
    version_num character varying(32) NOT NULL
);
-- next
CREATE TABLE public.answers (
    job_id text NOT NULL,
    name text NOT NULL,
    data_version bigint NOT NULL,
    model_version text NOT NULL,
    body text NOT NULL,
    created_at timestamp with time zone NOT NULL
);
-- next
CREATE TABLE public.audit_log (
    id bigint NOT NULL,
    at timestamp with time zone NOT NULL,
    actor text NOT NULL,
    action text NOT NULL,
    target text NOT NULL,
    detail jsonb NOT NULL
);
-- next
CREATE SEQUENCE public.audit_log_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
-- next
ALTER SEQUENCE public.audit_log_id_seq OWNED BY public.audit_log.id;
-- next
CREATE TABLE public.events (
    id bigint NOT NULL,
    job_id text NOT NULL,
    run_id text,
    kind text NOT NULL,
    at timestamp with time zone NOT NULL,
    data jsonb NOT NULL
);
-- next
CREATE SEQUENCE public.events_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
-- next
ALTER SEQUENCE public.events_id_seq OWNED BY public.events.id;
-- next
CREATE TABLE public.fabrics (
    key bigint NOT NULL,
    project_id text NOT NULL,
    instance_type text NOT NULL,
    job_id text,
    probe jsonb NOT NULL,
    created_at timestamp with time zone NOT NULL
);
-- next
CREATE SEQUENCE public.fabrics_key_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
-- next
ALTER SEQUENCE public.fabrics_key_seq OWNED BY public.fabrics.key;
-- next
CREATE TABLE public.job_lessons (
    job_id text NOT NULL,
    posteriors jsonb NOT NULL,
    prediction_pairs jsonb NOT NULL
);
-- next
CREATE TABLE public.jobs (
    key bigint NOT NULL,
    id text NOT NULL,
    project_id text NOT NULL,
    name text NOT NULL,
    model_name text NOT NULL,
    state text NOT NULL,
    objective text NOT NULL,
    plan_reason text NOT NULL,
    spec jsonb NOT NULL,
    data_version bigint NOT NULL,
    created_at timestamp with time zone NOT NULL,
    updated_at timestamp with time zone NOT NULL,
    recommended jsonb,
    cross_validated_runs jsonb,
    predicted_time_s double precision,
    predicted_cost_usd double precision,
    saving_vs_smallest_batch double precision,
    saving_vs_largest_batch double precision,
    prediction_error double precision,
    cross_validated_error double precision,
    idempotency_key text,
    fingerprint text,
    cross_validated_model text,
    plan_state text DEFAULT 'current'::text NOT NULL,
    retried_up_to_key bigint DEFAULT '0'::bigint NOT NULL
);
-- next
CREATE SEQUENCE public.jobs_key_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
-- next
ALTER SEQUENCE public.jobs_key_seq OWNED BY public.jobs.key;
-- next
CREATE TABLE public.ledger (
    key bigint NOT NULL,
    id text NOT NULL,
    job_id text NOT NULL,
    created_at timestamp with time zone NOT NULL,
    objective text NOT NULL,
    basis text NOT NULL,
    model_version text NOT NULL,
    configuration jsonb,
    prices jsonb NOT NULL,
    data_version bigint NOT NULL,
    step_time_s double precision,
    step_time_low_s double precision,
    step_time_high_s double precision,
    interval_scale double precision,
    cost_usd double precision,
    cost_low_usd double precision,
    cost_high_usd double precision
);
-- next
CREATE SEQUENCE public.ledger_key_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
-- next
ALTER SEQUENCE public.ledger_key_seq OWNED BY public.ledger.key;
-- next
CREATE TABLE public.ledger_outcomes (
    ledger_id text NOT NULL,
    run_id text NOT NULL,
    measured_step_time_s double precision NOT NULL,
    error double precision,
    within_interval boolean,
    at timestamp with time zone NOT NULL
);
-- next
CREATE TABLE public.memory_readings (
    source_key bigint NOT NULL,
    run_key bigint NOT NULL,
    method text NOT NULL,
    peak_bytes bigint NOT NULL,
    parameter_bytes bigint,
    gradient_bytes bigint,
    optimizer_bytes bigint,
    activation_bytes bigint,
    batch_bytes bigint,
    reserved_bytes bigint,
    context_bytes bigint,
    capacity_bytes bigint,
    alloc_retries bigint,
    growing_segments boolean
);
-- next
CREATE TABLE public.projects (
    id text NOT NULL,
    name text NOT NULL,
    created_at timestamp with time zone NOT NULL
);
-- next
CREATE TABLE public.run_outputs (
    run_key bigint NOT NULL,
    text text NOT NULL
);
-- next
CREATE TABLE public.run_summaries (
    run_key bigint NOT NULL,
    of_num_samples bigint NOT NULL,
    num_samples bigint NOT NULL,
    num_steps bigint NOT NULL,
    step_time_s double precision,
    relative_sd double precision,
    compute_time_s double precision,
    comm_time_s double precision,
    exposed_comm_time_s double precision,
    input_time_s double precision,
    optimizer_time_s double precision,
    skew_s double precision,
    straggler_rank integer,
    world_size integer,
    local_batch_size integer,
    grad_accum_steps integer,
    timing_method text,
    energy_per_step_j double precision
);
-- next
CREATE TABLE public.runs (
    key bigint NOT NULL,
    id text NOT NULL,
    job_id text NOT NULL,
    project_id text NOT NULL,
    kind text NOT NULL,
    state text NOT NULL,
    instance_type text NOT NULL,
    purpose text NOT NULL,
    num_nodes integer NOT NULL,
    ranks_per_node integer NOT NULL,
    local_batch_size integer NOT NULL,
    grad_accum_steps integer NOT NULL,
    "position" integer NOT NULL,
    origin text DEFAULT 'plan'::text NOT NULL,
    options jsonb NOT NULL,
    instruction jsonb,
    end_cause text,
    message text,
    method text,
    holder text,
    recommendation_id text,
    drift_sentence text,
    lease_s double precision,
    predicted_step_time_s double precision,
    time_limit_s double precision,
    lease_expires_at timestamp with time zone,
    started_at timestamp with time zone,
    finished_at timestamp with time zone,
    created_at timestamp with time zone NOT NULL,
    num_samples bigint NOT NULL,
    num_measured bigint NOT NULL,
    dropped bigint NOT NULL,
    lease integer DEFAULT 0 NOT NULL,
    failed_local_batch_size integer,
    monitor jsonb,
    unsteady boolean DEFAULT false NOT NULL
);
-- next
CREATE SEQUENCE public.runs_key_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
-- next
ALTER SEQUENCE public.runs_key_seq OWNED BY public.runs.key;
-- next
CREATE TABLE public.sample_sources (
    key bigint NOT NULL,
    run_key bigint NOT NULL,
    rank integer NOT NULL,
    boot_id text NOT NULL,
    timing_method text NOT NULL,
    world_size integer,
    local_batch_size integer,
    grad_accum_steps integer,
    timeline jsonb,
    machine jsonb,
    energy_per_step_j double precision
);
-- next
CREATE SEQUENCE public.sample_sources_key_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
-- next
ALTER SEQUENCE public.sample_sources_key_seq OWNED BY public.sample_sources.key;
-- next
CREATE TABLE public.scaling_numbers (
    job_id text NOT NULL,
    policy text NOT NULL,
    version integer NOT NULL,
    delta double precision,
    static_scale double precision,
    s_min double precision,
    s_max double precision,
    small_batch_size bigint
);
-- next
CREATE TABLE public.sessions (
    sha256 text NOT NULL,
    token_id text NOT NULL,
    created_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone NOT NULL
);
-- next
CREATE TABLE public.step_samples (
    source_key bigint NOT NULL,
    sequence bigint NOT NULL,
    run_key bigint NOT NULL,
    rank integer NOT NULL,
    step bigint NOT NULL,
    warmup boolean NOT NULL,
    step_time_s double precision NOT NULL,
    compute_time_s double precision,
    comm_time_s double precision,
    exposed_comm_time_s double precision,
    input_time_s double precision,
    skew_s double precision,
    optimizer_time_s double precision,
    straggler_rank integer
);
-- next
CREATE TABLE public.telemetry_chunks (
    run_key bigint NOT NULL,
    rank integer NOT NULL,
    boot_id text NOT NULL,
    sequence bigint NOT NULL,
    first_step bigint NOT NULL,
    last_step bigint NOT NULL,
    num_steps integer NOT NULL,
    columns text NOT NULL,
    payload bytea NOT NULL
)
PARTITION BY RANGE (run_key);
-- next
ALTER TABLE ONLY public.telemetry_chunks ALTER COLUMN payload SET STORAGE EXTERNAL;
-- next
CREATE TABLE public.telemetry_chunks_202611 (
    run_key bigint CONSTRAINT telemetry_chunks_run_key_not_null NOT NULL,
    rank integer CONSTRAINT telemetry_chunks_rank_not_null NOT NULL,
    boot_id text CONSTRAINT telemetry_chunks_boot_id_not_null NOT NULL,
    sequence bigint CONSTRAINT telemetry_chunks_sequence_not_null NOT NULL,
    first_step bigint CONSTRAINT telemetry_chunks_first_step_not_null NOT NULL,
    last_step bigint CONSTRAINT telemetry_chunks_last_step_not_null NOT NULL,
    num_steps integer CONSTRAINT telemetry_chunks_num_steps_not_null NOT NULL,
    columns text CONSTRAINT telemetry_chunks_columns_not_null NOT NULL,
    payload bytea CONSTRAINT telemetry_chunks_payload_not_null NOT NULL
);
-- next
ALTER TABLE ONLY public.telemetry_chunks_202611 ALTER COLUMN payload SET STORAGE EXTERNAL;
-- next
CREATE TABLE public.telemetry_chunks_202612 (
    run_key bigint CONSTRAINT telemetry_chunks_run_key_not_null NOT NULL,
    rank integer CONSTRAINT telemetry_chunks_rank_not_null NOT NULL,
    boot_id text CONSTRAINT telemetry_chunks_boot_id_not_null NOT NULL,
    sequence bigint CONSTRAINT telemetry_chunks_sequence_not_null NOT NULL,
    first_step bigint CONSTRAINT telemetry_chunks_first_step_not_null NOT NULL,
    last_step bigint CONSTRAINT telemetry_chunks_last_step_not_null NOT NULL,
    num_steps integer CONSTRAINT telemetry_chunks_num_steps_not_null NOT NULL,
    columns text CONSTRAINT telemetry_chunks_columns_not_null NOT NULL,
    payload bytea CONSTRAINT telemetry_chunks_payload_not_null NOT NULL
);
-- next
ALTER TABLE ONLY public.telemetry_chunks_202612 ALTER COLUMN payload SET STORAGE EXTERNAL;
-- next
CREATE TABLE public.telemetry_chunks_202701 (
    run_key bigint CONSTRAINT telemetry_chunks_run_key_not_null NOT NULL,
    rank integer CONSTRAINT telemetry_chunks_rank_not_null NOT NULL,
    boot_id text CONSTRAINT telemetry_chunks_boot_id_not_null NOT NULL,
    sequence bigint CONSTRAINT telemetry_chunks_sequence_not_null NOT NULL,
    first_step bigint CONSTRAINT telemetry_chunks_first_step_not_null NOT NULL,
    last_step bigint CONSTRAINT telemetry_chunks_last_step_not_null NOT NULL,
    num_steps integer CONSTRAINT telemetry_chunks_num_steps_not_null NOT NULL,
    columns text CONSTRAINT telemetry_chunks_columns_not_null NOT NULL,
    payload bytea CONSTRAINT telemetry_chunks_payload_not_null NOT NULL
);
-- next
ALTER TABLE ONLY public.telemetry_chunks_202701 ALTER COLUMN payload SET STORAGE EXTERNAL;
-- next
CREATE TABLE public.telemetry_columns (
    run_key bigint NOT NULL,
    name text NOT NULL,
    num_steps bigint NOT NULL,
    newest_step bigint,
    newest_value double precision
);
-- next
CREATE TABLE public.tokens (
    id text NOT NULL,
    sha256 text NOT NULL,
    name text NOT NULL,
    scope text NOT NULL,
    project_id text,
    job_id text,
    created_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone,
    last_used_at timestamp with time zone,
    revoked_at timestamp with time zone
);
-- next
ALTER TABLE ONLY public.telemetry_chunks ATTACH PARTITION public.telemetry_chunks_202611 FOR VALUES FROM ('202611000000000') TO ('202612000000000');
-- next
ALTER TABLE ONLY public.telemetry_chunks ATTACH PARTITION public.telemetry_chunks_202612 FOR VALUES FROM ('202612000000000') TO ('202701000000000');
-- next
ALTER TABLE ONLY public.telemetry_chunks ATTACH PARTITION public.telemetry_chunks_202701 FOR VALUES FROM ('202701000000000') TO ('202702000000000');
-- next
ALTER TABLE ONLY public.audit_log ALTER COLUMN id SET DEFAULT nextval('public.audit_log_id_seq'::regclass);
-- next
ALTER TABLE ONLY public.events ALTER COLUMN id SET DEFAULT nextval('public.events_id_seq'::regclass);
-- next
ALTER TABLE ONLY public.fabrics ALTER COLUMN key SET DEFAULT nextval('public.fabrics_key_seq'::regclass);
-- next
ALTER TABLE ONLY public.jobs ALTER COLUMN key SET DEFAULT nextval('public.jobs_key_seq'::regclass);
-- next
ALTER TABLE ONLY public.ledger ALTER COLUMN key SET DEFAULT nextval('public.ledger_key_seq'::regclass);
-- next
ALTER TABLE ONLY public.runs ALTER COLUMN key SET DEFAULT (((to_char((now() AT TIME ZONE 'UTC'::text), 'YYYYMM'::text))::bigint * 1000000000) + nextval('public.runs_key_seq'::regclass));
-- next
ALTER TABLE ONLY public.sample_sources ALTER COLUMN key SET DEFAULT nextval('public.sample_sources_key_seq'::regclass);
-- next
INSERT INTO public.alembic_version VALUES ('0001');
-- next
INSERT INTO public.answers VALUES ('job-8e369bfc8d315d1e', 'kept', 1, '1', '{}', '2026-01-01 00:00:00+00');
-- next
INSERT INTO public.jobs VALUES (1, 'job-8e369bfc8d315d1e', 'default', 'kept', 'digits', 'planning', 'knee', '', '{"name": "kept", "model": {"name": "digits"}, "objective": "knee"}', 2, '2026-01-01 00:00:00+00', '2026-01-01 00:00:00+00', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'current', 0);
-- next
INSERT INTO public.ledger VALUES (1, 'rec-66ff948df8c15fe1', 'job-8e369bfc8d315d1e', '2026-01-01 00:00:00+00', 'knee', 'profiled', '1', NULL, '{}', 1, 0.5, 0.4, 0.6, NULL, NULL, NULL, NULL);
-- next
INSERT INTO public.projects VALUES ('default', 'default', '2026-11-27 13:43:14.974986+00');
-- next
INSERT INTO public.run_summaries VALUES (202611000000001, 20, 20, 20, 0.55, 0.013383049173057965, 0.25, NULL, NULL, NULL, 0.05000000000000001, NULL, 1, NULL, NULL, NULL, 'wall', NULL);
-- next
INSERT INTO public.runs VALUES (202611000000001, 'run-d6631edb768c4d04', 'job-8e369bfc8d315d1e', 'default', 'profile', 'pending', 'default', '', 2, 4, 32, 1, 0, 'plan', '{"precision": "bf16"}', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '2026-01-01 00:00:00+00', 20, 20, 0, 0, NULL, NULL, false);
-- next
INSERT INTO public.sample_sources VALUES (1, 202611000000001, 0, 'boot', 'wall', NULL, NULL, NULL, NULL, NULL, NULL);
-- next
INSERT INTO public.step_samples VALUES (1, 0, 202611000000001, 0, 0, false, 0.5, NULL, NULL, NULL, NULL, NULL, 0.05, NULL);
-- next
INSERT INTO public.step_samples VALUES (1, 1, 202611000000001, 0, 1, false, 0.5052631578947369, 0.25, NULL, NULL, NULL, NULL, 0.05, 1);
-- next
INSERT INTO public.step_samples VALUES (1, 2, 202611000000001, 0, 2, false, 0.5105263157894737, 0.25, NULL, NULL, NULL, NULL, 0.05, 1);
-- next
INSERT INTO public.step_samples VALUES (1, 3, 202611000000001, 0, 3, false, 0.5157894736842106, 0.25, NULL, NULL, NULL, NULL, 0.05, 1);
-- next
INSERT INTO public.step_samples VALUES (1, 4, 202611000000001, 0, 4, false, 0.5210526315789473, 0.25, NULL, NULL, NULL, NULL, 0.05, 1);
-- next
INSERT INTO public.step_samples VALUES (1, 5, 202611000000001, 0, 5, false, 0.5263157894736842, 0.25, NULL, NULL, NULL, NULL, 0.05, 1);
-- next
INSERT INTO public.step_samples VALUES (1, 6, 202611000000001, 0, 6, false, 0.531578947368421, 0.25, NULL, NULL, NULL, NULL, 0.05, 1);
-- next
INSERT INTO public.step_samples VALUES (1, 7, 202611000000001, 0, 7, false, 0.5368421052631579, 0.25, NULL, NULL, NULL, NULL, 0.05, 1);
-- next
INSERT INTO public.step_samples VALUES (1, 8, 202611000000001, 0, 8, false, 0.5421052631578948, 0.25, NULL, NULL, NULL, NULL, 0.05, 1);
-- next
INSERT INTO public.step_samples VALUES (1, 9, 202611000000001, 0, 9, false, 0.5473684210526316, 0.25, NULL, NULL, NULL, NULL, 0.05, 1);
-- next
INSERT INTO public.step_samples VALUES (1, 10, 202611000000001, 0, 10, false, 0.5526315789473684, 0.25, NULL, NULL, NULL, NULL, 0.05, 1);
-- next
INSERT INTO public.step_samples VALUES (1, 11, 202611000000001, 0, 11, false, 0.5578947368421052, 0.25, NULL, NULL, NULL, NULL, 0.05, 1);
-- next
INSERT INTO public.step_samples VALUES (1, 12, 202611000000001, 0, 12, false, 0.5631578947368421, 0.25, NULL, NULL, NULL, NULL, 0.05, 1);
-- next
INSERT INTO public.step_samples VALUES (1, 13, 202611000000001, 0, 13, false, 0.5684210526315789, 0.25, NULL, NULL, NULL, NULL, 0.05, 1);
-- next
INSERT INTO public.step_samples VALUES (1, 14, 202611000000001, 0, 14, false, 0.5736842105263158, 0.25, NULL, NULL, NULL, NULL, 0.05, 1);
-- next
INSERT INTO public.step_samples VALUES (1, 15, 202611000000001, 0, 15, false, 0.5789473684210527, 0.25, NULL, NULL, NULL, NULL, 0.05, 1);
-- next
INSERT INTO public.step_samples VALUES (1, 16, 202611000000001, 0, 16, false, 0.5842105263157895, 0.25, NULL, NULL, NULL, NULL, 0.05, 1);
-- next
INSERT INTO public.step_samples VALUES (1, 17, 202611000000001, 0, 17, false, 0.5894736842105263, 0.25, NULL, NULL, NULL, NULL, 0.05, 1);
-- next
INSERT INTO public.step_samples VALUES (1, 18, 202611000000001, 0, 18, false, 0.5947368421052631, 0.25, NULL, NULL, NULL, NULL, 0.05, 1);
-- next
INSERT INTO public.step_samples VALUES (1, 19, 202611000000001, 0, 19, false, 0.6, 0.25, NULL, NULL, NULL, NULL, 0.05, 1);
-- next
INSERT INTO public.telemetry_chunks_202611 VALUES (202611000000001, 0, 'boot', 0, 0, 9, 10, 'loss,grad_norm', '\x0028b52ffd20b0450300640500000100cdaa00a82eeacd003b4c00f421f83b007f58009709d27f0066e8009b14a966009e7a00778e7f9e00a0b600e3982aa000f0f6fb00010305060800f000081014181c2022003f3f3f40003f40404040404040400910008861442e72918b5ce491b4a10d');
-- next
INSERT INTO public.telemetry_columns VALUES (202611000000001, 'grad_norm', 10, 9, 9);
-- next
INSERT INTO public.telemetry_columns VALUES (202611000000001, 'loss', 10, 9, 3);
-- next
SELECT pg_catalog.setval('public.audit_log_id_seq', 1, false);
-- next
SELECT pg_catalog.setval('public.events_id_seq', 1, false);
-- next
SELECT pg_catalog.setval('public.fabrics_key_seq', 1, false);
-- next
SELECT pg_catalog.setval('public.jobs_key_seq', 1, true);
-- next
SELECT pg_catalog.setval('public.ledger_key_seq', 1, true);
-- next
SELECT pg_catalog.setval('public.runs_key_seq', 1, true);
-- next
SELECT pg_catalog.setval('public.sample_sources_key_seq', 1, true);
-- next
ALTER TABLE ONLY public.alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);
-- next
ALTER TABLE ONLY public.answers
    ADD CONSTRAINT pk_answers PRIMARY KEY (job_id, name);
-- next
ALTER TABLE ONLY public.audit_log
    ADD CONSTRAINT pk_audit_log PRIMARY KEY (id);
-- next
ALTER TABLE ONLY public.events
    ADD CONSTRAINT pk_events PRIMARY KEY (id);
-- next
ALTER TABLE ONLY public.fabrics
    ADD CONSTRAINT pk_fabrics PRIMARY KEY (key);
-- next
ALTER TABLE ONLY public.job_lessons
    ADD CONSTRAINT pk_job_lessons PRIMARY KEY (job_id);
-- next
ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT pk_jobs PRIMARY KEY (key);
-- next
ALTER TABLE ONLY public.ledger
    ADD CONSTRAINT pk_ledger PRIMARY KEY (key);
-- next
ALTER TABLE ONLY public.ledger_outcomes
    ADD CONSTRAINT pk_ledger_outcomes PRIMARY KEY (ledger_id, run_id);
-- next
ALTER TABLE ONLY public.memory_readings
    ADD CONSTRAINT pk_memory_readings PRIMARY KEY (source_key);
-- next
ALTER TABLE ONLY public.projects
    ADD CONSTRAINT pk_projects PRIMARY KEY (id);
-- next
ALTER TABLE ONLY public.run_outputs
    ADD CONSTRAINT pk_run_outputs PRIMARY KEY (run_key);
-- next
ALTER TABLE ONLY public.run_summaries
    ADD CONSTRAINT pk_run_summaries PRIMARY KEY (run_key);
-- next
ALTER TABLE ONLY public.runs
    ADD CONSTRAINT pk_runs PRIMARY KEY (key);
-- next
ALTER TABLE ONLY public.sample_sources
    ADD CONSTRAINT pk_sample_sources PRIMARY KEY (key);
-- next
ALTER TABLE ONLY public.scaling_numbers
    ADD CONSTRAINT pk_scaling_numbers PRIMARY KEY (job_id, policy);
-- next
ALTER TABLE ONLY public.sessions
    ADD CONSTRAINT pk_sessions PRIMARY KEY (sha256);
-- next
ALTER TABLE ONLY public.step_samples
    ADD CONSTRAINT pk_step_samples PRIMARY KEY (source_key, sequence);
-- next
ALTER TABLE ONLY public.telemetry_chunks
    ADD CONSTRAINT pk_telemetry_chunks PRIMARY KEY (run_key, rank, boot_id, sequence);
-- next
ALTER TABLE ONLY public.telemetry_columns
    ADD CONSTRAINT pk_telemetry_columns PRIMARY KEY (run_key, name);
-- next
ALTER TABLE ONLY public.tokens
    ADD CONSTRAINT pk_tokens PRIMARY KEY (id);
-- next
ALTER TABLE ONLY public.telemetry_chunks_202611
    ADD CONSTRAINT telemetry_chunks_202611_pkey PRIMARY KEY (run_key, rank, boot_id, sequence);
-- next
ALTER TABLE ONLY public.telemetry_chunks_202612
    ADD CONSTRAINT telemetry_chunks_202612_pkey PRIMARY KEY (run_key, rank, boot_id, sequence);
-- next
ALTER TABLE ONLY public.telemetry_chunks_202701
    ADD CONSTRAINT telemetry_chunks_202701_pkey PRIMARY KEY (run_key, rank, boot_id, sequence);
-- next
ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT uq_jobs_id UNIQUE (id);
-- next
ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT uq_jobs_project_id_idempotency_key UNIQUE (project_id, idempotency_key);
-- next
ALTER TABLE ONLY public.ledger
    ADD CONSTRAINT uq_ledger_id UNIQUE (id);
-- next
ALTER TABLE ONLY public.projects
    ADD CONSTRAINT uq_projects_name UNIQUE (name);
-- next
ALTER TABLE ONLY public.runs
    ADD CONSTRAINT uq_runs_id UNIQUE (id);
-- next
ALTER TABLE ONLY public.sample_sources
    ADD CONSTRAINT uq_sample_sources_run_key_rank_boot_id UNIQUE (run_key, rank, boot_id);
-- next
ALTER TABLE ONLY public.tokens
    ADD CONSTRAINT uq_tokens_sha256 UNIQUE (sha256);
-- next
CREATE INDEX ix_events_job_id_id ON public.events USING btree (job_id, id);
-- next
CREATE INDEX ix_fabrics_project_id_instance_type_key ON public.fabrics USING btree (project_id, instance_type, key);
-- next
CREATE INDEX ix_jobs_listed ON public.jobs USING btree (project_id, key, state, name, model_name);
-- next
CREATE INDEX ix_jobs_model_name ON public.jobs USING btree (model_name);
-- next
CREATE INDEX ix_jobs_project_id_fingerprint ON public.jobs USING btree (project_id, fingerprint);
-- next
CREATE INDEX ix_jobs_project_id_name ON public.jobs USING btree (project_id, name);
-- next
CREATE INDEX ix_jobs_project_id_state_key ON public.jobs USING btree (project_id, state, key);
-- next
CREATE INDEX ix_jobs_trigrams ON public.jobs USING gin (public.tula_trigrams(lower(((name || ' '::text) || model_name))));
-- next
CREATE INDEX ix_ledger_job_id ON public.ledger USING btree (job_id);
-- next
CREATE INDEX ix_memory_readings_run_key ON public.memory_readings USING btree (run_key);
-- next
CREATE INDEX ix_runs_job_id_state_position_key ON public.runs USING btree (job_id, state, "position", key);
-- next
CREATE INDEX ix_sessions_token_id ON public.sessions USING btree (token_id);
-- next
CREATE INDEX ix_step_samples_run_key_warmup_step ON public.step_samples USING btree (run_key, warmup, step);
-- next
CREATE INDEX ix_telemetry_chunks_run_key_rank_first_step ON ONLY public.telemetry_chunks USING btree (run_key, rank, first_step);
-- next
CREATE INDEX telemetry_chunks_202611_run_key_rank_first_step_idx ON public.telemetry_chunks_202611 USING btree (run_key, rank, first_step);
-- next
CREATE INDEX telemetry_chunks_202612_run_key_rank_first_step_idx ON public.telemetry_chunks_202612 USING btree (run_key, rank, first_step);
-- next
CREATE INDEX telemetry_chunks_202701_run_key_rank_first_step_idx ON public.telemetry_chunks_202701 USING btree (run_key, rank, first_step);
-- next
ALTER INDEX public.pk_telemetry_chunks ATTACH PARTITION public.telemetry_chunks_202611_pkey;
-- next
ALTER INDEX public.ix_telemetry_chunks_run_key_rank_first_step ATTACH PARTITION public.telemetry_chunks_202611_run_key_rank_first_step_idx;
-- next
ALTER INDEX public.pk_telemetry_chunks ATTACH PARTITION public.telemetry_chunks_202612_pkey;
-- next
ALTER INDEX public.ix_telemetry_chunks_run_key_rank_first_step ATTACH PARTITION public.telemetry_chunks_202612_run_key_rank_first_step_idx;
-- next
ALTER INDEX public.pk_telemetry_chunks ATTACH PARTITION public.telemetry_chunks_202701_pkey;
-- next
ALTER INDEX public.ix_telemetry_chunks_run_key_rank_first_step ATTACH PARTITION public.telemetry_chunks_202701_run_key_rank_first_step_idx;
-- next
CREATE TRIGGER ledger_is_immutable BEFORE UPDATE ON public.ledger FOR EACH ROW EXECUTE FUNCTION public.refuse_ledger_update();
-- next
ALTER TABLE ONLY public.answers
    ADD CONSTRAINT fk_answers_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id) ON DELETE CASCADE;
-- next
ALTER TABLE ONLY public.events
    ADD CONSTRAINT fk_events_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id) ON DELETE CASCADE;
-- next
ALTER TABLE ONLY public.fabrics
    ADD CONSTRAINT fk_fabrics_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id) ON DELETE CASCADE;
-- next
ALTER TABLE ONLY public.fabrics
    ADD CONSTRAINT fk_fabrics_project_id FOREIGN KEY (project_id) REFERENCES public.projects(id) ON DELETE CASCADE;
-- next
ALTER TABLE ONLY public.job_lessons
    ADD CONSTRAINT fk_job_lessons_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id) ON DELETE CASCADE;
-- next
ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT fk_jobs_project_id FOREIGN KEY (project_id) REFERENCES public.projects(id) ON DELETE CASCADE;
-- next
ALTER TABLE ONLY public.ledger
    ADD CONSTRAINT fk_ledger_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id) ON DELETE CASCADE;
-- next
ALTER TABLE ONLY public.ledger_outcomes
    ADD CONSTRAINT fk_ledger_outcomes_ledger_id FOREIGN KEY (ledger_id) REFERENCES public.ledger(id) ON DELETE CASCADE;
-- next
ALTER TABLE ONLY public.ledger_outcomes
    ADD CONSTRAINT fk_ledger_outcomes_run_id FOREIGN KEY (run_id) REFERENCES public.runs(id) ON DELETE CASCADE;
-- next
ALTER TABLE ONLY public.memory_readings
    ADD CONSTRAINT fk_memory_readings_source_key FOREIGN KEY (source_key) REFERENCES public.sample_sources(key) ON DELETE CASCADE;
-- next
ALTER TABLE ONLY public.run_outputs
    ADD CONSTRAINT fk_run_outputs_run_key FOREIGN KEY (run_key) REFERENCES public.runs(key) ON DELETE CASCADE;
-- next
ALTER TABLE ONLY public.run_summaries
    ADD CONSTRAINT fk_run_summaries_run_key FOREIGN KEY (run_key) REFERENCES public.runs(key) ON DELETE CASCADE;
-- next
ALTER TABLE ONLY public.runs
    ADD CONSTRAINT fk_runs_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id) ON DELETE CASCADE;
-- next
ALTER TABLE ONLY public.sample_sources
    ADD CONSTRAINT fk_sample_sources_run_key FOREIGN KEY (run_key) REFERENCES public.runs(key) ON DELETE CASCADE;
-- next
ALTER TABLE ONLY public.scaling_numbers
    ADD CONSTRAINT fk_scaling_numbers_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id) ON DELETE CASCADE;
-- next
ALTER TABLE ONLY public.sessions
    ADD CONSTRAINT fk_sessions_token_id FOREIGN KEY (token_id) REFERENCES public.tokens(id) ON DELETE CASCADE;
-- next
ALTER TABLE ONLY public.step_samples
    ADD CONSTRAINT fk_step_samples_source_key FOREIGN KEY (source_key) REFERENCES public.sample_sources(key) ON DELETE CASCADE;
-- next
ALTER TABLE public.telemetry_chunks
    ADD CONSTRAINT fk_telemetry_chunks_run_key FOREIGN KEY (run_key) REFERENCES public.runs(key) ON DELETE CASCADE;
-- next
ALTER TABLE ONLY public.telemetry_columns
    ADD CONSTRAINT fk_telemetry_columns_run_key FOREIGN KEY (run_key) REFERENCES public.runs(key) ON DELETE CASCADE;
-- next
ALTER TABLE ONLY public.tokens
    ADD CONSTRAINT fk_tokens_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id) ON DELETE CASCADE;
-- next
ALTER TABLE ONLY public.tokens
    ADD CONSTRAINT fk_tokens_project_id FOREIGN KEY (project_id) REFERENCES public.projects(id) ON DELETE CASCADE