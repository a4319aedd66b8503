"""The performance model: from measured step times and memory to a recommendation. Pure: no I/O, clock, log or wire.

Functions take and return arrays and dataclasses, and are deterministic. Bad input raises `points.ObservationError` (a
`ValueError`) with one sentence. Import from the submodules; `docs/model.md` maps each equation to its function. The
calls for one job and its candidates, in order:

    model      = step_time_model.fit_step_time(observations, prior=prior, candidates=candidates)
    memory     = memory_model.fit_memory(MemoryObservations(batches, peaks, capacity_bytes=...))
    answer     = choice.recommend(candidates, model, goal, memory={...})      # predict, price, choose
    next_runs  = planner.plan(search, candidates, model, goal=goal, recommendation=answer)
"""
