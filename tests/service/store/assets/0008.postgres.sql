CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
-- next
CREATE TABLE audit_log (
	id BIGSERIAL NOT NULL, 
	at TIMESTAMP WITH TIME ZONE NOT NULL, 
	actor TEXT NOT NULL, 
	action TEXT NOT NULL, 
	target TEXT NOT NULL, 
	detail JSONB NOT NULL, 
	CONSTRAINT pk_audit_log PRIMARY KEY (id)
);
-- next
CREATE TABLE projects (
	id TEXT NOT NULL, 
	name TEXT NOT NULL, 
	created_at TIMESTAMP WITH TIME ZONE NOT NULL, 
	CONSTRAINT pk_projects PRIMARY KEY (id), 
	CONSTRAINT uq_projects_name UNIQUE NULLS DISTINCT (name)
);
-- next
CREATE TABLE fabrics (
	key BIGSERIAL NOT NULL, 
	project_id TEXT NOT NULL, 
	instance_type TEXT NOT NULL, 
	probe JSONB NOT NULL, 
	created_at TIMESTAMP WITH TIME ZONE NOT NULL, 
	CONSTRAINT pk_fabrics PRIMARY KEY (key), 
	CONSTRAINT fk_fabrics_project_id FOREIGN KEY(project_id) REFERENCES projects (id) ON DELETE CASCADE
);
-- next
CREATE INDEX ix_fabrics_project_id_instance_type_key ON fabrics (project_id, instance_type, key);
-- next
CREATE TABLE jobs (
	key BIGSERIAL NOT NULL, 
	id TEXT NOT NULL, 
	project_id TEXT NOT NULL, 
	name TEXT NOT NULL, 
	model_name TEXT NOT NULL, 
	state TEXT NOT NULL, 
	objective TEXT NOT NULL, 
	spec JSONB NOT NULL, 
	data_version BIGINT NOT NULL, 
	plan_reason TEXT NOT NULL, 
	created_at TIMESTAMP WITH TIME ZONE NOT NULL, 
	updated_at TIMESTAMP WITH TIME ZONE NOT NULL, 
	recommended JSONB, 
	predicted_time_s DOUBLE PRECISION, 
	predicted_cost_usd DOUBLE PRECISION, 
	saving_vs_smallest_batch DOUBLE PRECISION, 
	saving_vs_largest_batch DOUBLE PRECISION, 
	prediction_error DOUBLE PRECISION, 
	idempotency_key TEXT, 
	fingerprint TEXT, 
	plan_state TEXT DEFAULT 'current'::text NOT NULL, 
	retried_up_to_key BIGINT DEFAULT '0'::bigint NOT NULL, 
	cross_validated_error DOUBLE PRECISION, 
	cross_validated_runs JSONB, 
	cross_validated_model TEXT, 
	CONSTRAINT pk_jobs PRIMARY KEY (key), 
	CONSTRAINT fk_jobs_project_id FOREIGN KEY(project_id) REFERENCES projects (id) ON DELETE CASCADE, 
	CONSTRAINT uq_jobs_id UNIQUE NULLS DISTINCT (id), 
	CONSTRAINT uq_jobs_project_id_idempotency_key UNIQUE NULLS DISTINCT (project_id, idempotency_key)
);
-- next
CREATE INDEX ix_jobs_listed ON jobs (project_id, key, state, name, model_name);
-- next
CREATE INDEX ix_jobs_project_id_fingerprint ON jobs (project_id, fingerprint);
-- next
CREATE INDEX ix_jobs_project_id_state_key ON jobs (project_id, state, key);
-- next
CREATE INDEX ix_jobs_model_name ON jobs (model_name);
-- next
CREATE TABLE answers (
	job_id TEXT NOT NULL, 
	name TEXT NOT NULL, 
	data_version BIGINT NOT NULL, 
	model_version TEXT NOT NULL, 
	body TEXT NOT NULL, 
	created_at TIMESTAMP WITH TIME ZONE NOT NULL, 
	CONSTRAINT pk_fits PRIMARY KEY (job_id, name), 
	CONSTRAINT fk_fits_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
-- next
CREATE TABLE events (
	id BIGSERIAL NOT NULL, 
	job_id TEXT NOT NULL, 
	run_id TEXT, 
	kind TEXT NOT NULL, 
	at TIMESTAMP WITH TIME ZONE NOT NULL, 
	data JSONB NOT NULL, 
	CONSTRAINT pk_events PRIMARY KEY (id), 
	CONSTRAINT fk_events_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
-- next
CREATE INDEX ix_events_job_id_id ON events (job_id, id);
-- next
CREATE TABLE job_lessons (
	job_id TEXT NOT NULL, 
	posteriors JSONB NOT NULL, 
	prediction_pairs JSONB NOT NULL, 
	CONSTRAINT pk_job_lessons PRIMARY KEY (job_id), 
	CONSTRAINT fk_job_lessons_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
-- next
CREATE TABLE ledger (
	key BIGSERIAL NOT NULL, 
	id TEXT NOT NULL, 
	job_id TEXT NOT NULL, 
	created_at TIMESTAMP WITH TIME ZONE NOT NULL, 
	objective TEXT NOT NULL, 
	basis TEXT NOT NULL, 
	configuration JSONB, 
	prices JSONB NOT NULL, 
	model_version TEXT NOT NULL, 
	data_version BIGINT NOT NULL, 
	step_time_s DOUBLE PRECISION, 
	step_time_low_s DOUBLE PRECISION, 
	step_time_high_s DOUBLE PRECISION, 
	cost_usd DOUBLE PRECISION, 
	cost_low_usd DOUBLE PRECISION, 
	cost_high_usd DOUBLE PRECISION, 
	interval_scale DOUBLE PRECISION, 
	CONSTRAINT pk_ledger PRIMARY KEY (key), 
	CONSTRAINT fk_ledger_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE, 
	CONSTRAINT uq_ledger_id UNIQUE NULLS DISTINCT (id)
);
-- next
CREATE INDEX ix_ledger_job_id ON ledger (job_id);
-- next
CREATE TABLE runs (
	key BIGSERIAL NOT NULL, 
	id TEXT NOT NULL, 
	job_id TEXT NOT NULL, 
	project_id TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	state TEXT NOT NULL, 
	num_nodes INTEGER NOT NULL, 
	ranks_per_node INTEGER NOT NULL, 
	local_batch_size INTEGER NOT NULL, 
	grad_accum_steps INTEGER NOT NULL, 
	instance_type TEXT NOT NULL, 
	purpose TEXT NOT NULL, 
	instruction JSONB, 
	message TEXT, 
	method TEXT, 
	position INTEGER NOT NULL, 
	holder TEXT, 
	lease_s DOUBLE PRECISION, 
	lease_expires_at TIMESTAMP WITH TIME ZONE, 
	created_at TIMESTAMP WITH TIME ZONE NOT NULL, 
	started_at TIMESTAMP WITH TIME ZONE, 
	finished_at TIMESTAMP WITH TIME ZONE, 
	num_samples BIGINT NOT NULL, 
	dropped BIGINT NOT NULL, 
	failed_local_batch_size INTEGER, 
	predicted_step_time_s DOUBLE PRECISION, 
	recommendation_id TEXT, 
	straggler_rank INTEGER, 
	drifted BOOLEAN NOT NULL, 
	drift_state JSONB, 
	origin TEXT DEFAULT 'plan'::text NOT NULL, 
	end_cause TEXT, 
	scaling_step BIGINT, 
	CONSTRAINT pk_runs PRIMARY KEY (key), 
	CONSTRAINT fk_runs_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE, 
	CONSTRAINT uq_runs_id UNIQUE NULLS DISTINCT (id)
);
-- next
CREATE INDEX ix_runs_job_id_state_position_key ON runs (job_id, state, position, key);
-- next
CREATE TABLE scaling_versions (
	job_id TEXT NOT NULL, 
	version INTEGER NOT NULL, 
	body JSONB NOT NULL, 
	created_at TIMESTAMP WITH TIME ZONE NOT NULL, 
	CONSTRAINT pk_scaling_versions PRIMARY KEY (job_id, version), 
	CONSTRAINT fk_scaling_versions_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
-- next
CREATE TABLE tokens (
	id TEXT NOT NULL, 
	sha256 TEXT NOT NULL, 
	name TEXT NOT NULL, 
	scope TEXT NOT NULL, 
	project_id TEXT, 
	job_id TEXT, 
	created_at TIMESTAMP WITH TIME ZONE NOT NULL, 
	expires_at TIMESTAMP WITH TIME ZONE, 
	last_used_at TIMESTAMP WITH TIME ZONE, 
	revoked_at TIMESTAMP WITH TIME ZONE, 
	CONSTRAINT pk_tokens PRIMARY KEY (id), 
	CONSTRAINT fk_tokens_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE, 
	CONSTRAINT fk_tokens_project_id FOREIGN KEY(project_id) REFERENCES projects (id) ON DELETE CASCADE, 
	CONSTRAINT uq_tokens_sha256 UNIQUE NULLS DISTINCT (sha256)
);
-- next
CREATE TABLE ledger_outcomes (
	ledger_id TEXT NOT NULL, 
	run_id TEXT NOT NULL, 
	measured_step_time_s DOUBLE PRECISION NOT NULL, 
	error DOUBLE PRECISION, 
	within_interval BOOLEAN, 
	at TIMESTAMP WITH TIME ZONE NOT NULL, 
	CONSTRAINT pk_ledger_outcomes PRIMARY KEY (ledger_id, run_id), 
	CONSTRAINT fk_ledger_outcomes_ledger_id FOREIGN KEY(ledger_id) REFERENCES ledger (id) ON DELETE CASCADE, 
	CONSTRAINT fk_ledger_outcomes_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
-- next
CREATE TABLE run_outputs (
	run_key BIGINT NOT NULL, 
	text TEXT NOT NULL, 
	CONSTRAINT pk_run_outputs PRIMARY KEY (run_key), 
	CONSTRAINT fk_run_outputs_run_key FOREIGN KEY(run_key) REFERENCES runs (key) ON DELETE CASCADE
);
-- next
CREATE TABLE run_summaries (
	run_key BIGINT NOT NULL, 
	of_num_samples BIGINT NOT NULL, 
	num_samples BIGINT NOT NULL, 
	num_steps BIGINT NOT NULL, 
	step_time_s DOUBLE PRECISION, 
	relative_sd DOUBLE PRECISION, 
	compute_time_s DOUBLE PRECISION, 
	comm_time_s DOUBLE PRECISION, 
	exposed_comm_time_s DOUBLE PRECISION, 
	input_time_s DOUBLE PRECISION, 
	skew_s DOUBLE PRECISION, 
	straggler_rank INTEGER, 
	world_size INTEGER, 
	local_batch_size INTEGER, 
	grad_accum_steps INTEGER, 
	timing_method TEXT, 
	CONSTRAINT pk_run_summaries PRIMARY KEY (run_key), 
	CONSTRAINT fk_run_summaries_run_key FOREIGN KEY(run_key) REFERENCES runs (key) ON DELETE CASCADE
);
-- next
CREATE TABLE sample_sources (
	key BIGSERIAL NOT NULL, 
	run_key BIGINT NOT NULL, 
	rank INTEGER NOT NULL, 
	boot_id TEXT NOT NULL, 
	world_size INTEGER, 
	local_batch_size INTEGER, 
	grad_accum_steps INTEGER, 
	timing_method TEXT NOT NULL, 
	timeline JSONB, 
	CONSTRAINT pk_sample_sources PRIMARY KEY (key), 
	CONSTRAINT fk_sample_sources_run_key FOREIGN KEY(run_key) REFERENCES runs (key) ON DELETE CASCADE, 
	CONSTRAINT uq_sample_sources_run_key_rank_boot_id UNIQUE NULLS DISTINCT (run_key, rank, boot_id)
);
-- next
CREATE TABLE sessions (
	sha256 TEXT NOT NULL, 
	token_id TEXT NOT NULL, 
	created_at TIMESTAMP WITH TIME ZONE NOT NULL, 
	expires_at TIMESTAMP WITH TIME ZONE NOT NULL, 
	CONSTRAINT pk_sessions PRIMARY KEY (sha256), 
	CONSTRAINT fk_sessions_token_id FOREIGN KEY(token_id) REFERENCES tokens (id) ON DELETE CASCADE
);
-- next
CREATE INDEX ix_sessions_token_id ON sessions (token_id);
-- next
CREATE TABLE telemetry_chunks (
	run_key BIGINT NOT NULL, 
	rank INTEGER NOT NULL, 
	boot_id TEXT NOT NULL, 
	sequence BIGINT NOT NULL, 
	first_step BIGINT NOT NULL, 
	last_step BIGINT NOT NULL, 
	num_steps INTEGER NOT NULL, 
	columns TEXT NOT NULL, 
	payload BYTEA NOT NULL, 
	CONSTRAINT pk_telemetry_chunks PRIMARY KEY (run_key, rank, boot_id, sequence), 
	CONSTRAINT fk_telemetry_chunks_run_key FOREIGN KEY(run_key) REFERENCES runs (key) ON DELETE CASCADE
);
-- next
CREATE TABLE memory_readings (
	source_key BIGINT NOT NULL, 
	run_key BIGINT NOT NULL, 
	method TEXT NOT NULL, 
	peak_bytes BIGINT NOT NULL, 
	parameter_bytes BIGINT, 
	gradient_bytes BIGINT, 
	optimizer_bytes BIGINT, 
	activation_bytes BIGINT, 
	batch_bytes BIGINT, 
	reserved_bytes BIGINT, 
	context_bytes BIGINT, 
	capacity_bytes BIGINT, 
	CONSTRAINT pk_memory_readings PRIMARY KEY (source_key), 
	CONSTRAINT fk_memory_readings_source_key FOREIGN KEY(source_key) REFERENCES sample_sources (key) ON DELETE CASCADE
);
-- next
CREATE INDEX ix_memory_readings_run_key ON memory_readings (run_key);
-- next
CREATE TABLE step_samples (
	source_key BIGINT NOT NULL, 
	sequence BIGINT NOT NULL, 
	run_key BIGINT NOT NULL, 
	rank INTEGER NOT NULL, 
	step BIGINT NOT NULL, 
	warmup BOOLEAN NOT NULL, 
	step_time_s DOUBLE PRECISION NOT NULL, 
	compute_time_s DOUBLE PRECISION, 
	comm_time_s DOUBLE PRECISION, 
	exposed_comm_time_s DOUBLE PRECISION, 
	input_time_s DOUBLE PRECISION, 
	skew_s DOUBLE PRECISION, 
	straggler_rank INTEGER, 
	CONSTRAINT pk_step_samples PRIMARY KEY (source_key, sequence), 
	CONSTRAINT fk_step_samples_source_key FOREIGN KEY(source_key) REFERENCES sample_sources (key) ON DELETE CASCADE
);
-- next
CREATE INDEX ix_step_samples_run_key_warmup_step ON step_samples (run_key, warmup, step);
-- next
INSERT INTO "alembic_version" ("version_num") VALUES ('0008');
-- next
INSERT INTO "projects" ("id", "name", "created_at") VALUES ('default', 'default', '2026-11-24 10:00:07.540022+00:00'::timestamptz);
-- next
INSERT INTO "jobs" ("key", "id", "project_id", "name", "model_name", "state", "objective", "spec", "data_version", "plan_reason", "created_at", "updated_at", "recommended", "predicted_time_s", "predicted_cost_usd", "saving_vs_smallest_batch", "saving_vs_largest_batch", "prediction_error", "idempotency_key", "fingerprint", "plan_state", "retried_up_to_key", "cross_validated_error", "cross_validated_runs", "cross_validated_model") VALUES (1, 'job-2c3eaef2df0b4f6e', 'default', 'kept', 'digits', 'planning', 'knee', '{"name": "kept"}'::jsonb, 2, '', '2026-01-01 00:00:00+00:00'::timestamptz, '2026-01-01 00:00:00+00:00'::timestamptz, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'current', 0, NULL, NULL, NULL);
-- next
INSERT INTO "answers" ("job_id", "name", "data_version", "model_version", "body", "created_at") VALUES ('job-2c3eaef2df0b4f6e', 'kept', 1, '1', '{}', '2026-01-01 00:00:00+00:00'::timestamptz);
-- next
INSERT INTO "ledger" ("key", "id", "job_id", "created_at", "objective", "basis", "configuration", "prices", "model_version", "data_version", "step_time_s", "step_time_low_s", "step_time_high_s", "cost_usd", "cost_low_usd", "cost_high_usd", "interval_scale") VALUES (1, 'rec-a9544d4cea145e91', 'job-2c3eaef2df0b4f6e', '2026-01-01 00:00:00+00:00'::timestamptz, 'knee', 'profiled', NULL, '{}'::jsonb, '1', 1, 0.5, 0.4, 0.6, NULL, NULL, NULL, NULL);
-- next
INSERT INTO "runs" ("key", "id", "job_id", "project_id", "kind", "state", "num_nodes", "ranks_per_node", "local_batch_size", "grad_accum_steps", "instance_type", "purpose", "instruction", "message", "method", "position", "holder", "lease_s", "lease_expires_at", "created_at", "started_at", "finished_at", "num_samples", "dropped", "failed_local_batch_size", "predicted_step_time_s", "recommendation_id", "straggler_rank", "drifted", "drift_state", "origin", "end_cause", "scaling_step") VALUES (1, 'run-458a70b9605bfe53', 'job-2c3eaef2df0b4f6e', 'default', 'profile', 'pending', 2, 4, 32, 1, 'default', '', NULL, NULL, NULL, 0, NULL, NULL, NULL, '2026-01-01 00:00:00+00:00'::timestamptz, NULL, NULL, 20, 0, NULL, NULL, NULL, NULL, false, NULL, 'plan', NULL, NULL);
-- next
INSERT INTO "run_summaries" ("run_key", "of_num_samples", "num_samples", "num_steps", "step_time_s", "relative_sd", "compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "straggler_rank", "world_size", "local_batch_size", "grad_accum_steps", "timing_method") VALUES (1, 20, 20, 20, 0.55, 0.012659097182127222, 0.25, NULL, NULL, NULL, NULL, 1, NULL, NULL, NULL, 'wall');
-- next
INSERT INTO "sample_sources" ("key", "run_key", "rank", "boot_id", "world_size", "local_batch_size", "grad_accum_steps", "timing_method", "timeline") VALUES (1, 1, 0, 'boot', NULL, NULL, NULL, 'wall', NULL);
-- next
INSERT INTO "telemetry_chunks" ("run_key", "rank", "boot_id", "sequence", "first_step", "last_step", "num_steps", "columns", "payload") VALUES (1, 0, 'boot', 0, 0, 9, 10, 'loss,grad_norm', '\x0028b52ffd20b0450300640500000100cdaa00a82eeacd003b4c00f421f83b007f58009709d27f0066e8009b14a966009e7a00778e7f9e00a0b600e3982aa000f0f6fb00010305060800f000081014181c2022003f3f3f40003f40404040404040400910008861442e72918b5ce491b4a10d'::bytea);
-- next
INSERT INTO "step_samples" ("source_key", "sequence", "run_key", "rank", "step", "warmup", "step_time_s", "compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "straggler_rank") VALUES (1, 0, 1, 0, 0, false, 0.5, NULL, NULL, NULL, NULL, NULL, NULL);
-- next
INSERT INTO "step_samples" ("source_key", "sequence", "run_key", "rank", "step", "warmup", "step_time_s", "compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "straggler_rank") VALUES (1, 1, 1, 0, 1, false, 0.5052631578947369, 0.25, NULL, NULL, NULL, NULL, 1);
-- next
INSERT INTO "step_samples" ("source_key", "sequence", "run_key", "rank", "step", "warmup", "step_time_s", "compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "straggler_rank") VALUES (1, 2, 1, 0, 2, false, 0.5105263157894737, 0.25, NULL, NULL, NULL, NULL, 1);
-- next
INSERT INTO "step_samples" ("source_key", "sequence", "run_key", "rank", "step", "warmup", "step_time_s", "compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "straggler_rank") VALUES (1, 3, 1, 0, 3, false, 0.5157894736842106, 0.25, NULL, NULL, NULL, NULL, 1);
-- next
INSERT INTO "step_samples" ("source_key", "sequence", "run_key", "rank", "step", "warmup", "step_time_s", "compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "straggler_rank") VALUES (1, 4, 1, 0, 4, false, 0.5210526315789473, 0.25, NULL, NULL, NULL, NULL, 1);
-- next
INSERT INTO "step_samples" ("source_key", "sequence", "run_key", "rank", "step", "warmup", "step_time_s", "compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "straggler_rank") VALUES (1, 5, 1, 0, 5, false, 0.5263157894736842, 0.25, NULL, NULL, NULL, NULL, 1);
-- next
INSERT INTO "step_samples" ("source_key", "sequence", "run_key", "rank", "step", "warmup", "step_time_s", "compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "straggler_rank") VALUES (1, 6, 1, 0, 6, false, 0.531578947368421, 0.25, NULL, NULL, NULL, NULL, 1);
-- next
INSERT INTO "step_samples" ("source_key", "sequence", "run_key", "rank", "step", "warmup", "step_time_s", "compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "straggler_rank") VALUES (1, 7, 1, 0, 7, false, 0.5368421052631579, 0.25, NULL, NULL, NULL, NULL, 1);
-- next
INSERT INTO "step_samples" ("source_key", "sequence", "run_key", "rank", "step", "warmup", "step_time_s", "compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "straggler_rank") VALUES (1, 8, 1, 0, 8, false, 0.5421052631578948, 0.25, NULL, NULL, NULL, NULL, 1);
-- next
INSERT INTO "step_samples" ("source_key", "sequence", "run_key", "rank", "step", "warmup", "step_time_s", "compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "straggler_rank") VALUES (1, 9, 1, 0, 9, false, 0.5473684210526316, 0.25, NULL, NULL, NULL, NULL, 1);
-- next
INSERT INTO "step_samples" ("source_key", "sequence", "run_key", "rank", "step", "warmup", "step_time_s", "compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "straggler_rank") VALUES (1, 10, 1, 0, 10, false, 0.5526315789473684, 0.25, NULL, NULL, NULL, NULL, 1);
-- next
INSERT INTO "step_samples" ("source_key", "sequence", "run_key", "rank", "step", "warmup", "step_time_s", "compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "straggler_rank") VALUES (1, 11, 1, 0, 11, false, 0.5578947368421052, 0.25, NULL, NULL, NULL, NULL, 1);
-- next
INSERT INTO "step_samples" ("source_key", "sequence", "run_key", "rank", "step", "warmup", "step_time_s", "compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "straggler_rank") VALUES (1, 12, 1, 0, 12, false, 0.5631578947368421, 0.25, NULL, NULL, NULL, NULL, 1);
-- next
INSERT INTO "step_samples" ("source_key", "sequence", "run_key", "rank", "step", "warmup", "step_time_s", "compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "straggler_rank") VALUES (1, 13, 1, 0, 13, false, 0.5684210526315789, 0.25, NULL, NULL, NULL, NULL, 1);
-- next
INSERT INTO "step_samples" ("source_key", "sequence", "run_key", "rank", "step", "warmup", "step_time_s", "compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "straggler_rank") VALUES (1, 14, 1, 0, 14, false, 0.5736842105263158, 0.25, NULL, NULL, NULL, NULL, 1);
-- next
INSERT INTO "step_samples" ("source_key", "sequence", "run_key", "rank", "step", "warmup", "step_time_s", "compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "straggler_rank") VALUES (1, 15, 1, 0, 15, false, 0.5789473684210527, 0.25, NULL, NULL, NULL, NULL, 1);
-- next
INSERT INTO "step_samples" ("source_key", "sequence", "run_key", "rank", "step", "warmup", "step_time_s", "compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "straggler_rank") VALUES (1, 16, 1, 0, 16, false, 0.5842105263157895, 0.25, NULL, NULL, NULL, NULL, 1);
-- next
INSERT INTO "step_samples" ("source_key", "sequence", "run_key", "rank", "step", "warmup", "step_time_s", "compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "straggler_rank") VALUES (1, 17, 1, 0, 17, false, 0.5894736842105263, 0.25, NULL, NULL, NULL, NULL, 1);
-- next
INSERT INTO "step_samples" ("source_key", "sequence", "run_key", "rank", "step", "warmup", "step_time_s", "compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "straggler_rank") VALUES (1, 18, 1, 0, 18, false, 0.5947368421052631, 0.25, NULL, NULL, NULL, NULL, 1);
-- next
INSERT INTO "step_samples" ("source_key", "sequence", "run_key", "rank", "step", "warmup", "step_time_s", "compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s", "straggler_rank") VALUES (1, 19, 1, 0, 19, false, 0.6, 0.25, NULL, NULL, NULL, NULL, 1);
-- next
SELECT setval('public.audit_log_id_seq', (SELECT coalesce(max("id"), 0) + 1 FROM "audit_log"), false);
-- next
SELECT setval('public.fabrics_key_seq', (SELECT coalesce(max("key"), 0) + 1 FROM "fabrics"), false);
-- next
SELECT setval('public.jobs_key_seq', (SELECT coalesce(max("key"), 0) + 1 FROM "jobs"), false);
-- next
SELECT setval('public.events_id_seq', (SELECT coalesce(max("id"), 0) + 1 FROM "events"), false);
-- next
SELECT setval('public.ledger_key_seq', (SELECT coalesce(max("key"), 0) + 1 FROM "ledger"), false);
-- next
SELECT setval('public.runs_key_seq', (SELECT coalesce(max("key"), 0) + 1 FROM "runs"), false);
-- next
SELECT setval('public.sample_sources_key_seq', (SELECT coalesce(max("key"), 0) + 1 FROM "sample_sources"), false)