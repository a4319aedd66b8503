"""Analyses one job, given its `JobData`; no function accesses a transaction, the store or the clock.

data = load_job_data(tx, job)       # usecases/job_data.py: everything that an analysis reads
answer = analyse(data)              # Answer: evidence, one fit, prices, the choice; or Infeasible with its reason
decision = decide_plan(answer)      # PlanDecision: what to profile next, including the verification of the choice
fields = recommendation_fields(...) # the same answer as wire models and sentences
findings = report_findings(data)    # all results as plain data; tula_service/fits.py calls this in another process
"""
