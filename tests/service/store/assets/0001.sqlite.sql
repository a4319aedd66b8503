CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
-- next
INSERT INTO "alembic_version" VALUES('0001');
-- next
CREATE TABLE answers (
	job_id TEXT NOT NULL, 
	name TEXT NOT NULL, 
	data_version BIGINT NOT NULL, 
	model_version TEXT NOT NULL, 
	body TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_answers PRIMARY KEY (job_id, name), 
	CONSTRAINT fk_answers_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
-- next
INSERT INTO "answers" VALUES('job-4ba2ccb0071bc57f','kept',1,'1','{}','2026-01-01 00:00:00.000000');
-- next
CREATE TABLE audit_log (
	id INTEGER NOT NULL, 
	at DATETIME NOT NULL, 
	actor TEXT NOT NULL, 
	action TEXT NOT NULL, 
	target TEXT NOT NULL, 
	detail JSON NOT NULL, 
	CONSTRAINT pk_audit_log PRIMARY KEY (id)
);
-- next
CREATE TABLE events (
	id INTEGER NOT NULL, 
	job_id TEXT NOT NULL, 
	run_id TEXT, 
	kind TEXT NOT NULL, 
	at DATETIME NOT NULL, 
	data JSON NOT NULL, 
	CONSTRAINT pk_events PRIMARY KEY (id), 
	CONSTRAINT fk_events_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
-- next
CREATE TABLE fabrics (
	"key" INTEGER NOT NULL, 
	project_id TEXT NOT NULL, 
	instance_type TEXT NOT NULL, 
	job_id TEXT, 
	probe JSON NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_fabrics PRIMARY KEY ("key"), 
	CONSTRAINT fk_fabrics_project_id FOREIGN KEY(project_id) REFERENCES projects (id) ON DELETE CASCADE, 
	CONSTRAINT fk_fabrics_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
-- next
CREATE TABLE job_lessons (
	job_id TEXT NOT NULL, 
	posteriors JSON NOT NULL, 
	prediction_pairs JSON NOT NULL, 
	CONSTRAINT pk_job_lessons PRIMARY KEY (job_id), 
	CONSTRAINT fk_job_lessons_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
-- next
CREATE TABLE jobs (
	"key" INTEGER NOT NULL, 
	id TEXT NOT NULL, 
	project_id TEXT NOT NULL, 
	name TEXT NOT NULL, 
	model_name TEXT NOT NULL, 
	state TEXT NOT NULL, 
	objective TEXT NOT NULL, 
	plan_reason TEXT NOT NULL, 
	spec JSON NOT NULL, 
	data_version BIGINT NOT NULL, 
	created_at DATETIME NOT NULL, 
	updated_at DATETIME NOT NULL, 
	recommended JSON, 
	cross_validated_runs JSON, 
	predicted_time_s DOUBLE, 
	predicted_cost_usd DOUBLE, 
	saving_vs_smallest_batch DOUBLE, 
	saving_vs_largest_batch DOUBLE, 
	prediction_error DOUBLE, 
	cross_validated_error DOUBLE, 
	idempotency_key TEXT, 
	fingerprint TEXT, 
	cross_validated_model TEXT, 
	plan_state TEXT DEFAULT 'current' NOT NULL, 
	retried_up_to_key INTEGER DEFAULT '0' NOT NULL, 
	CONSTRAINT pk_jobs PRIMARY KEY ("key"), 
	CONSTRAINT uq_jobs_project_id_idempotency_key UNIQUE (project_id, idempotency_key), 
	CONSTRAINT uq_jobs_id UNIQUE (id), 
	CONSTRAINT fk_jobs_project_id FOREIGN KEY(project_id) REFERENCES projects (id) ON DELETE CASCADE
);
-- next
INSERT INTO "jobs" VALUES(1,'job-4ba2ccb0071bc57f','default','kept','digits','planning','knee','','{"name":"kept","model":{"name":"digits"},"objective":"knee"}',2,'2026-01-01 00:00:00.000000','2026-01-01 00:00:00.000000',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'current',0);
-- next
CREATE TABLE ledger (
	"key" INTEGER NOT NULL, 
	id TEXT NOT NULL, 
	job_id TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	objective TEXT NOT NULL, 
	basis TEXT NOT NULL, 
	model_version TEXT NOT NULL, 
	configuration JSON, 
	prices JSON NOT NULL, 
	data_version BIGINT NOT NULL, 
	step_time_s DOUBLE, 
	step_time_low_s DOUBLE, 
	step_time_high_s DOUBLE, 
	interval_scale DOUBLE, 
	cost_usd DOUBLE, 
	cost_low_usd DOUBLE, 
	cost_high_usd DOUBLE, 
	CONSTRAINT pk_ledger PRIMARY KEY ("key"), 
	CONSTRAINT uq_ledger_id UNIQUE (id), 
	CONSTRAINT fk_ledger_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
-- next
INSERT INTO "ledger" VALUES(1,'rec-be2ba56ee339bf8f','job-4ba2ccb0071bc57f','2026-01-01 00:00:00.000000','knee','profiled','1',NULL,'{}',1,0.5,0.4,0.6,NULL,NULL,NULL,NULL);
-- next
CREATE TABLE ledger_outcomes (
	ledger_id TEXT NOT NULL, 
	run_id TEXT NOT NULL, 
	measured_step_time_s DOUBLE NOT NULL, 
	error DOUBLE, 
	within_interval BOOLEAN, 
	at DATETIME NOT NULL, 
	CONSTRAINT pk_ledger_outcomes PRIMARY KEY (ledger_id, run_id), 
	CONSTRAINT fk_ledger_outcomes_ledger_id FOREIGN KEY(ledger_id) REFERENCES ledger (id) ON DELETE CASCADE, 
	CONSTRAINT fk_ledger_outcomes_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
-- next
CREATE TABLE memory_readings (
	source_key INTEGER NOT NULL, 
	run_key INTEGER NOT NULL, 
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
	alloc_retries BIGINT, 
	growing_segments BOOLEAN, 
	CONSTRAINT pk_memory_readings PRIMARY KEY (source_key), 
	CONSTRAINT fk_memory_readings_source_key FOREIGN KEY(source_key) REFERENCES sample_sources ("key") ON DELETE CASCADE
);
-- next
CREATE TABLE projects (
	id TEXT NOT NULL, 
	name TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_projects PRIMARY KEY (id), 
	CONSTRAINT uq_projects_name UNIQUE (name)
);
-- next
INSERT INTO "projects" VALUES('default','default','2026-11-27 13:43:13.667755');
-- next
CREATE TABLE run_outputs (
	run_key INTEGER NOT NULL, 
	text TEXT NOT NULL, 
	CONSTRAINT pk_run_outputs PRIMARY KEY (run_key), 
	CONSTRAINT fk_run_outputs_run_key FOREIGN KEY(run_key) REFERENCES runs ("key") ON DELETE CASCADE
);
-- next
CREATE TABLE run_summaries (
	run_key INTEGER NOT NULL, 
	of_num_samples BIGINT NOT NULL, 
	num_samples BIGINT NOT NULL, 
	num_steps BIGINT NOT NULL, 
	step_time_s DOUBLE, 
	relative_sd DOUBLE, 
	compute_time_s DOUBLE, 
	comm_time_s DOUBLE, 
	exposed_comm_time_s DOUBLE, 
	input_time_s DOUBLE, 
	optimizer_time_s DOUBLE, 
	skew_s DOUBLE, 
	straggler_rank INTEGER, 
	world_size INTEGER, 
	local_batch_size INTEGER, 
	grad_accum_steps INTEGER, 
	timing_method TEXT, 
	energy_per_step_j DOUBLE, 
	CONSTRAINT pk_run_summaries PRIMARY KEY (run_key), 
	CONSTRAINT fk_run_summaries_run_key FOREIGN KEY(run_key) REFERENCES runs ("key") ON DELETE CASCADE
);
-- next
INSERT INTO "run_summaries" VALUES(1,20,20,20,0.55,1.33830491730579648201e-02,0.25,NULL,NULL,NULL,5.00000000000000097144e-02,NULL,1,NULL,NULL,NULL,'wall',NULL);
-- next
CREATE TABLE runs (
	"key" INTEGER NOT NULL, 
	id TEXT NOT NULL, 
	job_id TEXT NOT NULL, 
	project_id TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	state TEXT NOT NULL, 
	instance_type TEXT NOT NULL, 
	purpose TEXT NOT NULL, 
	num_nodes INTEGER NOT NULL, 
	ranks_per_node INTEGER NOT NULL, 
	local_batch_size INTEGER NOT NULL, 
	grad_accum_steps INTEGER NOT NULL, 
	position INTEGER NOT NULL, 
	origin TEXT DEFAULT 'plan' NOT NULL, 
	options JSON NOT NULL, 
	instruction JSON, 
	end_cause TEXT, 
	message TEXT, 
	method TEXT, 
	holder TEXT, 
	recommendation_id TEXT, 
	drift_sentence TEXT, 
	lease_s DOUBLE, 
	predicted_step_time_s DOUBLE, 
	time_limit_s DOUBLE, 
	lease_expires_at DATETIME, 
	started_at DATETIME, 
	finished_at DATETIME, 
	created_at DATETIME NOT NULL, 
	num_samples BIGINT NOT NULL, 
	num_measured BIGINT NOT NULL, 
	dropped BIGINT NOT NULL, 
	lease INTEGER DEFAULT '0' NOT NULL, 
	failed_local_batch_size INTEGER, 
	monitor JSON, 
	unsteady BOOLEAN DEFAULT 0 NOT NULL, 
	CONSTRAINT pk_runs PRIMARY KEY ("key"), 
	CONSTRAINT uq_runs_id UNIQUE (id), 
	CONSTRAINT fk_runs_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
-- next
INSERT INTO "runs" VALUES(1,'run-f15da01bd823446d','job-4ba2ccb0071bc57f','default','profile','pending','default','',2,4,32,1,0,'plan','{"precision":"bf16"}',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'2026-01-01 00:00:00.000000',20,20,0,0,NULL,NULL,0);
-- next
CREATE TABLE sample_sources (
	"key" INTEGER NOT NULL, 
	run_key INTEGER NOT NULL, 
	rank INTEGER NOT NULL, 
	boot_id TEXT NOT NULL, 
	timing_method TEXT NOT NULL, 
	world_size INTEGER, 
	local_batch_size INTEGER, 
	grad_accum_steps INTEGER, 
	timeline JSON, 
	machine JSON, 
	energy_per_step_j DOUBLE, 
	CONSTRAINT pk_sample_sources PRIMARY KEY ("key"), 
	CONSTRAINT uq_sample_sources_run_key_rank_boot_id UNIQUE (run_key, rank, boot_id), 
	CONSTRAINT fk_sample_sources_run_key FOREIGN KEY(run_key) REFERENCES runs ("key") ON DELETE CASCADE
);
-- next
INSERT INTO "sample_sources" VALUES(1,1,0,'boot','wall',NULL,NULL,NULL,NULL,NULL,NULL);
-- next
CREATE TABLE scaling_numbers (
	job_id TEXT NOT NULL, 
	policy TEXT NOT NULL, 
	version INTEGER NOT NULL, 
	delta DOUBLE, 
	static_scale DOUBLE, 
	s_min DOUBLE, 
	s_max DOUBLE, 
	small_batch_size BIGINT, 
	CONSTRAINT pk_scaling_numbers PRIMARY KEY (job_id, policy), 
	CONSTRAINT fk_scaling_numbers_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
-- next
CREATE TABLE sessions (
	sha256 TEXT NOT NULL, 
	token_id TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	expires_at DATETIME NOT NULL, 
	CONSTRAINT pk_sessions PRIMARY KEY (sha256), 
	CONSTRAINT fk_sessions_token_id FOREIGN KEY(token_id) REFERENCES tokens (id) ON DELETE CASCADE
);
-- next
CREATE TABLE step_samples (
	source_key INTEGER NOT NULL, 
	sequence BIGINT NOT NULL, 
	run_key INTEGER NOT NULL, 
	rank INTEGER NOT NULL, 
	step BIGINT NOT NULL, 
	warmup BOOLEAN NOT NULL, 
	step_time_s DOUBLE NOT NULL, 
	compute_time_s DOUBLE, 
	comm_time_s DOUBLE, 
	exposed_comm_time_s DOUBLE, 
	input_time_s DOUBLE, 
	skew_s DOUBLE, 
	optimizer_time_s DOUBLE, 
	straggler_rank INTEGER, 
	CONSTRAINT pk_step_samples PRIMARY KEY (source_key, sequence), 
	CONSTRAINT fk_step_samples_source_key FOREIGN KEY(source_key) REFERENCES sample_sources ("key") ON DELETE CASCADE
)
 WITHOUT ROWID

;
-- next
INSERT INTO "step_samples" VALUES(1,0,1,0,0,0,0.5,NULL,NULL,NULL,NULL,NULL,0.05,NULL);
-- next
INSERT INTO "step_samples" VALUES(1,1,1,0,1,0,5.05263157894736858466e-01,0.25,NULL,NULL,NULL,NULL,0.05,1);
-- next
INSERT INTO "step_samples" VALUES(1,2,1,0,2,0,5.10526315789473716932e-01,0.25,NULL,NULL,NULL,NULL,0.05,1);
-- next
INSERT INTO "step_samples" VALUES(1,3,1,0,3,0,5.15789473684210575399e-01,0.25,NULL,NULL,NULL,NULL,0.05,1);
-- next
INSERT INTO "step_samples" VALUES(1,4,1,0,4,0,5.21052631578947322843e-01,0.25,NULL,NULL,NULL,NULL,0.05,1);
-- next
INSERT INTO "step_samples" VALUES(1,5,1,0,5,0,5.26315789473684181309e-01,0.25,NULL,NULL,NULL,NULL,0.05,1);
-- next
INSERT INTO "step_samples" VALUES(1,6,1,0,6,0,0.531578947368421,0.25,NULL,NULL,NULL,NULL,0.05,1);
-- next
INSERT INTO "step_samples" VALUES(1,7,1,0,7,0,5.36842105263157898242e-01,0.25,NULL,NULL,NULL,NULL,0.05,1);
-- next
INSERT INTO "step_samples" VALUES(1,8,1,0,8,0,5.42105263157894756709e-01,0.25,NULL,NULL,NULL,NULL,0.05,1);
-- next
INSERT INTO "step_samples" VALUES(1,9,1,0,9,0,5.47368421052631615175e-01,0.25,NULL,NULL,NULL,NULL,0.05,1);
-- next
INSERT INTO "step_samples" VALUES(1,10,1,0,10,0,5.52631578947368362619e-01,0.25,NULL,NULL,NULL,NULL,0.05,1);
-- next
INSERT INTO "step_samples" VALUES(1,11,1,0,11,0,5.57894736842105221086e-01,0.25,NULL,NULL,NULL,NULL,0.05,1);
-- next
INSERT INTO "step_samples" VALUES(1,12,1,0,12,0,5.63157894736842079552e-01,0.25,NULL,NULL,NULL,NULL,0.05,1);
-- next
INSERT INTO "step_samples" VALUES(1,13,1,0,13,0,5.68421052631578938019e-01,0.25,NULL,NULL,NULL,NULL,0.05,1);
-- next
INSERT INTO "step_samples" VALUES(1,14,1,0,14,0,5.73684210526315796485e-01,0.25,NULL,NULL,NULL,NULL,0.05,1);
-- next
INSERT INTO "step_samples" VALUES(1,15,1,0,15,0,5.78947368421052654952e-01,0.25,NULL,NULL,NULL,NULL,0.05,1);
-- next
INSERT INTO "step_samples" VALUES(1,16,1,0,16,0,5.84210526315789513418e-01,0.25,NULL,NULL,NULL,NULL,0.05,1);
-- next
INSERT INTO "step_samples" VALUES(1,17,1,0,17,0,5.89473684210526260862e-01,0.25,NULL,NULL,NULL,NULL,0.05,1);
-- next
INSERT INTO "step_samples" VALUES(1,18,1,0,18,0,5.94736842105263119329e-01,0.25,NULL,NULL,NULL,NULL,0.05,1);
-- next
INSERT INTO "step_samples" VALUES(1,19,1,0,19,0,0.6,0.25,NULL,NULL,NULL,NULL,0.05,1);
-- next
CREATE TABLE telemetry_chunks (
	run_key INTEGER NOT NULL, 
	rank INTEGER NOT NULL, 
	boot_id TEXT NOT NULL, 
	sequence BIGINT NOT NULL, 
	first_step BIGINT NOT NULL, 
	last_step BIGINT NOT NULL, 
	num_steps INTEGER NOT NULL, 
	columns TEXT NOT NULL, 
	payload BLOB NOT NULL, 
	CONSTRAINT pk_telemetry_chunks PRIMARY KEY (run_key, rank, boot_id, sequence), 
	CONSTRAINT fk_telemetry_chunks_run_key FOREIGN KEY(run_key) REFERENCES runs ("key") ON DELETE CASCADE
);
-- next
INSERT INTO "telemetry_chunks" VALUES(1,0,'boot',0,0,9,10,'loss,grad_norm',X'0028B52FFD20B0450300640500000100CDAA00A82EEACD003B4C00F421F83B007F58009709D27F0066E8009B14A966009E7A00778E7F9E00A0B600E3982AA000F0F6FB00010305060800F000081014181C2022003F3F3F40003F40404040404040400910008861442E72918B5CE491B4A10D');
-- next
CREATE TABLE telemetry_columns (
	run_key INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	num_steps BIGINT NOT NULL, 
	newest_step BIGINT, 
	newest_value DOUBLE, 
	CONSTRAINT pk_telemetry_columns PRIMARY KEY (run_key, name), 
	CONSTRAINT fk_telemetry_columns_run_key FOREIGN KEY(run_key) REFERENCES runs ("key") ON DELETE CASCADE
);
-- next
INSERT INTO "telemetry_columns" VALUES(1,'grad_norm',10,9,9.0);
-- next
INSERT INTO "telemetry_columns" VALUES(1,'loss',10,9,3.0);
-- next
CREATE TABLE tokens (
	id TEXT NOT NULL, 
	sha256 TEXT NOT NULL, 
	name TEXT NOT NULL, 
	scope TEXT NOT NULL, 
	project_id TEXT, 
	job_id TEXT, 
	created_at DATETIME NOT NULL, 
	expires_at DATETIME, 
	last_used_at DATETIME, 
	revoked_at DATETIME, 
	CONSTRAINT pk_tokens PRIMARY KEY (id), 
	CONSTRAINT uq_tokens_sha256 UNIQUE (sha256), 
	CONSTRAINT fk_tokens_project_id FOREIGN KEY(project_id) REFERENCES projects (id) ON DELETE CASCADE, 
	CONSTRAINT fk_tokens_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
-- next
CREATE INDEX ix_jobs_project_id_state_key ON jobs (project_id, state, "key");
-- next
CREATE INDEX ix_jobs_project_id_fingerprint ON jobs (project_id, fingerprint);
-- next
CREATE INDEX ix_jobs_project_id_name ON jobs (project_id, name);
-- next
CREATE INDEX ix_jobs_listed ON jobs (project_id, "key", state, name, model_name);
-- next
CREATE INDEX ix_jobs_model_name ON jobs (model_name);
-- next
CREATE INDEX ix_fabrics_project_id_instance_type_key ON fabrics (project_id, instance_type, "key");
-- next
CREATE INDEX ix_runs_job_id_state_position_key ON runs (job_id, state, position, "key");
-- next
CREATE INDEX ix_step_samples_run_key_warmup_step ON step_samples (run_key, warmup, step);
-- next
CREATE INDEX ix_memory_readings_run_key ON memory_readings (run_key);
-- next
CREATE INDEX ix_telemetry_chunks_run_key_rank_first_step ON telemetry_chunks (run_key, rank, first_step);
-- next
CREATE INDEX ix_ledger_job_id ON ledger (job_id);
-- next
CREATE INDEX ix_events_job_id_id ON events (job_id, id);
-- next
CREATE INDEX ix_sessions_token_id ON sessions (token_id);
-- next
CREATE TRIGGER ledger_is_immutable BEFORE UPDATE ON ledger BEGIN SELECT RAISE(ABORT, 'ledger entries are immutable'); END;
-- next
CREATE TRIGGER jobs_search_insert AFTER INSERT ON jobs BEGIN INSERT INTO jobs_search (rowid, name, model_name) VALUES (new.key, new.name, new.model_name); END;
-- next
CREATE TRIGGER jobs_search_delete AFTER DELETE ON jobs BEGIN INSERT INTO jobs_search (jobs_search, rowid, name, model_name) VALUES ('delete', old.key, old.name, old.model_name); END;
-- next
CREATE VIRTUAL TABLE jobs_search USING fts5(name, model_name, content='jobs', content_rowid='key', tokenize='trigram');
-- next
INSERT INTO jobs_search (jobs_search) VALUES ('rebuild')