"""Turns measured step times and memory use into a recommendation, using a performance model.

The functions are pure: they take and return arrays and dataclasses, and use no I/O, clock, log or wire format. Invalid
input raises `points.ObservationError` (a `ValueError`) with a message of one sentence. Import from the submodules;
`docs/model.md` maps each equation to its function. These are the calls for one job and its candidates, in order:

    model      = step_time_model.fit_step_time(observations, prior=prior, candidates=candidates)
    memory     = memory_model.fit_memory(MemoryObservations(batches, peaks, capacity_bytes=...))
    answer     = choice.recommend(candidates, model, goal, memory={...})      # predict, price, choose
    next_runs  = planner.plan(search, candidates, model, goal=goal, recommendation=answer)
"""
