"""The analysis of one job, computed from `JobData` alone: no transaction, no store, no clock.

data = load_job_data(tx, job)       # usecases/job_data.py: everything that an analysis reads
answer = analyse(data)              # Answer: evidence, one fit, prices, the choice; or Infeasible with its reason
decision = decide_plan(answer)      # PlanDecision: what to profile next, verifying the answer's choice
fields = recommendation_fields(...) # the same answer as the wire's models and in words
findings = report_findings(data)    # all of these as plain data, computed in another process: see tula_service/fits.py
"""
