"""What is known of one job, computed from `JobData` alone: evidence, priors, the answer, the plan and its wording."""
